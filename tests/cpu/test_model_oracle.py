import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from m3_support import (
    GREEDY,
    NUM_TOKENS,
    PARAMS,
    TOKENS,
    TOLERANCE,
    check,
    loaded,
    prompts_of,
    run_in_chunks,
)
from model_support import PagedRun, build, checkpoint_tensors, random_weights, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from negamax import LLM, SamplingParams
from negamax.config.kv_cache import set_index_dtype
from negamax.config.model_spec import ModelSpec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.block_sparse import cpu as block_sparse_cpu
from negamax.kernels.block_sparse.selection import BlockSelection
from negamax.kernels.registry import OPS
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.worker import kv_cache
from negamax.worker.warmup import warmup_layers
from tests import drafts, tiny, tiny_m3

# The gate runs some of these random configurations.
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] if seed % 4 else []) for seed in range(24)]


def oracle(config: dict[str, object], seed: int, *, router_bias: float) -> MiniMaxM2ForCausalLM:
    rotary = config["rotary_dim"] / config["head_dim"]  # type: ignore[operator]
    own = ("architectures", "model_type", "rope_theta")
    fields = {name: value for name, value in config.items() if name not in own}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    fields["rope_parameters"] = rope | {"partial_rotary_factor": rotary}
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**fields)).eval().float()
    model.set_experts_implementation("eager")  # The grouped GEMM of transformers refuses odd sizes.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2 - 1) * router_bias)
            elif "norm" in name:
                tensor.copy_(1 + 0.3 * values)
            elif "inv_freq" not in name:
                tensor.copy_(values * tensor.shape[-1] ** -0.5)
    return model


def expected_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def captured(run: PagedRun, chunks: Sequence[list[int]]) -> list[Tensor]:
    """Run one sequence in chunks. Return its captured streams."""
    parts = []
    for chunk in chunks:
        run.step([("a", chunk)])
        parts.append(run.captured)
    return [torch.cat(of_stream) for of_stream in zip(*parts, strict=True)]


def check_streams(got: Sequence[Tensor], expected: Sequence[Tensor], model: Any) -> None:
    *entering, last = got
    for stream, wanted in zip(entering, expected, strict=False):
        torch.testing.assert_close(stream, wanted[0], atol=TOLERANCE, rtol=0)
    with torch.inference_mode():  # transformers' last hidden state is taken after the final norm.
        normed = model.norm(last)
    torch.testing.assert_close(normed, expected[-1][0], atol=TOLERANCE, rtol=0)


