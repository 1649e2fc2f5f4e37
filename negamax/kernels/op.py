"""`Op` is the contract of an operation; `Kernel` is one implementation of an op (a provider)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from negamax.formats.floats import is_plain
from negamax.formats.platform import Feature
from negamax.formats.tensor_format import ActivationFormat, TensorFormat

P = TypeVar("P")
R = TypeVar("R")

Prepared = Any  # result of a provider's `prepare`; only the provider's `run` reads it

W8A8 = "triton_w8a8"  # the provider that multiplies int8 with int8, and FP8 with FP8
WEIGHT_ONLY = "triton_weight_only"  # the provider that dequantizes packed weights in registers
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """Bound of an error and its `reason`: |actual - expected| <= atol + rtol * |expected|."""

    atol: float
    rtol: float
    reason: str


EXACT = dict.fromkeys(FLOAT_DTYPES, Tolerance(0.0, 0.0, "whole numbers, or copies"))


class Op(str, Generic[P, R]):
    """The contract of an operation, made by the function `op`. An `Op` is also a string: its name.

    `P` and `R` are the signatures of `prepare` and `run` in the reference and in every provider.
    """

    summary: str
    reference: "Kernel[P, R]"
    tolerance: Mapping[torch.dtype, Tolerance]
    sequence: tuple[str, ...]  # names of the ops that this op fuses, in order
    wide_error: float  # allowed ||out - reference|| / ||reference|| at the sizes of real models


@dataclass(frozen=True)
class Kernel(Generic[P, R]):
    """One implementation of an op.

    The forward pass calls `run`. `prepare` converts rarely changing inputs to the format that `run`
    reads: weights at load, block tables once per step. A kernel is chosen only on platforms with
    all features in `requires`. `reads` returns whether the kernel supports a weight format.
    `activation` is None, or a quantized format in which the kernel also needs its input.
    """

    op: Op[P, R]
    provider: str
    run: R
    prepare: P = None  # type: ignore[assignment]  # for ops without `prepare`
    requires: frozenset[Feature] = frozenset({Feature.CPU})
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    reads: Callable[[TensorFormat], bool] = is_plain
    activation: ActivationFormat | None = None
    columns: int = 1  # the number of columns of a matrix must be a multiple of this number
    available: Callable[[], bool] = lambda: True  # whether this machine can run the kernel

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether weights and activations have 8 bits, which doubles the rate of tensor cores."""
        return self.activation is not None or self.provider == W8A8


AnyKernel = Kernel[Any, Any]
AnyOp = Op[Any, Any]


def op(
    name: str,
    run: R,
    prepare: P,
    summary: str,
    tolerance: Mapping[torch.dtype, Tolerance],
    /,
    *,
    sequence: tuple[str, ...] = (),
    wide_error: float = 1e-2,
) -> Op[P, R]:
    """Return the op that the functions `run` and `prepare` (None: no preparation) define."""
    made: Op[P, R] = Op(name)
    made.summary, made.tolerance = summary, tolerance
    made.sequence, made.wide_error = sequence, wide_error
    made.reference = Kernel(made, "reference", run, prepare)
    return made


def rounding_tolerance(*, scale: float = 1.0, reason: str) -> dict[torch.dtype, Tolerance]:
    """Return tolerances by dtype for results of magnitude `scale` that are rounded a few times."""
    return {
        torch.float32: Tolerance(1e-5 * scale, 1e-5, reason),
        torch.bfloat16: Tolerance(2e-2 * scale, 2e-2, reason),
        torch.float16: Tolerance(4e-3 * scale, 4e-3, reason),
    }
