"""y = x W^T with W stored [out, in], as in a checkpoint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], one dtype."""
    return F.linear(x, weight)


def keep(weight: Tensor) -> Tensor:
    """The weight as it is: the reference reads the checkpoint's own layout."""
    return weight


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, inputs, outputs in ((0, 64, 32), (1, 256, 1536), (3, 37, 5), (16, 512, 256), (130, 56, 96)):
        tensors = {
            "x": randn(num_tokens, inputs, dtype=dtype, generator=generator),
            "weight": randn(outputs, inputs, dtype=dtype, generator=generator, scale=inputs**-0.5),
        }
        cases.append(Case(f"T={num_tokens} in={inputs} out={outputs}", tensors))
    return cases


def _apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    assert kernel.prepare is not None
    return (kernel.run(case.tensors["x"], kernel.prepare(case.tensors["weight"])),)


def _cost(case: Case) -> Cost:
    x, weight = case.tensors["x"], case.tensors["weight"]
    out_bytes = x.shape[0] * weight.shape[0] * x.element_size()
    return Cost(num_bytes=num_bytes(x, weight) + out_bytes, flops=2 * x.shape[0] * weight.numel())


OPS = (
    Op(
        name="gemm.linear",
        summary="x W^T with the weight prepared at load",
        reference=Kernel("gemm.linear", "reference", linear, keep),
        cases=_cases,
        apply=_apply,
        tolerance=rounding_tolerance(reason="fp32 sums in another order, one rounding to the dtype; |y| about 1"),
        cost=_cost,
    ),
)
