from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.kernels.op import FLOAT_DTYPES, AnyKernel, Op
from tests.kernel_cases import CASES
from tests.kernel_cases.case import Case

FURTHEST = 8.0  # allowed error of one value, as a multiple of the allowed RMS error


def contracts(kernels: tuple[AnyKernel, ...]) -> list[tuple[AnyKernel, torch.dtype]]:
    return [
        (kernel, dtype) for kernel in kernels for dtype in FLOAT_DTYPES if dtype in kernel.dtypes
    ]


def contract_id(kernel: AnyKernel, dtype: torch.dtype) -> str:
    return f"{kernel.op}-{kernel.provider}-{str(dtype).removeprefix('torch.')}"


@cache
def _small(op: Op[Any, Any], dtype: torch.dtype) -> list[Case]:
    return CASES[op].small(dtype, torch.Generator().manual_seed(0))


def cases(kernel: AnyKernel, dtype: torch.dtype, *, first: int = 0, step: int = 1) -> list[Case]:
    """Return every `step`-th case from number `first` on; each case has its own tensors."""
    found = [case for case in _small(kernel.op, dtype) if kernel.reads(case.stored)]
    return [
        replace(case, tensors={name: tensor.clone() for name, tensor in case.tensors.items()})
        for case in found[first % max(1, len(found)) :: step]
    ]


def check(kernel: AnyKernel, case: Case, dtype: torch.dtype) -> None:
    op = kernel.op
    with torch.inference_mode():
        expected = CASES[op].apply(op.reference, case.upcast())
        actual = CASES[op].apply(kernel, case)
    for want, got in zip(expected, actual, strict=True):
        assert got.shape == want.shape, case.label
        if not want.is_floating_point():
            assert torch.equal(got.long(), want.long()), case.label
        elif case.stored is PLAIN:
            tolerance = op.tolerance[dtype]
            torch.testing.assert_close(
                got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol,
                msg=lambda text: f"{case.label}: {text}",
            )  # fmt: skip
        else:
            check_quantized(op, got.float(), want, case.label)


def check_quantized(op: Op[Any, Any], got: Tensor, want: Tensor, label: str) -> None:
    """Check a GEMM of quantized factors against the op's error at full size.

    The check covers the norm of all errors, and the largest single error.
    """
    size, error = want.norm(), got - want
    assert error.norm() <= op.wide_error * size, f"{label}: {error.norm() / size:.2e}"
    worst = FURTHEST * op.wide_error * size / max(want.numel(), 1) ** 0.5
    assert (error.abs() <= worst).all(), f"{label}: {error.abs().max():.2e}"