def test_captured_streams_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    config = tiny_config(1)
    expected_model = oracle(config, 1, router_bias=5.0)
    expected_model.save_pretrained(tmp_path)
    spec = read_spec(config)
    tokens = [token % spec.vocab_size for token in range(40, 70)]
    with torch.no_grad():
        states = expected_model.model(torch.tensor([tokens]), output_hidden_states=True)
    run = PagedRun(build(spec, load_file(tmp_path / "model.safetensors")), num_blocks=32)
    run.capture = (spec.num_layers, *range(spec.num_layers))
    last, *entering = captured(run, (tokens[:20], tokens[20:29], tokens[29:]))
    check_streams([*entering, last], states.hidden_states, expected_model.model)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_equal_transformers_in_chunked_prefill_and_decode(seed: int, tmp_path: Path) -> None:
    config = tiny_config(seed)
    rng = random.Random(seed)
    expected_model = oracle(config, seed, router_bias=rng.uniform(4.0, 10.0))
    expected_model.save_pretrained(tmp_path)
    spec = read_spec(config)
    model = build(spec, load_file(tmp_path / "model.safetensors"))
    prompts = {
        name: [rng.randrange(spec.vocab_size) for _ in range(rng.randint(20, 60))] for name in "ab"
    }
    run = PagedRun(model, num_blocks=32, block_size=rng.choice((4, 5, 16)))
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    done = {"a": 0, "b": 0}
    while any(done[name] < len(prompts[name]) for name in prompts):
        chunks = []
        for name, tokens in prompts.items():
            left = len(tokens) - done[name]
            if left:  # A few chunks run first, then the last tokens run one by one.
                size = 1 if left <= 8 else min(left - 7, rng.randint(1, 30))
                chunks.append((name, tokens[done[name] : done[name] + size]))
                done[name] += size
        for name, logits in run.step(sorted(chunks, key=lambda chunk: len(chunk[1]) != 1)).items():
            got[name].append(logits)
    for name, tokens in prompts.items():
        expected = expected_logits(expected_model, tokens)
        torch.testing.assert_close(torch.cat(got[name]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", [3, pytest.param(11, marks=pytest.mark.full)])
def test_all_tokens_to_one_expert_and_none_to_the_others(seed: int) -> None:
    """Send every token to the same expert by a router bias above all scores; others stay idle."""
    config = tiny_config(seed, num_local_experts=8, num_experts_per_tok=1, num_hidden_layers=2)
    expected_model = oracle(config, seed, router_bias=0.0)
    spec = read_spec(config)
    bias = torch.zeros(8)
    bias[5] = 100.0
    with torch.no_grad():
        for layer in expected_model.model.layers:
            layer.mlp.e_score_correction_bias.copy_(bias)
    run = PagedRun(build(spec, checkpoint_tensors(expected_model)))
    tokens = list(range(23))
    expected = expected_logits(expected_model, tokens)
    got = torch.cat([run.step([("a", tokens[:22])])["a"], run.step([("a", tokens[22:])])["a"]])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_reference_kernels_alone_give_the_same_logits() -> None:
    spec = read_spec(tiny_config(5))
    weights = random_weights(spec, 5)
    references = dict.fromkeys(OPS, "reference")
    runs = [PagedRun(build(spec, weights, choices=choices)) for choices in ({}, references)]
    for chunk in ([4, 8, 15, 16, 23, 42], [7], [7]):
        chosen, defined = (run.step([("a", chunk)])["a"] for run in runs)
        torch.testing.assert_close(chosen, defined, atol=1e-5, rtol=1e-5)


NUM_SAMPLED = 64


@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(7, 24))]
)
def test_engine_equals_transformers_on_a_random_model(seed: int, tmp_path: Path) -> None:
    model_sizes = tiny.random_sizes(seed)
    vocab_size = model_sizes["vocab_size"]
    model = tiny.make_model(seed, **model_sizes)
    generator = torch.Generator().manual_seed(1000 + seed)
    sizes = (1, 5, 23, 58)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in sizes]
    limits = {"block_size": 8, "max_num_batched_tokens": 11, "max_num_seqs": 3, "num_threads": 1}
    counts = {"max_tokens": NUM_SAMPLED, "logprobs": 5, "prompt_logprobs": 5}
    params = SamplingParams(temperature=0.0, ignore_eos=True, repetition_penalty=1.0, **counts)
    with LLM(str(tiny.save(model, tmp_path)), dtype="float32", **limits) as engine:
        generations = engine.generate(prompts, params)
    check(model, prompts, generations, num_tokens=NUM_SAMPLED)
    scored = [len(generation.prompt_logprobs or ()) for generation in generations]
    assert scored == [size - 1 for size in sizes]


