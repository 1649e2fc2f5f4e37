"""Formats as data: which tensors a checkpoint holds of a matrix, and what their entries mean.

A `TensorFormat` lists the tensors of one matrix [rows, columns]. Each dimension of such a tensor
has one entry for a fixed number of the matrix's rows or columns. The loader, the layers and the
synthetic weights derive shapes, shards of ranks and parts of fused matrices from these numbers.
`kernels.quantize.stored` decodes and encodes the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip

Region = tuple[range, range]  # rows, columns of a matrix
FLOATS = ("float32", "bfloat16", "float16")


class Axis(Enum):
    """The dimension of the matrix that a dimension of a stored tensor runs over."""

    ROWS = 0
    COLUMNS = 1
    FIXED = 2  # neither: every rank holds all of it


class Role(Enum):
    """The purpose of a stored tensor."""

    VALUES = "values"
    SCALE = "scale"
    ZERO_POINT = "zero point"
    PERMUTATION = "permutation"  # the group of each column
    SHAPE = "shape"
    ACTIVATION = "activation"  # of activations, which stay unquantized: never read


class Known(Enum):
    """Entries that the format fixes. The loader compares them and does not keep them."""

    ZEROS = "zeros"
    SHAPE = "shape"  # of the matrix
    GROUPS_IN_ORDER = "groups in order"  # the group of each column: c // `StoredTensor.group`


class CodePacking(Enum):
    """How the tensor of values holds codes."""

    ENTRIES = "one code per entry"
    NIBBLES = "two columns per byte, the low half first"
    ROW_PAIRS = "two rows per byte, the low half first"
    WORDS = "32 / bits codes per int32 word, in order"
    AWQ_WORDS = "8 codes of 4 bits per int32 word, in AutoAWQ's order"


class GlobalScale(Enum):
    """The effect of the level-2 scale on the level-1 scales."""

    MULTIPLIES = "multiplies"
    DIVIDES = "divides"
    IS_INCLUDED = "is included"  # it is the scale of the activations, and stored scales include it


@dataclass(frozen=True)
class Rounding:
    """How a plain matrix is quantized to a format."""

    largest: float = 0.0  # what the largest magnitude of a block becomes; 0: the element's largest
    to_powers: bool = False  # scales are powers of two


@dataclass(frozen=True)
class Dim:
    """A dimension with one entry for `unit` rows or columns; `FIXED` has `unit` entries."""

    axis: Axis
    unit: int = 1

    def size(self, shape: tuple[int, int]) -> int:
        """Return the number of entries for a matrix of this shape."""
        return self.unit if self.axis is Axis.FIXED else -(-shape[self.axis.value] // self.unit)

    def part(self, region: Region) -> range:
        """Return the entries of the part `region` of a matrix; it must start at an entry."""
        if self.axis is Axis.FIXED:
            return range(self.unit)
        part = region[self.axis.value]
        return range(part.start // self.unit, -(-part.stop // self.unit))


ROWS, COLUMNS, ONE = Dim(Axis.ROWS), Dim(Axis.COLUMNS), Dim(Axis.FIXED)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a stored matrix."""

    name: str  # after the module's name in a checkpoint
    role: Role
    # PyTorch's names; the tensor is kept in the first, which holds the values of all
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]
    also: tuple[str, ...] = ()  # dtypes with other values, read only to dequantize the matrix
    level: int = 1  # 2: scales the scales
    optional: bool = False  # a checkpoint may lack it; it is not kept then
    known: Known | None = None
    group: int = 0  # columns per group of a permutation, -1 for all

    @property
    def is_kept(self) -> bool:
        """Whether the values of the matrix depend on it."""
        return self.role is not Role.ACTIVATION and self.known is None

    @property
    def is_number(self) -> bool:
        """Whether it is one number per matrix."""
        return all(dim == Dim(Axis.FIXED) for dim in self.dims)

    def held(self) -> StoredTensor:
        """Return its form in a fused parameter: a single number is held once per row."""
        return replace(self, dims=(Dim(Axis.ROWS),)) if self.is_number else self

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return tuple(dim.size(shape) for dim in self.dims)

    def part(self, region: Region) -> tuple[range, ...]:
        """Return its entries for the part `region` of the matrix."""
        return tuple(dim.part(region) for dim in self.dims)

    def axis(self, axis: Axis) -> int | None:
        """Return the dimension that runs over `axis`, if any."""
        return next((n for n, dim in enumerate(self.dims) if dim.axis is axis), None)


