import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from m2_checkpoints import FP8_CONFIG, load_weights, save_single, to_fp8
from model_support import PagedRun, build, random_weights, tiny_config
from rank_processes import run_ranks
from stored_kernels import keeping_stored

import negamax
from negamax.base.errors import ConfigError
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.checkpoint.weight_cache import load_cached
from negamax.config.model_spec import ModelSpec
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.layers.weights import WeightSlot
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from tests.layouts import full

SIZES = {
    "num_attention_heads": 8, "head_dim": 12, "rotary_dim": 6, "vocab_size": 64, "hidden_size": 37,
    "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
}  # fmt: skip
NANO = Path(negamax.__file__).parent / "assets" / "nano"
TOKENS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# tensor parallel, KV heads, expert parallel; with 2 or 1 KV heads, 4 ranks hold copies of a head
LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2), (4, 4, 4)]


def make_spec(kv_heads: int) -> ModelSpec:
    return read_spec(tiny_config(0, num_key_value_heads=kv_heads, **SIZES))


def logits(spec: ModelSpec, context: ParallelContext) -> torch.Tensor:
    run = PagedRun(build(spec, random_weights(spec, 7), context=context), ranks=context.layout.tp)
    chunks = TOKENS[:21], TOKENS[21:38], TOKENS[38:39], TOKENS[39:]
    return torch.cat([run.step([("a", chunk)])["a"] for chunk in chunks])


def head_and_embedding(spec: ModelSpec, context: ParallelContext) -> dict[str, torch.Tensor]:
    model = build(spec, random_weights(spec, 7), context=context)
    hidden = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    assert isinstance(model, Decoder)
    return {
        "ids": torch.tensor(list(model.vocab_range)),
        "local": model.local_logits(hidden),
        "all": model.logits(hidden),
        "embedding": model.embed(torch.arange(spec.vocab_size))[0].x,
    }


def checkpoint_and_synthetic(context: ParallelContext, cache: Path) -> dict[str, torch.Tensor]:
    spec, results = read_spec(json.loads((NANO / "config.json").read_text())), {}
    for source in ("checkpoint", "cache", "synthetic"):
        model = build(spec, context=context, loaded=False)
        slots = model.weight_slots()
        if source == "synthetic":
            fill_synthetic(slots, spec, 3)
        else:
            load = partial(load_summary, slots, spec)
            summary = load_cached(cache, slots, checkpoint=NANO, layout=context.layout, load=load)
            assert summary.startswith("loaded weight cache") == (source == "cache")
        model.finish_loading()
        results[source] = PagedRun(model, ranks=context.layout.tp).step([("a", TOKENS)])["a"]
    return results


def load_summary(slots: Mapping[str, WeightSlot], spec: ModelSpec) -> str:
    return load_weights(slots, spec, NANO).summary()


