import torch
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize.op import QUANTIZE
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn


def small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, width in ((0, 128), (1, 128), (3, 384), (17, 256)):
        x = randn(num_tokens, width, dtype=dtype, generator=generator)
        x[num_tokens // 2 :, :GROUP] = 0
        cases.append(Case(f"T={num_tokens} K={width}", {"x": x}))
    return cases


def full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        Case(f"T={count} K=3072", {"x": randn(count, 3072, dtype=dtype, generator=generator)})
        for count in (1, 301, 8192)
    ]


def apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return outputs(kernel.run(case.tensors["x"]))


def outputs(out: QuantizedActivations) -> tuple[Tensor, Tensor]:
    """Return the plain values, and a copy with NaN where the FP8 values round too far."""
    wide = out.hidden.float()
    largest = wide.unflatten(-1, (-1, GROUP)).abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / torch.finfo(out.q.dtype).max, 1.0)
    scales_fit = (out.scale - scale).abs() <= 1e-5 * out.scale
    spread = out.scale.repeat_interleave(GROUP, dim=-1)
    # half of the distance between two FP8 numbers
    values_fit = (out.q.float() * spread - wide).abs() <= wide.abs() / 15.9 + spread / 1023
    fits = values_fit & scales_fit.repeat_interleave(GROUP, dim=-1)
    return out.hidden, out.hidden.where(fits, torch.nan)


def cost(case: Case) -> Cost:
    x = case.tensors["x"]
    return Cost(num_bytes=num_bytes(x) + x.numel() + 4 * x.numel() // GROUP, flops=2 * x.numel())


CASES = {QUANTIZE: OpCases(small, apply, cost, full_size)}
