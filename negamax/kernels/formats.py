"""Formats as data: of which tensors a matrix is stored, and what each of their entries stands for.

A `TensorFormat` lists the tensors that a checkpoint holds of one matrix [rows, columns]. Each
dimension of such a tensor runs over the rows or the columns of the matrix, so many of them per
entry. Shapes, shares of ranks and windows of fused matrices all follow from that, for the loader,
the layers and synthetic weights alike. Kernels say which formats they read (`Kernel.reads`).

Imports no torch: the commands ask formats for bytes before there is a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from negamax.base.errors import CheckpointError
from negamax.kernels.platform import Feature, Platform

if TYPE_CHECKING:
    from torch import Tensor

    from negamax.kernels.codes import Codes

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip

Region = tuple[range, range]  # rows, columns of a matrix


class Axis(Enum):
    """What a dimension of a stored tensor runs over."""

    ROWS = 0
    COLUMNS = 1
    FIXED = 2  # neither: every rank has all of it


class Role(Enum):
    """What a stored tensor is for."""

    VALUES = "values"
    SCALE = "scale"
    ZERO_POINT = "zero point"
    PERMUTATION = "permutation"  # of the columns: the group of each
    SHAPE = "shape"
    ACTIVATION = "activation"  # of the activations, which are not quantised: never read


@dataclass(frozen=True)
class Dim:
    """A dimension with one entry for `unit` rows or columns; `FIXED` has `unit` entries."""

    axis: Axis
    unit: int = 1

    def size(self, shape: tuple[int, int]) -> int:
        """Entries for a matrix of this shape."""
        return self.unit if self.axis is Axis.FIXED else -(-shape[self.axis.value] // self.unit)

    def part(self, region: Region) -> range:
        """The entries for the part `region` of a matrix, which begins on an entry."""
        if self.axis is Axis.FIXED:
            return range(self.unit)
        part = region[self.axis.value]
        return range(part.start // self.unit, -(-part.stop // self.unit))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a stored matrix."""

    name: str  # behind the module's name in a checkpoint
    role: Role
    # as PyTorch spells them; it is kept in the first, which holds the values of all
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]
    also: tuple[str, ...] = ()  # dtypes with other values, read where the matrix is dequantised
    level: int = 1  # 2: a scale of the scales
    optional: bool = False  # a checkpoint may lack it: one that is not kept
    # What it must be for a matrix of a shape: it is compared with that, and not kept.
    known: Callable[[tuple[int, int]], Tensor] | None = None
    limit: Callable[[tuple[int, int]], int] | None = None  # its entries are from 0 to below it

    @property
    def is_kept(self) -> bool:
        """Whether the values of the matrix depend on it."""
        return self.role is not Role.ACTIVATION and self.known is None

    @property
    def is_number(self) -> bool:
        """Whether it is one number for the matrix."""
        return all(dim == Dim(Axis.FIXED) for dim in self.dims)

    def held(self) -> StoredTensor:
        """How a parameter holds it that is filled from several matrices: a number once per row."""
        return replace(self, dims=(Dim(Axis.ROWS),)) if self.is_number else self

    def check(
        self, found: Tensor, part: tuple[range, ...], shape: tuple[int, int], *, name: str
    ) -> None:
        """Errors: `CheckpointError` where `found`, the part `part` of the tensor `name`, is not
        what is `known` of it, or beyond its `limit`.
        """
        limit = self.limit(shape) if self.limit is not None else 0
        if limit and not ((found >= 0) & (found < limit)).all():
            raise CheckpointError(
                f"tensor {name} has entries from {found.min()} to {found.max()}; of {shape[0]} x "
                f"{shape[1]} they are from 0 to {limit - 1}",
                hint="the checkpoint itself is broken",
            )
        if self.known is not None:
            expected = self.known(shape)[tuple(slice(each.start, each.stop) for each in part)]
            if not (found == expected).all():
                raise CheckpointError(
                    f"tensor {name} is {_first(found)}; the {self.role.value} of {shape[0]} x "
                    f"{shape[1]} is {_first(expected)}",
                    hint="config.json and the weights are not of the same model",
                )

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Its shape for a matrix of shape `shape`."""
        return tuple(dim.size(shape) for dim in self.dims)

    def part(self, region: Region) -> tuple[range, ...]:
        """What of it belongs to the part `region` of the matrix."""
        return tuple(dim.part(region) for dim in self.dims)

    def axis(self, axis: Axis) -> int | None:
        """Which of its dimensions runs over `axis`."""
        return next((n for n, dim in enumerate(self.dims) if dim.axis is axis), None)


@dataclass(frozen=True)
class TensorFormat:
    """One way to store a matrix. `name` says element and groups: "fp8" alone would leave the scale
    open.
    """

    name: str
    element: str  # of the matrix: "float8_e4m3fn", "uint4"
    tensors: tuple[StoredTensor, ...]  # the values first
    # the tensors by their names -> the codes of the matrix, one per element
    unpack: Callable[[Mapping[str, Tensor]], Codes]
    # the inverse: a matrix [rows, columns] fp32 -> the tensors by their names; None: only read
    quantize: Callable[[Tensor], Mapping[str, Tensor]] | None = field(default=None, compare=False)
    # the same tensors with groups of so many columns; None: groups are what they are
    regroup: Callable[[int], TensorFormat] | None = field(default=None, compare=False)
    # how the method rounds what the matrix is multiplied with; None: not at all
    activation: ActivationFormat | None = None
    # how the checkpoint holds the matrices, which are quantised to this format while they are
    # read; None: in this format
    made_of: TensorFormat | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.name not in ("fp8", "int8", "int4", "fp4"), f"{self.name!r} says no scale"
        assert not any(tensor.optional and tensor.is_kept for tensor in self.tensors)

    def __hash__(self) -> int:
        return hash(self.name)  # of all fields it would take long, for each of 50,000 matrices

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors by their names -> the matrix [rows, columns] fp32."""
        return self.unpack(tensors).dequantize()

    @property
    def is_online(self) -> bool:
        """Whether matrices are quantised to it while they are read."""
        return self.made_of is not None

    @property
    def values(self) -> StoredTensor:
        """The tensor of the values."""
        return self.tensors[0]

    def is_held_as(self, other: TensorFormat) -> bool:
        """Whether the tensors have the same names, and those that are kept mean the same."""
        return (
            (self.element, self.unpack, self.activation)
            == (other.element, other.unpack, other.activation)
            and len(self.tensors) == len(other.tensors)
            and all(
                own == its or (own.name == its.name and not own.is_kept and not its.is_kept)
                for own, its in zip(self.tensors, other.tensors, strict=True)
            )
        )

    @property
    def permuted(self) -> bool:
        """Whether columns belong to groups by a stored order: their scales are read in full."""
        return any(t.role is Role.PERMUTATION and t.is_kept for t in self.tensors)

    @property
    def stacks(self) -> bool:
        """Whether matrices lie on each other in one: each tensor that is held runs over the rows,
        and the first of its dtypes holds the others' values, or their bits.
        """
        held = [tensor for tensor in self.tensors if tensor.is_kept]
        return all(
            t.held().axis(Axis.ROWS) is not None
            and ({*t.dtypes} <= {*FLOATS} or len({ITEM_BYTES[dtype] for dtype in t.dtypes}) == 1)
            for t in held
        )

    def unit(self, axis: Axis) -> int:
        """Rows or columns that cannot be cut apart without cutting an entry."""
        return math.lcm(*(d.unit for tensor in self.tensors for d in tensor.dims if d.axis is axis))

    @property
    def width_unit(self) -> int:
        """Likewise, of a width that is the rows of one matrix and the columns of the next."""
        return math.lcm(self.unit(Axis.ROWS), self.unit(Axis.COLUMNS))

    def split_width(
        self, columns: int, reads: Callable[[TensorFormat], bool]
    ) -> tuple[TensorFormat, int]:
        """For a width of which ranks have `columns` each, the rows of one matrix and the columns of
        the next: how the next one is held, and the unit in which the width is cut.

        Groups of columns that such a share would cut become smaller ones, with a copy of the scale
        each, where the kernel `reads` them.
        """
        held = self
        if self.regroup is not None and columns % self._group:
            finer = self.regroup(math.gcd(columns, self._group))
            held = finer if reads(finer) else self
        return held, math.lcm(self.unit(Axis.ROWS), held.unit(Axis.COLUMNS))

    @property
    def _group(self) -> int:
        """Columns that share a scale."""
        scales = (tensor for tensor in self.tensors if tensor.role is Role.SCALE)
        return max(d.unit for scale in scales for d in scale.dims if d.axis is Axis.COLUMNS)

    def enclose(self, region: Region, shape: tuple[int, int]) -> Region:
        """The least part of a matrix of `shape` that holds `region` and cuts no entry."""
        rows, columns = (
            _enclose(part, self.unit(axis), total)
            for part, axis, total in zip(region, (Axis.ROWS, Axis.COLUMNS), shape, strict=True)
        )
        return rows, range(shape[1]) if self.permuted else columns

    def quantized_alone(self, region: Region, shape: tuple[int, int]) -> Region:
        """The least part of a matrix of `shape` that holds `region` and gets the same values when
        it is quantised alone: what shares a scale stays together.
        """
        scales = [tensor for tensor in self.tensors if tensor.role is Role.SCALE]
        rows, columns = (
            part if all(scale.axis(axis) is not None for scale in scales) else range(total)
            for part, axis, total in zip(
                self.enclose(region, shape), (Axis.ROWS, Axis.COLUMNS), shape, strict=True
            )
        )
        return rows, columns

    def bytes_per_weight(self, shape: tuple[int, int]) -> float:
        """Bytes of all tensors of a matrix of `shape`, per element of it."""
        stored = sum(
            math.prod(t.held().shape(shape)) * ITEM_BYTES[t.dtypes[0]]
            for t in self.tensors
            if t.is_kept
        )
        return stored / math.prod(shape)