@dataclass(frozen=True)
class TensorFormat:
    """One way to store a matrix. `name` gives element and groups, never "fp8" alone."""

    name: str
    element: str  # of the matrix: "float8_e4m3fn", "uint4"
    tensors: tuple[StoredTensor, ...]  # the values first
    packing: CodePacking = CodePacking.ENTRIES
    zero_offset: int = 0  # added to stored zero points
    global_scale: GlobalScale = GlobalScale.MULTIPLIES
    # how matrices are quantized to it; None: it is only read
    rounding: Rounding | None = field(default=None, compare=False)
    # returns the format with groups of fewer columns; None: groups cannot change
    regroup: Callable[[int], TensorFormat] | None = field(default=None, compare=False)
    # how the method rounds activations; None: not at all
    activation: ActivationFormat | None = None
    # the format in the checkpoint of matrices that are quantized during loading; None: this format
    made_of: TensorFormat | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.name not in ("fp8", "int8", "int4", "fp4"), f"{self.name!r} says no scale"
        assert not any(tensor.optional and tensor.is_kept for tensor in self.tensors)

    def __hash__(self) -> int:
        return hash(self.name)  # hashing all fields is slow for 50,000 matrices

    def find(self, role: Role, *, level: int = 1) -> StoredTensor | None:
        """Return the tensor of this role that is kept, if any."""
        return next(
            (t for t in self.tensors if (t.role, t.level) == (role, level) and t.is_kept), None
        )

    @property
    def is_online(self) -> bool:
        """Whether matrices are quantized to it during loading."""
        return self.made_of is not None

    @property
    def values(self) -> StoredTensor:
        return self.tensors[0]

    def is_held_as(self, other: TensorFormat) -> bool:
        """Return whether all tensors have the same names, and kept tensors the same meaning."""
        return (
            all(
                getattr(self, name) == getattr(other, name)
                for name in ("element", "packing", "zero_offset", "global_scale", "activation")
            )
            and len(self.tensors) == len(other.tensors)
            and all(
                own == its or (own.name == its.name and not own.is_kept and not its.is_kept)
                for own, its in zip(self.tensors, other.tensors, strict=True)
            )
        )

    @property
    def permuted(self) -> bool:
        """Whether a stored order assigns columns to groups: then scales are read in full."""
        return any(t.role is Role.PERMUTATION and t.is_kept for t in self.tensors)

    @property
    def stacks(self) -> bool:
        """Whether matrices can be stacked into one.

        Each kept tensor must run over the rows, and its first dtype must hold the values or bits of
        the others.
        """
        held = [tensor for tensor in self.tensors if tensor.is_kept]
        return all(
            t.held().axis(Axis.ROWS) is not None
            and ({*t.dtypes} <= {*FLOATS} or len({ITEM_BYTES[dtype] for dtype in t.dtypes}) == 1)
            for t in held
        )

    @property
    def has_offset_codes(self) -> bool:
        """Whether integers are stored plus 2^(bits - 1), so that zeros are not stored as 0."""
        return self.packing is CodePacking.WORDS and self.element.startswith("int")

    def unit(self, axis: Axis) -> int:
        """Return the rows or columns that must not be split, because they share an entry."""
        return math.lcm(*(d.unit for tensor in self.tensors for d in tensor.dims if d.axis is axis))

    @property
    def width_unit(self) -> int:
        """The unit of a width that is the rows of one matrix and the columns of the next."""
        return math.lcm(self.unit(Axis.ROWS), self.unit(Axis.COLUMNS))

    def split_width(
        self, columns: int, reads: Callable[[TensorFormat], bool]
    ) -> tuple[TensorFormat, int]:
        """Split a width that is the rows of one matrix and the columns of the next: `columns` per
        rank.

        Returns the format of the next matrix, and the unit of the split. Groups that the split
        would cut become smaller ones, each with a copy of the scale, if the kernel `reads` them.
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
        """Return the smallest part of a matrix that holds `region` and splits no entry."""
        rows, columns = (
            _enclose(part, self.unit(axis), total)
            for part, axis, total in zip(region, (Axis.ROWS, Axis.COLUMNS), shape, strict=True)
        )
        return rows, range(shape[1]) if self.permuted else columns

    def quantized_alone(self, region: Region, shape: tuple[int, int]) -> Region:
        """Return the smallest part that holds `region` and quantizes to the same values alone.

        Elements that share a scale stay together.
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
        """Return the bytes of all kept tensors of a matrix of `shape`, per element."""
        stored = sum(
            math.prod(t.held().shape(shape)) * ITEM_BYTES[t.dtypes[0]]
            for t in self.tensors
            if t.is_kept
        )
        return stored / math.prod(shape)


@dataclass(frozen=True)
class ActivationFormat:
    """Rounded activations: an fp32 scale per token and, unless 0, per `group` columns."""

    element: str
    group: int


@dataclass(frozen=True)
class StoredWeight:
    """Matrices [..., rows, columns] in memory, as tensors by their names in a checkpoint."""

    format: TensorFormat
    tensors: Mapping[str, Tensor]

    @property
    def values(self) -> Tensor:
        """The tensor of values; plain weights have no other."""
        return self.tensors[self.format.values.name]

    @property
    def scale(self) -> Tensor:
        """The first-level scales."""
        (scale,) = (t for t in self.format.tensors if t.role is Role.SCALE and t.level == 1)
        return self.tensors[scale.name]


def _enclose(part: range, unit: int, total: int) -> range:
    return range(part.start // unit * unit, min(-(-part.stop // unit) * unit, total))
