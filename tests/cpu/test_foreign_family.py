"""A new model family of one folder and one registry line gives the logits of plain PyTorch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from foreign_family.checkpoint import CONFIG, random_tensors, save
from foreign_family.config import FAMILY, ForeignSpec
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.kv_cache import block_bytes
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.models import registry
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.memory import expected_distinct_experts, weight_bytes
from negamax.models.registry import import_names
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.worker.warmup import warmup_layers


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, FAMILY.architecture, FAMILY)
        yield


@pytest.fixture(scope="module")
def spec(registered: None) -> ForeignSpec:
    spec = registry.read_spec(CONFIG)
    assert isinstance(spec, ForeignSpec) and spec.notes == ()
    return spec


@pytest.fixture(scope="module")
def tensors(spec: ForeignSpec) -> dict[str, Tensor]:
    return random_tensors(spec)


@pytest.fixture(scope="module")
def folder(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tensors, tmp_path_factory.mktemp("foreign"))


def new_model(spec: ForeignSpec, *, ranks: int = 1) -> Decoder:
    context = replace(ParallelContext.single(), layout=ParallelLayout(tp=ranks))
    kernels = resolve(platform=CPU, dtype=torch.float32)
    return build_model(spec, context=context, device=torch.device("cpu"), kernels=kernels)


# --- the same model in plain PyTorch, for a whole sequence at once -------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps=CONFIG["rms_norm_eps"])


def rotated(x: Tensor) -> Tensor:
    half = CONFIG["rotary_dim"] // 2
    frequencies = CONFIG["rope_theta"] ** -(torch.arange(half) / half)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def attention(t: Mapping[str, Tensor], x: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = (F.linear(x, t[name]).unflatten(1, (-1, CONFIG["head_dim"])) for name in "qkv")
    q, k = rotated(rms(q, t["q_norm"])), rotated(rms(k, t["k_norm"]))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    return F.linear(out.transpose(0, 1).flatten(1), t["out"])


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mixture(t: Mapping[str, Tensor], x: Tensor) -> Tensor:
    scores = F.linear(x, t["router"]).sigmoid()
    chosen = (scores + t["bias"]).topk(CONFIG["experts_per_token"], dim=-1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for token, experts, shares in zip(x, chosen.tolist(), weights, strict=True):
        parts = [
            swiglu(token, *(t[f"experts.{expert}.{part}"] for part in ("gate", "up", "down")))
            for expert in experts
        ]
        rows.append(shares @ torch.stack(parts))
    return torch.stack(rows)


def plain(tensors: Mapping[str, Tensor], token_ids: list[int]) -> Tensor:
    def under(prefix: str) -> dict[str, Tensor]:
        found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        assert found
        return found

    causal = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()
    h = tensors["tokens.table"][token_ids]
    h = h + attention(under("block0.look."), rms(h, tensors["block0.before_look"]), causal)
    mlp = under("block0.mlp.")
    h = h + swiglu(rms(h, tensors["block0.before_think"]), mlp["gate"], mlp["up"], mlp["down"])
    look, x = under("block1.look."), rms(h, tensors["block1.before_look"])
    fits = F.linear(x, look["index_q"]) @ F.linear(x, look["index_k"]).T
    best = fits.masked_fill(~causal, -math.inf).topk(min(9, len(token_ids)), dim=-1).indices
    h = h + attention(look, x, torch.zeros_like(causal).scatter(1, best, True) & causal)
    h = h + mixture(under("block1.mix."), rms(h, tensors["block1.before_think"]))
    return F.linear(rms(h, tensors["last.scale"]), tensors["vocabulary.matrix"]).log_softmax(-1)


# --- served --------------------------------------------------------------------------------------


def test_engine_gives_what_plain_pytorch_gives(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Check paging, chunks in one batch with decodes, and the prefix cache."""
    generator = torch.Generator().manual_seed(5)
    drawn = {"low": 3, "high": CONFIG["vocab_size"], "generator": generator}
    prompts = [torch.randint(size=(length,), **drawn).tolist() for length in (1, 6, 23, 58)]
    prompts.append(prompts[-1][:40] + prompts[2])
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    options = {"max_num_batched_tokens": 11, "max_num_seqs": 3, "block_size": 8}
    with LLM(str(folder), **options) as llm:
        first = llm.generate(prompts, params)
        again = llm.generate(prompts, msgspec.structs.replace(params, prompt_logprobs=None))
    # Prompt log-probabilities run the whole prompt. Other requests find full blocks in the cache.
    assert [generation.num_cached_tokens for generation in first[:4]] == [0, 0, 0, 0]
    assert [generation.num_cached_tokens for generation in again] == [0, 0, 16, 56, 56]
    for prompt, generations in zip(prompts, zip(first, again, strict=True), strict=True):
        for generation in generations:
            [output] = generation.outputs
            token_ids = list(output.token_ids)
            expected = plain(tensors, prompt + token_ids)[len(prompt) - 1 : -1]
            assert token_ids == expected.argmax(-1).tolist()
            got = torch.tensor([entry.logprob for entry in output.logprobs])
            torch.testing.assert_close(got, expected.amax(-1), atol=2e-4, rtol=0.0)


def test_a_block_size_that_the_index_cannot_be_cut_into_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--block-size is 10.* multiple of 4"):
        LLM(str(folder), block_size=10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_come_from_what_the_family_declares(spec: ForeignSpec, ranks: int) -> None:
    model = new_model(spec, ranks=ranks)
    slots = [slot for slot in model.weight_slots().values() if not slot.optional]
    declared = {
        weight.name.replace("*", str(number)): weight.shape
        for weight in import_names(spec).weights(spec)
        for number in range(weight.count)
    }
    assert declared == {slot.name: slot.shape for slot in slots}
    held = sum(4 * math.prod(map(len, slot.region)) for slot in slots if slot.needed)
    assert weight_bytes(spec, dtype="float32", layout=ParallelLayout(tp=ranks)) == held
    cached = 2 * 2 * (2 // ranks) * 12 * 4 + 5 * 4
    assert block_bytes(spec.kv_caches(), 8, dtype="float32", ranks=ranks) == 8 * cached
    assert expected_distinct_experts(spec, 1) == pytest.approx(2.0)


def test_warmup_and_synthetic_weights_follow_the_family(spec: ForeignSpec) -> None:
    (dense, sparse), (full, indexed) = new_model(spec).layers, spec.kv_caches()
    assert warmup_layers([dense], [full]) == 1
    assert warmup_layers([dense] * 3, [full] * 3) == 2
    assert warmup_layers([dense] * 3 + [sparse] * 2, [full] * 3 + [indexed] * 2) == 5
    assert warmup_layers([dense] * 3, [full, full, indexed]) == 3
    model = new_model(spec)
    fill_synthetic(model.weight_slots(), spec, 0)
    model.finish_loading()
