from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import triton_support  # noqa: F401  (must precede the kernels)
from m2_checkpoints import FP8_CONFIG, from_fp8, to_fp8
from model_support import PagedRun, build, random_weights, tiny_config
from torch import Tensor

from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import PLAIN
from negamax.formats.platform import CPU
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.gemm import tiles as gemm_tiles
from negamax.kernels.launch.tile import Tile
from negamax.kernels.moe import tiles as moe_tiles
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.kernels.registry import KernelTable, gpu_kernels
from negamax.layers.moe import mixtures
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.quantization import online
from negamax.quantization.detect import detect

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 128, "rotary_dim": 64, "intermediate_size": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,  # The interpreter is slow.
}  # fmt: skip
QUANTIZED = {"quantization_config": FP8_CONFIG, "dtype": "bfloat16"}
SPEC = read_spec(tiny_config(0, **SIZES) | QUANTIZED)
Steps = list[list[tuple[str, list[int]]]]  # pairs of a sequence and its next tokens, for each step
FEW_STEPS: Steps = [[("a", [1, 2])], [("a", [7]), ("b", [3])]]


def use_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use large tiles, since the interpreter runs programs one by one."""
    tiles = moe_tiles.ExpertTiles(
        Tile(1, 128, 128, num_warps=4), Tile(1, 128, 128, num_warps=4), choices=8
    )
    monkeypatch.setattr(moe_tiles.H200MoeTiles, "gemv", lambda self, width, hidden: tiles)
    monkeypatch.setattr(gemm_tiles, "tiles_for", lambda device: gemm_tiles.GemmTiles(1))
    monkeypatch.setattr(gemm_tiles, "gemv", lambda K: (32, 1))


def kernel_table(dtype: torch.dtype = torch.bfloat16) -> KernelTable:
    return KernelTable.of(gpu_kernels(), platform=CPU, dtype=dtype)


def gpu_model(
    weights: Mapping[str, Tensor],
    *,
    keep_quantized: bool = True,
    spec: ModelSpec = SPEC,
    context: ParallelContext | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoder:
    model = build_model(
        spec, context=context or ParallelContext.single(), device=torch.device("cpu"),
        kernels=kernel_table(dtype), keep_quantized=keep_quantized,
    )  # fmt: skip
    for name, slot in model.weight_slots().items():
        if slot.needed and not slot.optional:
            slot.write(weights[name])
    model.finish_loading()
    return model


def large_embeddings(spec: ModelSpec) -> dict[str, Tensor]:
    drawn = random_weights(spec, 3)
    return {name: 5 * each if "embed" in name else each for name, each in drawn.items()}


def fp8_model() -> Decoder:
    return gpu_model(to_fp8(large_embeddings(SPEC)))


def errors(actual: Tensor, expected: Tensor) -> list[float]:
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()


def compare(run: PagedRun, reference: PagedRun, steps: Steps) -> float:
    worst = 0.0
    for step in steps:
        actual, expected = run.step(step), reference.step(step)
        worst = max(
            [worst, *(error for name in actual for error in errors(actual[name], expected[name]))]
        )
    return worst


def test_fp8_and_plain_weights_give_the_defined_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    stored = to_fp8(large_embeddings(SPEC))
    plain = from_fp8(stored)
    run = PagedRun(gpu_model(plain, keep_quantized=False), dtype=torch.bfloat16)
    assert compare(run, PagedRun(build(SPEC, plain)), FEW_STEPS) < 0.05
    run = PagedRun(gpu_model(stored), dtype=torch.bfloat16)
    reference = PagedRun(build(SPEC, plain))
    steps: Steps = [[("a", [1, 2, 3])], [("a", [4]), ("b", [5, 6])]]
    assert compare(run, reference, steps) < 0.1
    expected = reference.step([("a", [7])])["a"]
    for error in errors(padded_decode(run, "a", 7, rows=3), expected):
        assert error < 0.1


@pytest.mark.parametrize("name", ["int4", pytest.param("nvfp4", marks=pytest.mark.full)])
def test_packed_weights_give_the_logits_of_the_matrices_that_they_stand_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    scheme = detect(online.spec(name))
    assert scheme is not None
    stored, plain = {}, {}
    for key, tensor in large_embeddings(SPEC).items():
        plain[key] = tensor
        kept = scheme.format_of(key.removesuffix(".weight"))
        if kept is PLAIN or tensor.dim() != 2:
            stored[key] = plain[key]
            continue
        parts = encode(kept, tensor)
        plain[key] = dequantize(kept, parts)
        stored |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
    spec = replace(SPEC, quantization=online.spec(name))
    run = PagedRun(gpu_model(stored, spec=spec), dtype=torch.bfloat16)
    assert compare(run, PagedRun(build(SPEC, plain)), FEW_STEPS) < 0.05


def padded_decode(run: PagedRun, name: str, token: int, *, rows: int) -> Tensor:
    """Decode `token` beside padding rows, as a captured graph does; return logits [1, vocab]."""
    position, size = run.lengths[name], run.block_size
    spare = run.free.pop()  # Rows of padding write to this block.
    run.lengths[name] += 1
    assert position % size and position // size < len(run.tables[name])
    filled = torch.zeros(rows - 1, dtype=torch.int64)
    slots = torch.tensor([0] + [1] * (rows - 1))
    metadata = AttentionMetadata(
        positions=torch.cat((torch.tensor([position]), filled)), token_slots=slots,
        block_tables=torch.tensor([run.tables[name], [spare] * len(run.tables[name])]),
        block_table_indices=slots, host_seq_lens=(), host_query_lens=(), num_decodes=rows,
        seq_lens=torch.tensor([position + 1] + [0] * (rows - 1), dtype=torch.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        num_actual_tokens=torch.tensor([1], dtype=torch.int32),
    )  # fmt: skip
    mixed, spec = mixtures(run.model.layers), run.model.spec
    chosen = torch.zeros(len(mixed), rows, spec.experts_per_token, dtype=torch.int32)
    for moe, ids in zip(mixed, chosen, strict=True):
        moe.observe(ids)
    with torch.inference_mode():
        hidden, _ = run.model.forward(torch.cat((torch.tensor([token]), filled)), metadata, run.kv)
        logits = run.model.logits(hidden)
    # No row of padding reaches an expert.
    assert (chosen[:, 0] >= 0).all() and (chosen[:, 1:] == -1).all()
    assert torch.isfinite(logits).all()
    return logits[:1]
