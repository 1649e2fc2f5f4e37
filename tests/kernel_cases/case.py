from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.op import AnyKernel


@dataclass(frozen=True)
class Cost:
    """Hold the minimum bytes that one call reads and writes, and its arithmetic."""

    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """Hold the inputs of one call.

    `numbers` holds arguments that are not tensors. `stored` is the format of the weights, whose
    tensors are called "weight.<tensor>" unless the format is `PLAIN`.
    """

    label: str
    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)
    stored: TensorFormat = PLAIN

    def upcast(self) -> Case:
        """Return the same values in float32, except the tensors of stored weights."""
        tensors = {
            name: tensor.float() if tensor.is_floating_point() and "." not in name else tensor
            for name, tensor in self.tensors.items()
        }
        return Case(self.label, tensors, self.numbers, self.stored)


Make = Callable[[torch.dtype, torch.Generator], list[Case]]
Apply = Callable[[AnyKernel, Case], tuple[Tensor, ...]]
Rows = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class OpCases:
    """Hold the cases of an op.

    `apply` calls any kernel of the op on a case and returns all its outputs, including tensors
    written in place. `wide` makes cases at the sizes of the real models, on the generator's device.
    An iterator makes each case when it is needed, because all weights together would be large.
    """

    small: Make
    apply: Apply
    cost: Callable[[Case], Cost]
    wide: Callable[[torch.dtype, torch.Generator], Iterable[Case]] = lambda dtype, generator: []


def table(make: Callable[..., Case], rows: Rows, **fixed: Any) -> Make:
    """Return a function that makes the cases `make(dtype, generator, *row, **fixed)`."""
    return lambda dtype, generator: [make(dtype, generator, *row, **fixed) for row in rows]


def tabled(
    make: Callable[..., Case],
    small: Rows,
    apply: Apply,
    cost: Callable[[Case], Cost],
    wide: Rows = (),
) -> OpCases:
    return OpCases(table(make, small), apply, cost, table(make, wide))


def both(*makers: Make) -> Make:
    return lambda dtype, generator: [case for make in makers for case in make(dtype, generator)]


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def randn(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Draw normal values in float32, so that every dtype gets equal values."""
    return (torch.randn(*shape, generator=generator, device=generator.device) * scale).to(dtype)
