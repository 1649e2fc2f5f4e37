"""What an operation is: its definition in PyTorch, inputs to try it on, how exact it must be and
what it moves.

An `Op` is the contract; a `Kernel` is one implementation of it (a provider). Tests and benches
iterate over both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from negamax.formats.floats import PLAIN, is_plain
from negamax.formats.platform import Feature
from negamax.formats.tensor_format import ActivationFormat, TensorFormat

P = TypeVar("P")
R = TypeVar("R")

W8A8 = "triton_w8a8"  # the provider that multiplies int8 with int8, and FP8 with FP8
WEIGHT_ONLY = "triton_weight_only"  # the provider that dequantises packed weights in registers
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected|, and why no tighter."""

    atol: float
    rtol: float
    reason: str


@dataclass(frozen=True)
class Cost:
    """What one call must read and write at least, in bytes, and its arithmetic."""

    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """Inputs of one call. `numbers`: what is no tensor. `stored`: the format of its weights, whose
    tensors are called "weight.<tensor>" where it is not `PLAIN`.
    """

    label: str
    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)
    stored: TensorFormat = PLAIN

    def upcast(self) -> Case:
        """The same values with every floating-point tensor in float32, but for those of stored
        weights.
        """
        tensors = {
            name: tensor.float() if tensor.is_floating_point() and "." not in name else tensor
            for name, tensor in self.tensors.items()
        }
        return Case(self.label, tensors, self.numbers, self.stored)


class OpName(str, Generic[P, R]):
    """The name of an op and, for the type checker, the signatures of its `prepare` (None: there is
    no such step) and `run`.
    """


@dataclass(frozen=True)
class Kernel(Generic[P, R]):
    """One implementation of an op.

    `run` is called in the forward pass. `prepare` turns what changes rarely into the form `run`
    reads: a weight once at load, the block tables of a step once per step; an op whose arguments
    need no such step has no `prepare`. It is chosen only where the platform has all features that
    it `requires`; `reads` says which formats of weights it takes, and `activation` what it wants of
    its input beside the plain values.
    """

    op: OpName[P, R]
    provider: str
    run: R
    prepare: P = None  # type: ignore[assignment]  # of the ops whose `P` is None
    requires: frozenset[Feature] = frozenset({Feature.CPU})
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    reads: Callable[[TensorFormat], bool] = is_plain
    activation: ActivationFormat | None = None
    columns: int = 1  # of a matrix: it takes multiples of this
    available: Callable[[], bool] = lambda: True  # asked once, when the table is resolved

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether its products are of 8 bits with 8 bits, at twice the rate of 16."""
        return self.activation is not None or self.provider == W8A8


AnyKernel = Kernel[Any, Any]


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """The contract of an operation.

    `apply` calls any kernel of this op on a case and returns all its outputs, the tensors it wrote
    in place included. `wide` makes cases at the sizes of the real models, on the generator's
    device; on those, ||out - reference|| / ||reference|| may be `wide_error` at most.
    """

    name: OpName[P, R]
    summary: str
    reference: Kernel[P, R]
    cases: Callable[[torch.dtype, torch.Generator], list[Case]]
    apply: Callable[[Kernel[P, R], Case], tuple[Tensor, ...]]
    tolerance: dict[torch.dtype, Tolerance]
    cost: Callable[[Case], Cost]
    # of ops that this one does in one: a layer that runs them asks for it by them
    sequence: tuple[str, ...] = ()
    wide: Callable[[torch.dtype, torch.Generator], list[Case]] = lambda dtype, generator: []
    wide_error: float = 1e-2


def rounding_tolerance(*, scale: float = 1.0, reason: str) -> dict[torch.dtype, Tolerance]:
    """The tolerance per dtype of a result of magnitude `scale` that was rounded to that dtype a few
    times.
    """
    return {
        torch.float32: Tolerance(1e-5 * scale, 1e-5, reason),
        torch.bfloat16: Tolerance(2e-2 * scale, 2e-2, reason),
        torch.float16: Tolerance(4e-3 * scale, 4e-3, reason),
    }


def num_bytes(*tensors: Tensor) -> int:
    """Bytes of all `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def randn(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Normal random values of standard deviation `scale`, on the generator's device; drawn in
    float32, so that every dtype sees the same ones.
    """
    return (torch.randn(*shape, generator=generator, device=generator.device) * scale).to(dtype)
