"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32 over the last dimension.

x-hat is rounded to the dtype of x before it is multiplied by the weight, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight with its constants as tensors, which spares their conversion in every call."""

    weight: Tensor  # [width]
    width: Tensor  # [] fp32
    eps: Tensor  # [] fp32


def prepare(weight: Tensor, eps: float) -> NormWeight:
    """weight [width], eps under the root."""
    device = weight.device
    return NormWeight(weight, torch.tensor(float(weight.shape[0]), device=device), torch.tensor(eps, device=device))


def rms(x: Tensor, norm: NormWeight) -> Tensor:
    """x [T, width] in the dtype of the weight -> [T, width]."""
    wide = x.float()
    mean_square = wide.square().sum(-1, keepdim=True).div_(norm.width)  # [T, 1] fp32
    return (wide * mean_square.add_(norm.eps).rsqrt_()).to(x.dtype).mul_(norm.weight)


def add_rms(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor:
    """residual += x, in place; returns the norm of the residual. x, residual [T, width]."""
    return rms(residual.add_(x), norm)


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, width in ((0, 64), (1, 256), (7, 37), (33, 3072)):
        tensors = {
            "x": randn(num_tokens, width, dtype=dtype, generator=generator),
            "residual": randn(num_tokens, width, dtype=dtype, generator=generator, scale=4.0),
            "weight": 1 + randn(width, dtype=dtype, generator=generator, scale=0.2),
        }
        cases.append(Case(f"T={num_tokens} width={width}", tensors, {"eps": 1e-6}))
    return cases


def _apply_rms(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    assert kernel.prepare is not None
    return (kernel.run(case.tensors["x"], kernel.prepare(case.tensors["weight"], case.numbers["eps"])),)


def _apply_add_rms(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    assert kernel.prepare is not None
    t = case.tensors
    residual = t["residual"].clone()
    return kernel.run(t["x"], residual, kernel.prepare(t["weight"], case.numbers["eps"])), residual


def _cost(case: Case) -> Cost:
    x = case.tensors["x"]
    return Cost(num_bytes=2 * num_bytes(x) + num_bytes(case.tensors["weight"]), flops=4 * x.numel())


def _cost_add(case: Case) -> Cost:
    plain = _cost(case)
    return Cost(
        num_bytes=plain.num_bytes + 2 * num_bytes(case.tensors["residual"]), flops=plain.flops + case.tensors["x"].numel()
    )


_TOLERANCE = rounding_tolerance(scale=2.0, reason="x-hat and the product are rounded to the dtype once each; |y| up to 5")

OPS = (
    Op(
        name="norm.rms",
        summary="RMS norm over the last dimension",
        reference=Kernel("norm.rms", "reference", rms, prepare),
        cases=_cases,
        apply=_apply_rms,
        tolerance=_TOLERANCE,
        cost=_cost,
    ),
    Op(
        name="norm.add_rms",
        summary="residual += x, then RMS norm of the residual",
        reference=Kernel("norm.add_rms", "reference", add_rms, prepare),
        cases=_cases,
        apply=_apply_add_rms,
        tolerance=_TOLERANCE,
        cost=_cost_add,
    ),
)
