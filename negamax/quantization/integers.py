"""What the methods share that store integers of a few bits in groups of columns. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from negamax.config.quantization import QuantizationSpec
from negamax.kernels.formats import COLUMNS, ONE, Axis, Dim, Role, StoredTensor
from negamax.quantization.scheme import refuse

if TYPE_CHECKING:
    from torch import Tensor

PACKED_BITS = (2, 4, 8)  # of which a word of 32 bits holds a whole number


def group_size(spec: QuantizationSpec, name: str = "group_size") -> int:
    """Columns that share a scale, -1 for all of them. Errors: `ConfigError`."""
    size = spec.fields.get(name)
    if type(size) is not int or not (size == -1 or (size >= 8 and size % 8 == 0)):
        refuse(spec, name, size, "-1 and multiples of 8")
    return size


def group_dim(size: int) -> Dim:
    """The dimension of a tensor with one entry for each group of columns."""
    return ONE if size == -1 else Dim(Axis.COLUMNS, size)


def group_name(size: int) -> str:
    """How the name of a format ends."""
    return "channel" if size == -1 else f"group_{size}"


def group_index(name: str, size: int, *, is_stored_order: bool, optional: bool) -> StoredTensor:
    """The group of each column. Unless the columns are in a stored order, it is known."""
    return StoredTensor(
        name,
        Role.PERMUTATION,
        ("int32", "int64"),
        (COLUMNS,),
        optional=optional and not is_stored_order,
        known=None if is_stored_order else in_order(size),
    )


def in_order(size: int) -> Callable[[tuple[int, int]], Tensor]:
    """The groups of the columns of a matrix where each group is `size` that follow each other."""

    def groups(shape: tuple[int, int]) -> Tensor:
        import torch

        return torch.arange(shape[1]) // (shape[1] if size == -1 else size)

    return groups
