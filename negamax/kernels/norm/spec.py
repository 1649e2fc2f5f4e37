"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32 over the last
dimension.

x-hat is rounded to the dtype of x before it is multiplied by the weight, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, unquantized
from negamax.kernels.formats import E4M3_MAX
from negamax.kernels.op import AnyKernel, Case, Cost, Kernel, Op, num_bytes, rounding_tolerance
from negamax.kernels.signatures import ADD_RMS


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight with its constants as tensors, which spares their conversion in every
    call.
    """

    weight: Tensor  # [width]
    width: Tensor  # [] fp32
    eps: Tensor  # [] fp32
    eps_value: float
    quantize: bool  # whether the kernel returns `QuantizedActivations`; the reference never does


def norm_weight(weight: Tensor, eps: float, *, quantize: bool) -> NormWeight:
    """weight [width], eps under the root."""
    width = torch.tensor(float(weight.shape[0]), device=weight.device)
    return NormWeight(
        weight, width, torch.tensor(eps, device=weight.device), eps_value=eps, quantize=quantize
    )


def prepare(weight: Tensor, eps: float, *, quantize: bool = False) -> NormWeight:
    """weight [width], eps under the root."""
    assert not quantize, "the reference computes in the model's dtype only"
    return norm_weight(weight, eps, quantize=False)


def rms(x: Tensor, norm: NormWeight) -> Tensor:
    """x [T, width] in the dtype of the weight -> [T, width]."""
    wide = x.float()
    mean_square = wide.square().sum(-1, keepdim=True).div_(norm.width)  # [T, 1] fp32
    return (wide * mean_square.add_(norm.eps).rsqrt_()).to(x.dtype).mul_(norm.weight)


def sum_parts(x: Tensor) -> Tensor:
    """x [T, P, width] summed over its P partial results in fp32 and rounded once; x [T, width] as
    it is.
    """
    return x if x.dim() == 2 else x.float().sum(dim=1).to(x.dtype)


def add_rms(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor:
    """residual += x, in place; returns the norm of the residual. x [T, width] or its parts [T, P,
    width].
    """
    return rms(residual.add_(sum_parts(x)), norm)


def add_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """x [T, width]; no tokens, one, odd counts and widths."""
    sizes = ((0, 64), (1, 256), (7, 37), (33, 3072))
    return [_case((num_tokens, width), dtype, generator) for num_tokens, width in sizes]


def part_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """x [T, P, width]."""
    return [
        _case(shape, dtype, generator)
        for shape in ((0, 8, 64), (1, 8, 256), (5, 3, 136), (3, 1, 200))
    ]


def wide_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """MiniMax-M2's hidden states: one token to a prompt's chunk, as one part or one per chosen
    expert, plain and FP8.
    """
    shapes: tuple[tuple[int, ...], ...] = (
        (1, 3072),
        (1, 8, 3072),
        (16, 8, 3072),
        (100, 3072),
        (8192, 3072),
    )
    return [
        _case(shape, dtype, generator, quantize=quantize)
        for shape in shapes
        for quantize in (False, True)
    ]


def _case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    quantize: bool = False,
) -> Case:
    def normal(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(*sizes, generator=generator, device=generator.device) * scale).to(dtype)

    num_tokens, width = shape[0], shape[-1]
    tensors = {
        "x": normal(*shape, scale=1.0 if len(shape) == 2 else shape[1] ** -0.5),
        "residual": normal(num_tokens, width, scale=4.0),
        "weight": 1 + normal(width, scale=0.2),
    }
    label = (
        f"T={num_tokens} width={width}"
        + (f" P={shape[1]}" if len(shape) == 3 else "")
        + " fp8" * quantize
    )
    return Case(label, tensors, {"eps": 1e-6, "quantize": quantize})


def prepare_case(kernel: AnyKernel, case: Case) -> Any:
    """The norm of a case; with FP8 where the case asks for it, but for the reference."""
    option = (
        {"quantize": True} if case.numbers["quantize"] and kernel.provider != "reference" else {}
    )
    return kernel.prepare(case.tensors["weight"], case.numbers["eps"], **option)


def case_outputs(out: Tensor | QuantizedActivations, case: Case) -> tuple[Tensor, ...]:
    """What a norm returned, as tensors to compare: the plain values and, where the case asks for
    FP8, the same once more with NaN wherever the FP8 form is further away from them than its
    rounding explains."""
    values = unquantized(out)
    if not case.numbers["quantize"]:
        return (values,)
    if not isinstance(out, QuantizedActivations):
        return values, values
    wide = values.float()
    largest = wide.unflatten(-1, (-1, GROUP)).abs().amax(dim=-1)
    scales_fit = (
        out.scale - torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    ).abs() <= 1e-5 * out.scale
    spread = out.scale.repeat_interleave(GROUP, dim=-1)
    # half a step
    values_fit = (out.q.float() * spread - wide).abs() <= wide.abs() / 15.9 + spread / 1023
    fits = values_fit & scales_fit.repeat_interleave(GROUP, dim=-1)
    return values, values.where(fits, torch.nan)


def _apply_add_rms(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    residual = case.tensors["residual"].clone()
    out = kernel.run(case.tensors["x"], residual, prepare_case(kernel, case))
    return (*case_outputs(out, case), residual)


def cost_add(case: Case) -> Cost:
    """x and the residual read, the residual and the norm written, in FP8 too where asked for."""
    x, residual, weight = case.tensors["x"], case.tensors["residual"], case.tensors["weight"]
    in_fp8 = residual.numel() + 4 * residual.numel() // GROUP if case.numbers["quantize"] else 0
    moved = num_bytes(x) + 3 * num_bytes(residual) + num_bytes(weight) + in_fp8
    return Cost(num_bytes=moved, flops=x.numel() + 5 * residual.numel())


_TOLERANCE = rounding_tolerance(
    scale=2.0, reason="x-hat and the product are rounded to the dtype once each; |y| up to 5"
)
WIDE_ERROR = 5e-3  # bf16 keeps 8 bits, and three roundings add up

OPS = (
    Op(
        name=ADD_RMS,
        summary="residual += x, then RMS norm of the residual",
        reference=Kernel(ADD_RMS, "reference", add_rms, prepare),
        cases=add_cases,
        apply=_apply_add_rms,
        tolerance=_TOLERANCE,
        cost=cost_add,
        wide=wide_cases,
        wide_error=WIDE_ERROR,
    ),
)