@dataclass(frozen=True)
class ActivationFormat:
    """Rounded activations: `element` values and an fp32 scale per token and `group` columns, or,
    with 0, per token.
    """

    element: str
    group: int


@dataclass(frozen=True)
class StoredWeight:
    """Matrices [..., rows, columns] in memory, as tensors by their names in a checkpoint."""

    format: TensorFormat
    tensors: Mapping[str, Tensor]

    @property
    def values(self) -> Tensor:
        """The values, which plain weights have alone."""
        return self.tensors[self.format.values.name]

    @property
    def scale(self) -> Tensor:
        """The first-level scales."""
        (scale,) = (t for t in self.format.tensors if t.role is Role.SCALE and t.level == 1)
        return self.tensors[scale.name]


def _first(numbers: Tensor) -> str:
    """A few of them."""
    shown = ", ".join(str(number) for number in numbers.flatten()[:6].tolist())
    return f"[{shown}{', ...' if numbers.numel() > 6 else ''}]"


def _enclose(part: range, unit: int, total: int) -> range:
    return range(part.start // unit * unit, min(-(-part.stop // unit) * unit, total))


# --- plain ---------------------------------------------------------------------------------------

ROWS, COLUMNS, ONE = Dim(Axis.ROWS), Dim(Axis.COLUMNS), Dim(Axis.FIXED)
FLOATS = ("float32", "bfloat16", "float16")


def _unpack_plain(tensors: Mapping[str, Tensor]) -> Codes:
    from negamax.kernels.codes import Codes

    return Codes(tensors["weight"])


PLAIN = TensorFormat(
    name="plain",
    element="float",
    tensors=(StoredTensor("weight", Role.VALUES, FLOATS, (ROWS, COLUMNS)),),
    unpack=_unpack_plain,
)


def is_plain(stored: TensorFormat) -> bool:
    """Whether the matrix is stored as it is, in whichever dtype of floating-point numbers."""
    return stored is PLAIN


def plain(weight: Tensor) -> StoredWeight:
    """weight [..., N, K] in the dtype in which it is multiplied."""
    return StoredWeight(PLAIN, {"weight": weight})


# --- E4M3 with one scale for 128 x 128 -----------------------------------------------------------

E4M3 = "float8_e4m3fn"
E4M3_FNUZ = "float8_e4m3fnuz"  # of MI300: half the values of E4M3's bits, and 0x80 is NaN
E4M3_MAX = 448.0  # its largest finite value; beyond it are only NaNs
E4M3_GROUP = 128  # columns of activations, rows and columns of weights that share a scale
E4M3_GROUPS = ActivationFormat(E4M3, E4M3_GROUP)
E2M1 = "float4_e2m1"


def _unpack_e4m3_blocks(tensors: Mapping[str, Tensor]) -> Codes:
    from negamax.kernels.codes import Codes

    block = (E4M3_GROUP, E4M3_GROUP)
    return Codes(tensors["weight"], tensors["weight_scale_inv"], block)


def _quantize_e4m3_blocks(matrix: Tensor) -> Mapping[str, Tensor]:
    from negamax.kernels.quantizers import to_e4m3

    codes = to_e4m3(matrix, (E4M3_GROUP, E4M3_GROUP))
    return codes.tensors("weight", "weight_scale_inv")


# The native format of the M2 family. In spite of its name `weight_scale_inv` multiplies. Blocks at
# the lower and right edge may be ragged.
E4M3_BLOCKS = TensorFormat(
    name="fp8_e4m3_block_128x128",
    element=E4M3,
    tensors=(
        StoredTensor("weight", Role.VALUES, (E4M3,), (ROWS, COLUMNS), also=(E4M3_FNUZ,)),
        StoredTensor(
            "weight_scale_inv",
            Role.SCALE,
            FLOATS,
            (Dim(Axis.ROWS, E4M3_GROUP), Dim(Axis.COLUMNS, E4M3_GROUP)),
        ),
    ),
    unpack=_unpack_e4m3_blocks,
    quantize=_quantize_e4m3_blocks,
)


def reads_e4m3_blocks(stored: TensorFormat) -> bool:
    """Whether a matrix is E4M3 values with one fp32 scale per block, by whichever names."""
    return stored.element == E4M3 and [
        (tensor.dtypes[0], tensor.dims) for tensor in stored.tensors if tensor.is_kept
    ] == [(tensor.dtypes[0], tensor.dims) for tensor in E4M3_BLOCKS.tensors]


def e4m3_blocks(values: Tensor, scale: Tensor) -> StoredWeight:
    """values [..., N, K] e4m3, scale [..., ceil(N / 128), ceil(K / 128)] fp32."""
    return StoredWeight(E4M3_BLOCKS, {"weight": values, "weight_scale_inv": scale})


# --- 4 and 8 bits ---------------------------------------------------------------------------------

_PACKED = ("uint4", "int4", E2M1, "uint8", "int8", E4M3)
_PACKED_GROUPS = frozenset({16, 32, 64, 128})  # columns that share a scale


def reads_packed(stored: TensorFormat) -> bool:
    """Whether weight-only kernels take a matrix: 4 or 8 bits, a scale for each row and group of
    columns, or for each row.
    """
    scales = [t for t in stored.tensors if t.role is Role.SCALE and t.level == 1]
    groups = {dim.unit for t in scales for dim in t.dims if dim.axis is Axis.COLUMNS}
    return (
        stored.element in _PACKED
        and not stored.permuted
        and len(scales) == 1
        and groups <= _PACKED_GROUPS
    )


def with_rounded_activations(stored: TensorFormat) -> TensorFormat:
    """`stored`, int8 or E4M3 with scales per row or matrix, of a method that rounds activations to
    the same element. Others as they are.
    """
    scales = [tensor for tensor in stored.tensors if tensor.role is Role.SCALE]
    is_grouped = any(scale.axis(Axis.COLUMNS) is not None for scale in scales)
    if is_grouped or stored.element not in ("int8", E4M3):
        return stored
    return replace(stored, activation=ActivationFormat(stored.element, 0))


def reads_w8a8(stored: TensorFormat, *, element: str) -> bool:
    """Whether a matrix of int8 or E4M3 and its activations are both rounded to `element`, with a
    scale per row and per token.
    """
    return stored.activation == ActivationFormat(element, 0) and reads_packed(stored)


def is_kept(stored: TensorFormat, platform: Platform) -> bool:
    """Whether the kernels of `platform` read matrices of this format as they are stored. What has
    no tensor cores for their element multiplies in the compute dtype: weight-only.
    """
    return Feature.TRITON in platform.features and stored.stacks and reads_packed(stored)
