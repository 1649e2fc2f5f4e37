"""Block-FP8: e4m3 values with one fp32 multiplier for each `block` of rows and columns. PyTorch
reference.

`weight[n, k] = value[n, k] * scale[n // block_rows, k // block_columns]`. Blocks at the lower and
right edge may be ragged. NaN in a stored value stays NaN; a block whose source holds NaN or an
infinity becomes NaN as a whole, so that a broken weight is never taken for a large one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.formats import E4M3_GROUP, E4M3_MAX
from negamax.kernels.op import (
    AnyKernel,
    Case,
    Cost,
    Kernel,
    Op,
    Tolerance,
    num_bytes,
    randn,
)
from negamax.kernels.signatures import QUANTIZE

BLOCK = (E4M3_GROUP, E4M3_GROUP)  # rows, columns


def scale_shape(rows: int, columns: int, *, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Shape of the scale tensor of a `rows` x `columns` weight."""
    return -(-rows // block[0]), -(-columns // block[1])


def dequantize_block(
    weight: Tensor,  # [N, K] float8_e4m3fn
    scale: Tensor,  # [ceil(N / block rows), ceil(K / block columns)] fp32, a multiplier
    *,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [N, K] dtype
    """The plain weight: multiplied in fp32 and rounded once to `dtype`."""
    rows, columns = weight.shape
    assert tuple(scale.shape) == scale_shape(rows, columns, block=block), (
        tuple(weight.shape),
        tuple(scale.shape),
    )
    plain = weight.to(torch.float32)
    return plain.mul_(_spread(scale.to(torch.float32), rows, columns, block=block)).to(dtype)


def quantize_block(
    weight: Tensor,  # [N, K] any float dtype
    *,
    block: tuple[int, int] = BLOCK,
    # [N, K] float8_e4m3fn, [ceil(N / block rows), ceil(K / block columns)] fp32
) -> tuple[Tensor, Tensor]:
    """Values and scales with scale = largest magnitude of the block / 448 (1 for a block of
    zeros).
    """
    rows, columns = weight.shape
    grid = scale_shape(rows, columns, block=block)
    padding = (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)
    padded = torch.nn.functional.pad(weight.to(torch.float32), padding)
    largest = padded.view(grid[0], block[0], grid[1], block[1]).abs().amax(dim=(1, 3))
    # where the quotient underflows to 0, zeros would become NaN
    smallest_scale = torch.finfo(torch.float32).tiny
    scale = torch.where(
        largest == 0, torch.ones_like(largest), (largest / E4M3_MAX).clamp_min(smallest_scale)
    )
    values = weight.to(torch.float32) / _spread(scale, rows, columns, block=block)
    return values.to(torch.float8_e4m3fn), scale


def quantize_activations(x: Tensor) -> QuantizedActivations:
    """x [T, K] any float dtype, K a multiple of 128 -> x with its FP8 form, one scale per token and
    128 columns.

    scale = largest magnitude / 448 (1 for zeros), as for weights.
    """
    num_tokens, width = x.shape
    assert width % GROUP == 0, f"FP8 activations need a multiple of {GROUP} columns, not {width}"
    wide = x.float().view(num_tokens, width // GROUP, GROUP)
    largest = wide.abs().amax(dim=-1)
    scales = (
        (largest / E4M3_MAX)
        .clamp_min(torch.finfo(torch.float32).tiny)
        .masked_fill(largest == 0, 1.0)
    )
    values = (wide / scales[..., None]).to(torch.float8_e4m3fn).view(num_tokens, width)
    return QuantizedActivations(x, values, scales)


def dequantize_activations(x: QuantizedActivations) -> Tensor:
    """What the FP8 form stands for: [T, K] fp32."""
    num_tokens, width = x.q.shape
    return (x.q.float().view(num_tokens, width // GROUP, GROUP) * x.scale[..., None]).view(
        num_tokens, width
    )


def _spread(scale: Tensor, rows: int, columns: int, *, block: tuple[int, int]) -> Tensor:
    """`scale` repeated to one entry per weight element."""
    return scale.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[
        :, :columns
    ]


def _activation_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, width in ((0, 128), (1, 128), (3, 384), (17, 256)):
        x = randn(num_tokens, width, dtype=dtype, generator=generator)
        x[num_tokens // 2 :, :GROUP] = 0  # a group of zeros
        cases.append(Case(f"T={num_tokens} K={width}", {"x": x}))
    return cases


def _wide_activations(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens in (1, 301, 8192):
        x = torch.randn(num_tokens, 3072, device=generator.device, generator=generator).to(dtype)
        cases.append(Case(f"T={num_tokens} K=3072", {"x": x}))
    return cases


def _apply_activations(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    out = kernel.run(case.tensors["x"])
    return out.hidden, dequantize_activations(out), out.scale


def _cost_activations(case: Case) -> Cost:
    x = case.tensors["x"]
    return Cost(num_bytes=num_bytes(x) + x.numel() + 4 * x.numel() // GROUP, flops=2 * x.numel())


_ONE_STEP = Tolerance(
    1e-6, 0.13, "a quotient half-way between two e4m3 values may round to either; a step is 1/8"
)

OPS = (
    Op(
        name=QUANTIZE,
        summary="activations to e4m3 values and one fp32 scale per token and 128 columns",
        reference=Kernel(QUANTIZE, "reference", quantize_activations),
        cases=_activation_cases,
        apply=_apply_activations,
        tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), _ONE_STEP),
        cost=_cost_activations,
        wide=_wide_activations,
    ),
)