class Pipeline(Decoder):
    """Run all stages of a model in one process; each stage gets only the caches of its layers."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], num_stages: int) -> None:
        self.spec, self.stages = spec, []
        for rank in range(num_stages):
            layout = ParallelLayout(rank=rank, pp=num_stages)
            stage = build(spec, weights, context=replace(ParallelContext.single(), layout=layout))
            assert isinstance(stage, Decoder)
            self.stages.append(stage)

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        *,
        capture: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        hidden: Tensor | None = None
        first = 0
        for stage in self.stages:
            own = kv[first : first + len(stage.layers)]
            hidden, _ = stage.forward(token_ids, metadata, own, entering=hidden)
            first += len(own)
        assert first == len(kv) and hidden is not None
        assert not capture
        return hidden, []

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)


M2 = tiny_config(5, num_hidden_layers=3, vocab_size=64)
# The last two of three stages have no layer with full attention.
M3 = tiny_m3.text_config(
    5, num_hidden_layers=3, vocab_size=64, mlp_layer_types=["dense", "sparse", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
)  # fmt: skip


@pytest.mark.parametrize("config", [M2, M3], ids=["M2", "M3"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_one_after_other_are_whole_model(config: dict[str, object], num_stages: int) -> None:
    spec = read_spec(config)
    weights = random_weights(spec, 7)
    whole = PagedRun(build(spec, weights))
    staged = PagedRun(Pipeline(spec, weights, num_stages))
    steps = [[("a", [3, 1, 4, 1, 5, 9])], [("a", [2]), ("b", [6, 5, 3])], [("a", [5]), ("b", [8])]]
    for step in steps:
        expected, got = whole.step(step), staged.step(step)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_stages_together_hold_every_tensor_once() -> None:
    spec = read_spec(M2)
    held: list[str] = []
    for rank in range(2):
        context = replace(ParallelContext.single(), layout=ParallelLayout(rank=rank, pp=2))
        held += build(spec, loaded=False, context=context).weight_slots()
    assert sorted(held) == sorted(build(spec, loaded=False).weight_slots())


GATE = (1, 2, 6, 7)  # seeds
FIXED: dict[int, dict[str, Any]] = {
    2: {  # In M3.1, attention of all layers is sparse, also in a layer with a dense MLP.
        "num_hidden_layers": 3, "layer_types": ["minimax_m3_sparse"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    # The activations of dense, routed and shared MLPs are clamped.
    6: {"swiglu_limit": 0.5},
    7: {"index_block_size": 128},
}  # fmt: skip


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.full] * (seed not in GATE)) for seed in range(200)],
)
def test_engine_equals_transformers_on_a_random_m3(seed: int, tmp_path: Path) -> None:
    """Run chunks that end inside blocks, answers that exhaust the pool, and a prefix cache hit."""
    sizes = tiny_m3.random_sizes(seed, **FIXED.get(seed, {}))
    model = tiny_m3.make_model(seed, **sizes)
    prompts = prompts_of(seed, sizes)
    block_size = sizes["index_block_size"] * (1 + seed % 3 // 2)
    blocks = [-(-len(prompt) // block_size) for prompt in prompts]
    window = max(map(len, prompts)) + 2 * NUM_TOKENS
    num_blocks = max(sum(blocks) + 1, -(-window // block_size))
    with LLM(
        str(tiny.save(model, tmp_path)), dtype="float32", block_size=block_size,
        max_num_batched_tokens=37, max_num_seqs=3, max_model_len=window, num_kv_blocks=num_blocks,
        num_threads=1,
    ) as engine:  # fmt: skip
        generations = engine.generate(prompts, PARAMS)
        prompts += [prompts[1] + generations[1].outputs[0].token_ids[: 17 + seed % 30], [3]]
        generations += engine.generate(prompts[3:], GREEDY)
        stats = engine.stats()
    check(model, prompts, generations)
    assert stats.cached_prompt_tokens > 0
    # Answers of 48 tokens may not need a further block if blocks are large.
    assert stats.preemption_count > 0 or block_size > NUM_TOKENS


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.full), 6])
def test_drafts_select_blocks(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tiny_m3.random_sizes(seed)
    model = tiny_m3.make_model(seed, **sizes)
    prompts = prompts_of(seed, sizes)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 3, "num_threads": 1}
    folder = str(tiny.save(model, tmp_path))
    with LLM(folder, **options) as engine:
        plain = engine.generate(prompts, GREEDY)
    known = drafts.outputs_of([GREEDY] * 3, prompts, [one.outputs[0].token_ids for one in plain])
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(drafts.RANDOM, known))
    with LLM(folder, **options) as engine:
        generations = engine.generate(prompts, GREEDY)
        assert engine.stats().num_accepted_tokens > NUM_TOKENS
    check(model, prompts, generations)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    sizes = tiny_m3.random_sizes(
        3, num_hidden_layers=4, index_topk_blocks=3, index_local_blocks=1, index_block_size=16,
        shared_intermediate_size=24, intermediate_size=24, num_attention_heads=6,
        num_key_value_heads=2, index_n_heads=2, mlp_layer_types=["dense"] + ["sparse"] * 3,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * 3, swiglu_limit=0.5,
    )  # fmt: skip
    model = tiny_m3.make_model(3, **sizes)
    return model, tiny.save(model, tmp_path_factory.mktemp("deep"))


def test_captured_streams_are_the_hidden_states_of_m3(deep: tuple[Any, Path]) -> None:
    model, folder = deep[0].model.language_model, deep[1]
    with torch.inference_mode():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True)
    run = loaded(folder)
    run.capture = tuple(range(5))
    got = captured(run, (TOKENS[:70], TOKENS[70:75], TOKENS[75:]))
    check_streams(got, states.hidden_states, model)


def test_the_selected_blocks_are_those_of_transformers(deep: tuple[Any, Path]) -> None:
    """Compare the sets of selected blocks of all tokens and index heads; near ties may differ."""
    expected_model, folder = deep
    expected: list[torch.Tensor] = []  # one tensor [heads, tokens, top-k] per sparse layer
    layers = expected_model.model.language_model.layers[1:]
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *those: expected.append(those[2][0]))
        for layer in layers
    ]
    expected_logits(expected_model, TOKENS)
    for hook in hooks:
        hook.remove()
    run = loaded(folder)
    got: list[list[torch.Tensor]] = []  # per layer: [tokens, heads, top-k], index queries
    for layer in run.model.layers[1:]:
        select, own = layer.attention._select, list[tuple[torch.Tensor, torch.Tensor]]()
        got.append(own)

        def record(index_q: torch.Tensor, *rest: Any, select=select, own=own) -> BlockSelection:
            choice = select(index_q, *rest)
            own.append((choice.ids, index_q))
            return choice

        layer.attention._select = record
    run_in_chunks(run, TOKENS)
    is_scored = torch.arange(len(TOKENS)) >= 3 * 16
    for wanted, own, kv in zip(expected, got, run.kv[1:], strict=True):
        ids, index_q = (torch.cat(parts) for parts in zip(*own, strict=True))
        keys = kv["index"][torch.tensor(run.tables["a"])].flatten(0, 2)
        blocks = torch.einsum("thd,jd->thj", index_q, keys).unflatten(-1, (-1, 16)).amax(-1)
        local = (torch.arange(len(TOKENS)) // 16).view(-1, 1, 1)
        others = blocks.masked_fill(torch.arange(blocks.shape[-1]) >= local, -torch.inf)
        second, third = others.topk(3, dim=-1).values[..., 1:].unbind(-1)
        has_margin = (second - third > 1e-4) | ~is_scored.unsqueeze(1)
        same = (ids.sort(-1).values == wanted.transpose(0, 1).sort(-1).values).all(-1)
        assert same[has_margin].all()
        assert has_margin.float().mean() > 0.95
        # More than the last blocks are selected, so that the selection matters.
        assert (ids[:, :, 0] < local.squeeze(-1) - 2)[is_scored].float().mean() > 0.5


@pytest.mark.parametrize("providers", ["chosen", "small tiles", "reference", "without C"])
def test_every_provider_gives_the_same_logits(
    deep: tuple[Any, Path], providers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_model, folder = deep
    attention = ("block_sparse.decode", "block_sparse.prefill", "attention.decode")
    without_c = {"block_sparse.select": "cpu", **dict.fromkeys(attention, "bucketed")}
    choices = {"reference": dict.fromkeys(OPS, "reference"), "without C": without_c}
    if providers == "small tiles":
        monkeypatch.setattr(block_sparse_cpu, "_SCORES", 1000)
    expected = expected_logits(expected_model, TOKENS)
    got = run_in_chunks(loaded(folder, choices=choices.get(providers, {})), TOKENS)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_a_warmup_runs_a_layer_of_each_sort() -> None:
    attention = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 3
    mlps = ["dense", "dense", "sparse", "sparse", "sparse", "dense"]
    sizes = tiny_m3.random_sizes(3, num_hidden_layers=6, layer_types=attention)
    spec = read_spec(
        tiny_m3.make_model(3, **{**sizes, "mlp_layer_types": mlps}).config.to_dict()
        | {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    )
    layers = build(spec, loaded=False).layers
    counts = [warmup_layers(layers[:n], spec.kv_caches()[:n]) for n in range(1, 7)]
    assert counts == [1, 2, 3, 4, 5, 6]


def test_a_model_without_a_shared_expert(deep: tuple[Any, Path], tmp_path: Path) -> None:
    """Compare with transformers, where the output of its shared expert is set to zero."""
    model, folder = deep
    expected_model = copy.deepcopy(model)
    with torch.inference_mode():
        for layer in expected_model.model.language_model.layers[1:]:
            layer.mlp.shared_experts.down_proj.weight.zero_()
    expected = expected_logits(expected_model, TOKENS)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"n_shared_experts": 0, "shared_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "shared_experts" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    got = run_in_chunks(loaded(tmp_path), TOKENS)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_the_engine_keeps_index_keys_in_their_own_dtype(deep: tuple[Any, Path]) -> None:
    options: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 4, "max_model_len": 64}
    sizes = {}
    for dtype in ("auto", "fp8"):
        with LLM(str(deep[1]), dtype="float32", index_cache_dtype=dtype, **options) as engine:
            summary = engine.info.memory
            caches = engine._loop.executor._worker.runner.caches
            sizes[dtype] = sum(cache.nbytes for kv in caches for cache in kv.values())
            assert len(engine.generate([TOKENS[:10]], GREEDY)[0].outputs[0].token_ids) == NUM_TOKENS
        index = " and float8_e4m3fn (index keys)" if dtype == "fp8" else ""
        assert f"in float32{index}, " in summary
    index = 3 * 5 * 16 * 24  # product of layers, blocks, tokens of a block, and width
    assert sizes["auto"] - sizes["fp8"] == 3 * index


def test_text_model_alone_loads_from_its_own_file(deep: tuple[Any, Path], tmp_path: Path) -> None:
    from transformers import MiniMaxM3VLForCausalLM

    model, _ = deep
    text = MiniMaxM3VLForCausalLM(model.config.text_config).float().eval()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.save_pretrained(tmp_path)
    got, expected = run_in_chunks(loaded(tmp_path), TOKENS), expected_logits(model, TOKENS)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("of_keys_and_values", [False, True])
def test_caches_in_fp8_give_what_transformers_does_with_rounded_ones(
    deep: tuple[Any, Path], of_keys_and_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value between two e4m3 numbers may round to either one, which selects other blocks. This
    depends on the CPU. On an AMD EPYC, 87 % of the rows are equal.
    """
    model, folder = deep
    from transformers.cache_utils import DynamicLayer
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer

    keep, keep_index = DynamicLayer.update, MiniMaxM3VLSparseCacheLayer.update_index
    fp8 = torch.float8_e4m3fn

    def rounded(layer: Any, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return keep(layer, k.to(fp8).float(), v.to(fp8).float(), *rest, **named)

    def rounded_index(layer: Any, keys: torch.Tensor) -> torch.Tensor:
        return keep_index(layer, keys.to(fp8).float())

    run = loaded(folder, choices=dict.fromkeys(OPS, "reference") if of_keys_and_values else {})
    caches = set_index_dtype(run.model.spec.kv_caches(), "float8_e4m3fn")
    dtype = fp8 if of_keys_and_values else torch.float32
    sizes: dict[str, Any] = {"block_size": 16, "ranks": 1, "device": torch.device("cpu")}
    run.kv = kv_cache.allocate(caches, 32, dtype=dtype, **sizes)
    got = run_in_chunks(run, TOKENS)
    same = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(MiniMaxM3VLSparseCacheLayer, "update_index", rounded_index)
            if of_keys_and_values:
                monkeypatch.setattr(DynamicLayer, "update", rounded)
        with torch.inference_mode():
            expected = model(torch.tensor([TOKENS]), use_cache=True).logits[0]
        same.append(float(((got - expected).abs().amax(-1) < TOLERANCE).float().mean()))
    assert same[0] < 0.5 and same[1] > 0.8, same