def padded_spec() -> ModelSpec:
    """Make FP8 experts three blocks wide and heads 12 wide, which most layouts split unevenly."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_local_experts": 4}
    config = tiny_config(0, num_key_value_heads=2, **SIZES | sizes)
    return read_spec({**config, "quantization_config": FP8_CONFIG})


def padded(context: ParallelContext, checkpoint: Path) -> torch.Tensor:
    kernels = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
    model = build(padded_spec(), context=context, kernels=kernels, loaded=False)
    report = load_weights(model.weight_slots(), model.spec, checkpoint)
    assert report.num_dequantized == (8 if context.layout.tp > 1 else 6)  # o_proj may be whole.
    model.finish_loading()
    return PagedRun(model, ranks=context.layout.tp).step([("a", TOKENS)])["a"]


def compute_all(case: int, context: ParallelContext, folder: Path) -> dict[str, torch.Tensor]:
    _, kv_heads, ep = LAYOUTS[case]
    spec = make_spec(kv_heads)
    found = {"logits": logits(spec, context), "padded": padded(context, folder)}
    found |= head_and_embedding(spec, context)
    if ep > 1:
        found |= checkpoint_and_synthetic(context, folder / f"cache-{case}-{context.layout.tp}")
    return found


def one_rank(rank: int, tp: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case, (size, _, ep) in enumerate(LAYOUTS):
        if size == tp:
            layout = ParallelLayout(rank=rank, tp=tp, ep=ep)
            context = ParallelContext.gloo(layout, f"{folder}/meet-{case}")
            torch.save(compute_all(case, context, Path(folder)), f"{folder}/{case}-{rank}.pt")
            context.close()


@pytest.fixture(scope="module", params=[2, full(4)])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("gloo")
    save_single(folder, to_fp8(random_weights(padded_spec(), 7)))
    run_ranks(one_rank, request.param, str(folder), world=request.param)
    return request.param, folder


def test_every_rank_has_the_results_of_a_single_rank(world: tuple[int, Path]) -> None:
    """Compare chunks, padded experts, the vocabulary, checkpoints and synthetic weights."""
    tp, folder = world
    for case, (size, kv_heads, ep) in enumerate(LAYOUTS):
        if size != tp:
            continue
        what = f"tp, kv, ep = {tp, kv_heads, ep}"
        expected = compute_all(case, ParallelContext.single(), folder)
        ranks = [torch.load(folder / f"{case}-{rank}.pt", weights_only=True) for rank in range(tp)]
        for name, got in product(("logits", "padded", "all"), ranks):
            limits = {"atol": 1e-5, "rtol": 1e-5, "msg": f"{name}, {what}"}
            torch.testing.assert_close(got[name], expected[name], **limits)
        assert all(torch.equal(ranks[0]["logits"], got["logits"]) for got in ranks)
        # Each rank has its token ids and no others.
        assert torch.equal(torch.cat([got["ids"] for got in ranks]), expected["ids"])
        for got in ranks:
            ids = got["ids"]
            torch.testing.assert_close(got["local"], expected["all"][:, ids], atol=1e-5, rtol=1e-5)
            assert torch.equal(got["embedding"][ids], expected["embedding"][ids])
        assert torch.equal(sum(got["embedding"] for got in ranks), expected["embedding"])
        if ep == 1:
            continue
        for source, got in product(("checkpoint", "cache", "synthetic"), ranks):
            limits = {"atol": 1e-4, "rtol": 1e-4, "msg": f"{source}, {what}"}
            torch.testing.assert_close(got[source], expected[source], **limits)
            assert torch.equal(got["cache"], got["checkpoint"])


def test_refuses_sizes_that_do_not_split() -> None:
    kernels = resolve(platform=CPU, dtype=torch.float32)

    def refused(layout: ParallelLayout, **sizes: int) -> str:
        spec = read_spec(tiny_config(0, **SIZES | {"num_key_value_heads": 2} | sizes))
        context = replace(ParallelContext.single(), layout=layout)
        device = torch.device("cpu")
        with pytest.raises(ConfigError) as caught:
            build_model(spec, context=context, device=device, kernels=kernels)
        return str(caught.value)

    three = ParallelLayout(tp=3)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert "2 KV heads cannot be split or replicated over 3 ranks" in refused(three)
    assert "attention heads 8 cannot be split over 6" in refused(ParallelLayout(tp=6))
    assert "vocabulary size 64 cannot be split over 3 ranks" in refused(three, **heads)


def test_slots_of_other_ranks_experts_are_not_needed() -> None:
    spec = make_spec(2)
    context = replace(ParallelContext.single(), layout=ParallelLayout(rank=1, tp=2, ep=2))
    slots = build(spec, context=context, loaded=False).weight_slots()
    experts = {name: slot.needed for name, slot in slots.items() if ".experts." in name}
    assert sum(experts.values()) * 2 == len(experts)
    assert not experts["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    assert experts["model.layers.0.block_sparse_moe.experts.4.w1.weight"]
