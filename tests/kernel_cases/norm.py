from functools import partial
from typing import Any

import torch
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.op import AnyKernel
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn, table
from tests.kernel_cases.quantize import outputs as quantized_outputs


def made(
    dtype: torch.dtype,
    generator: torch.Generator,
    shape: tuple[int, ...],
    quantize: bool = False,
    gemma: bool = False,
) -> Case:
    num_tokens, width = shape[0], shape[-1]
    normal = partial(randn, dtype=dtype, generator=generator)
    tensors = {
        "x": normal(*shape, scale=1.0 if len(shape) == 2 else shape[1] ** -0.5),
        "residual": normal(num_tokens, width, scale=4.0),
        "weight": normal(width, scale=0.2) + (not gemma),
    }
    if quantize:
        for name in ("x", "residual"):
            tensors[name][num_tokens // 2 :, ..., :GROUP] = 0  # some groups of zeros
    parts = f" P={shape[1]}" if len(shape) == 3 else ""
    label = f"T={num_tokens} width={width}{parts}{' gemma' * gemma}{' fp8' * quantize}"
    return Case(label, tensors, {"eps": 1e-6, "quantize": quantize, "gemma": gemma})


# shape of x, whether the output is FP8, whether the norm is Gemma's
_SMALL = (
    ((0, 64),), ((1, 256),), ((7, 37),), ((11, 3072),), ((0, 8, 64),), ((1, 8, 256),),
    ((5, 3, 136),), ((3, 1, 200),), ((0, 128), True), ((3, 384), True), ((2, 3, 256), True),
    ((3, 37), False, True), ((2, 3, 256), True, True),
)  # fmt: skip
_M2_WIDE = ((1, 3072), (1, 8, 3072), (16, 8, 3072), (100, 3072), (8192, 3072))
_M3_WIDE = ((1, 6144), (16, 5, 6144), (8192, 5, 6144))
small = table(made, _SMALL)
full_size = table(
    made,
    [
        *((shape, quantize) for shape in _M2_WIDE for quantize in (False, True)),
        *((shape, True, True) for shape in _M3_WIDE),
    ],
)


def quantizes(kernel: AnyKernel, case: Case) -> bool:
    """Return whether the norm writes FP8: the case requests FP8 and the kernel is for GPUs."""
    return case.numbers["quantize"] and Feature.TRITON in kernel.requires


def prepare_case(kernel: AnyKernel, case: Case) -> Any:
    options = {"quantize": quantizes(kernel, case), "gemma": case.numbers["gemma"]}
    return kernel.prepare(case.tensors["weight"], case.numbers["eps"], **options)


def apply_add_rms(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    residual = case.tensors["residual"].clone()
    out = kernel.run(case.tensors["x"], residual, prepare_case(kernel, case))
    return (*case_outputs(out, case), residual)


def case_outputs(out: Tensor | QuantizedActivations, case: Case) -> tuple[Tensor, ...]:
    """Return the norm's output as tensors to compare: one, or two for FP8."""
    if isinstance(out, QuantizedActivations):
        return quantized_outputs(out)
    return (out, out) if case.numbers["quantize"] else (out,)


def cost(case: Case) -> Cost:
    x, residual, weight = case.tensors["x"], case.tensors["residual"], case.tensors["weight"]
    in_fp8 = residual.numel() + 4 * residual.numel() // GROUP if case.numbers["quantize"] else 0
    moved = num_bytes(x) + 3 * num_bytes(residual) + num_bytes(weight) + in_fp8
    return Cost(num_bytes=moved, flops=x.numel() + 5 * residual.numel())


CASES = {ADD_RMS: OpCases(small, apply_add_rms, cost, full_size)}
