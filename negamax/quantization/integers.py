"""Functions for all methods that store small integers with a scale per group of columns."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec

from negamax.config.quantization import QuantizationSpec
from negamax.formats.tensor_format import (
    COLUMNS,
    FLOATS,
    ONE,
    ROWS,
    Axis,
    Dim,
    Known,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.scheme import refuse

P = ParamSpec("P")

PACKED_BITS = (2, 4, 8)  # Supported bits per quantized weight, all divisors of 32.


def cache_format(make: Callable[P, TensorFormat]) -> Callable[P, TensorFormat]:
    """Cache `make`. Calls with equal arguments return one object, even if defaults are omitted."""
    signature, known = inspect.signature(make), cache(make)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> TensorFormat:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return known(*bound.args, **bound.kwargs)

    return get


def group_size(spec: QuantizationSpec) -> int:
    """Return the number of columns per scale; -1 means all columns. Raises `ConfigError`."""
    size = spec.fields.get("group_size")
    if type(size) is not int or not (size == -1 or (size >= 8 and size % 8 == 0)):
        refuse(spec, "group_size", size, "-1, or a multiple of 8")
    return size


def read_names(spec: QuantizationSpec, name: str) -> tuple[str, ...]:
    """Return the names in field `name`, which may be a nested list. Raises `ConfigError`."""
    found = spec.fields.get(name) or []
    parts = found if isinstance(found, list) else [None]
    names = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    spelled = tuple(each for each in names if isinstance(each, str))
    if len(spelled) < len(names):
        refuse(spec, name, found, "a list of names, a list of such lists, or null")
    return spelled


def make_group_dim(size: int) -> Dim:
    """Return a dimension with one entry per group of `size` columns (-1: all columns)."""
    return ONE if size == -1 else Dim(Axis.COLUMNS, size)


def group_name(size: int) -> str:
    return "channel" if size == -1 else f"group_{size}"


def make_group_index(
    name: str, size: int, *, is_stored_order: bool, optional: bool
) -> StoredTensor:
    """Return the tensor of each column's group number. `is_stored_order`: numbers in any order."""
    return StoredTensor(
        name,
        Role.PERMUTATION,
        ("int32", "int64"),
        (COLUMNS,),
        optional=optional and not is_stored_order,
        known=None if is_stored_order else Known.GROUPS_IN_ORDER,
        group=size,
    )


def int8_format(
    name: str, *others: StoredTensor, scale: tuple[Dim, ...] = (ROWS,), **options: Any
) -> TensorFormat:
    """Return the int8 format whose weight_scale has the dimensions `scale`.

    `others` are additional stored tensors that dequantization does not need. `options` are fields
    of `TensorFormat`.
    """
    return TensorFormat(
        name,
        "int8",
        (
            StoredTensor("weight", Role.VALUES, ("int8",), (ROWS, COLUMNS)),
            StoredTensor("weight_scale", Role.SCALE, FLOATS, scale),
            *others,
        ),
        **options,
    )
