import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from model_support import PagedRun

from negamax.formats.floats import E4M3_BLOCKS
from negamax.formats.platform import CPU
from negamax.kernels.platform import platform_of
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.registry import OPS, KernelTable, resolve
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import bundled_spec
from negamax.parallel.context import ParallelContext

SPEC = replace(bundled_spec("minimax-m2"), num_layers=2)
BLOCK_SIZE = 64
PLATFORM = platform_of(torch.device("cuda", 0)) if torch.cuda.is_available() else CPU
REFERENCES = KernelTable.of(
    (op.reference for op in OPS.values()), platform=PLATFORM, dtype=torch.float32
)
# A GEMM with FP8 weights and activations loses 2.6 % per rounded factor.
# A 16-bit GEMM loses only the rounding of each result.
BOUNDS = {"stored FP8": 0.05, "bf16": 0.015}  # measured: 0.020, 0.007


def build(kernels: KernelTable, *, keep_quantized: bool, device: torch.device) -> Decoder:
    return build_model(
        SPEC, context=ParallelContext.single(), device=device, kernels=kernels,
        keep_quantized=keep_quantized,
    )  # fmt: skip


def random_weights(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield (name, values, scales or None) of each tensor. Quantized tensors are e4m3 blocks."""
    generator = torch.Generator(device).manual_seed(0)
    model = build(REFERENCES, keep_quantized=False, device=torch.device("meta"))
    slots = model.weight_slots()
    for name, slot in slots.items():
        if slot.optional:
            continue
        noise = torch.randn(slot.shape, generator=generator, device=device)
        if name.endswith("e_score_correction_bias"):
            yield name, 7 + 0.1 * noise, None
        elif len(slot.shape) == 1:
            yield name, 1 + 0.1 * noise, None
        elif slot.source is E4M3_BLOCKS:
            shape = E4M3_BLOCKS.tensors[1].shape(slot.matrix_shape)
            scales = (1 + 0.1 * torch.rand(shape, generator=generator, device=device)) / (
                90 * slot.shape[1] ** 0.5
            )
            yield name, (90 * noise).clamp(-448, 448).to(torch.float8_e4m3fn), scales
        else:
            yield name, noise if "embed" in name else noise * slot.shape[-1] ** -0.5, None


def filled(kernels: KernelTable, *, keep_quantized: bool, device: torch.device) -> Decoder:
    model = build(kernels, keep_quantized=keep_quantized, device=device)
    slots = model.weight_slots()
    for name, values, scales in random_weights(device):
        if scales is not None and keep_quantized:
            slots[name + "_scale_inv"].write(scales)
        elif scales is not None:
            values = dequantize(E4M3_BLOCKS, {"weight": values, "weight_scale_inv": scales})
        slots[name].write(values)
    model.finish_loading()
    return model


def typical_error(
    kernels: KernelTable, *, keep_quantized: bool, device: torch.device, longest: int
) -> float:
    """Return the largest median error of a token over the steps; near ties may change experts."""
    sizes = {"device": device, "block_size": BLOCK_SIZE}
    sizes["num_blocks"] = 3 * ((longest + 40) // BLOCK_SIZE + 2)
    model = filled(kernels, keep_quantized=keep_quantized, device=device)
    oracle = filled(REFERENCES, keep_quantized=False, device=device)
    tested = PagedRun(model, dtype=kernels.dtype, **sizes)
    definition = PagedRun(oracle, dtype=torch.float32, **sizes)
    draw = torch.Generator().manual_seed(2)
    worst = 0.0
    for counts in ([longest, 1, longest // 2 + 3], [17, 2, 5], [1, 1, 1], [1, 1, 1]):
        chunks = [
            (f"s{n}", torch.randint(0, SPEC.vocab_size, (count,), generator=draw).tolist())
            for n, count in enumerate(counts)
        ]
        actual, expected = (torch.cat([*run.step(chunks).values()]) for run in (tested, definition))
        assert bool(torch.isfinite(actual).all())
        errors = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(errors.median()))
    return worst


@pytest.mark.parametrize("form", list(BOUNDS))
def test_two_full_layers_give_the_logits_of_the_definition(form: str) -> None:
    kernels = resolve(platform=PLATFORM, dtype=torch.bfloat16)
    error = typical_error(
        kernels, keep_quantized=form == "stored FP8", device=torch.device("cuda"), longest=600
    )
    print(f"{form}: {error:.4f}")
    assert error < BOUNDS[form]
