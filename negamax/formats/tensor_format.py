"""`TensorFormat` describes the tensors that a checkpoint stores for one matrix [rows, columns].

Along each dimension, one entry of a stored tensor covers a fixed number of rows or columns of the
matrix. From the rows and columns per entry, the loader, the layers and the synthetic weights
compute shapes, the ranks' shards and the parts of fused matrices. `kernels.quantize.stored` reads
and writes entries.
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

Region = tuple[range, range]  # range of rows and range of columns of a matrix
FLOATS = ("float32", "bfloat16", "float16")


class Axis(Enum):
    """The matrix dimension along which a dimension of a stored tensor extends."""

    ROWS = 0
    COLUMNS = 1
    FIXED = 2  # a dimension that is never sharded


class Role(Enum):
    """The purpose of a stored tensor."""

    VALUES = "values"
    SCALE = "scale"
    ZERO_POINT = "zero point"
    PERMUTATION = "permutation"  # index of the group of each matrix column
    SHAPE = "shape"
    ACTIVATION = "activation"  # scales of activations, which kernels ignore


class Known(Enum):
    """Content that a format prescribes for a tensor, which the loader checks and drops."""

    ZEROS = "zeros"
    SHAPE = "shape"  # The tensor contains the shape of the matrix.
    GROUPS_IN_ORDER = "groups in order"  # The group index of column c is c // `StoredTensor.group`.


class CodePacking(Enum):
    """The order in which a tensor of values packs codes into its entries."""

    ENTRIES = "one code per entry"
    NIBBLES = "two columns per byte, the low half first"
    ROW_PAIRS = "two rows per byte, the low half first"
    WORDS = "32 / bits codes per int32 word, in order"
    AWQ_WORDS = "8 codes of 4 bits per int32 word, in AutoAWQ's order"


class GlobalScale(Enum):
    """How the level-2 scale changes the level-1 scales."""

    MULTIPLIES = "multiplies"
    DIVIDES = "divides"
    IS_INCLUDED = "is included"  # the level-1 scales already include the level-2 scale


@dataclass(frozen=True)
class Rounding:
    """How an unquantized matrix is quantized to a format."""

    # A block's largest magnitude becomes this quantized value; 0: the dtype's largest value.
    largest: float = 0.0
    to_powers: bool = False  # whether scales are rounded to powers of two


@dataclass(frozen=True)
class Dim:
    """A dimension of a stored tensor, with one entry for `unit` rows or columns of the matrix.

    A dimension of axis `Axis.FIXED` has `unit` entries.
    """

    axis: Axis
    unit: int = 1

    def size(self, shape: tuple[int, int]) -> int:
        return self.unit if self.axis is Axis.FIXED else -(-shape[self.axis.value] // self.unit)

    def part(self, region: Region) -> range:
        """Return the entries that cover `region` of the matrix. `region` starts at an entry."""
        if self.axis is Axis.FIXED:
            return range(self.unit)
        part = region[self.axis.value]
        return range(part.start // self.unit, -(-part.stop // self.unit))


ROWS, COLUMNS, ONE = Dim(Axis.ROWS), Dim(Axis.COLUMNS), Dim(Axis.FIXED)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a stored matrix."""

    name: str  # last part of the tensor's name in a checkpoint, after the module's name
    role: Role
    # allowed dtypes, by their PyTorch names; the loader converts the tensor to the first dtype
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]
    also: tuple[str, ...] = ()  # Allowed dtypes besides `dtypes`; the loader dequantizes them.
    level: int = 1  # 1: scales of the values; 2: scales of the level-1 scales.
    optional: bool = False  # A checkpoint may lack this tensor.
    known: Known | None = None
    group: int = 0  # columns per group of `PERMUTATION`; -1: one group for all columns

    @property
    def is_kept(self) -> bool:
        """Whether the values of the matrix depend on this tensor."""
        return self.role is not Role.ACTIVATION and self.known is None

    @property
    def is_number(self) -> bool:
        """Whether the tensor is a single number per matrix."""
        return all(dim == Dim(Axis.FIXED) for dim in self.dims)

    def held(self) -> StoredTensor:
        """Describe this tensor in a fused parameter, where a number becomes one entry per row."""
        return replace(self, dims=(Dim(Axis.ROWS),)) if self.is_number else self

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return tuple(dim.size(shape) for dim in self.dims)

    def part(self, region: Region) -> tuple[range, ...]:
        """Return the entries along each dimension for the part `region` of the matrix."""
        return tuple(dim.part(region) for dim in self.dims)

    def axis(self, axis: Axis) -> int | None:
        """Return the index of the dimension for `axis`, or None if there is no such dimension."""
        return next((n for n, dim in enumerate(self.dims) if dim.axis is axis), None)


@dataclass(frozen=True)
class TensorFormat:
    """A format of stored matrices. `name` states the element type and the columns per scale."""

    name: str
    element: str  # Element type of the values: "float8_e4m3fn", "uint4".
    tensors: tuple[StoredTensor, ...]  # The tensor of values is first.
    packing: CodePacking = CodePacking.ENTRIES
    zero_offset: int = 0  # zero point = stored zero point + zero_offset
    global_scale: GlobalScale = GlobalScale.MULTIPLIES
    # how Negamax quantizes a matrix to this format, or None if Negamax only reads this format
    rounding: Rounding | None = field(default=None, compare=False)
    # returns this format with fewer columns per scale; None: the number of columns is fixed
    regroup: Callable[[int], TensorFormat] | None = field(default=None, compare=False)
    # how activations are rounded, or None if activations are not rounded
    activation: ActivationFormat | None = None
    # source format, if the loader quantizes a checkpoint to this format while reading; else None
    made_of: TensorFormat | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.name not in ("fp8", "int8", "int4", "fp4"), f"{self.name!r} names no scale"
        assert not any(tensor.optional and tensor.is_kept for tensor in self.tensors)

    def __hash__(self) -> int:
        return hash(self.name)  # a hash of all fields is slow for 50,000 matrices

    def find(self, role: Role, *, level: int = 1) -> StoredTensor | None:
        return next(
            (t for t in self.tensors if (t.role, t.level) == (role, level) and t.is_kept), None
        )

    @property
    def is_online(self) -> bool:
        """Whether the loader quantizes matrices to this format."""
        return self.made_of is not None

    @property
    def values(self) -> StoredTensor:
        return self.tensors[0]

    def is_held_as(self, other: TensorFormat) -> bool:
        """Return whether both formats keep equal tensors, and drop tensors with equal names."""
        return (
            replace(self, name=other.name, tensors=other.tensors) == other
            and len(self.tensors) == len(other.tensors)
            and all(
                own == its or (own.name == its.name and not own.is_kept and not its.is_kept)
                for own, its in zip(self.tensors, other.tensors, strict=True)
            )
        )

    @property
    def permuted(self) -> bool:
        """Whether a permutation assigns columns to groups, so that each rank needs all scales."""
        return any(t.role is Role.PERMUTATION and t.is_kept for t in self.tensors)

    @property
    def stacks(self) -> bool:
        """Whether several matrices of this format can be stacked into one.

        Each kept tensor must have a dimension over the rows. If a tensor may have several dtypes,
        these dtypes must all be floats, or have one size.
        """
        return all(
            t.held().axis(Axis.ROWS) is not None
            and ({*t.dtypes} <= {*FLOATS} or len({ITEM_BYTES[dtype] for dtype in t.dtypes}) == 1)
            for t in self.tensors
            if t.is_kept
        )

    @property
    def has_offset_codes(self) -> bool:
        """Whether the stored code of an integer is the integer plus 2^(bits - 1)."""
        return self.packing is CodePacking.WORDS and self.element.startswith("int")

    def unit(self, axis: Axis) -> int:
        """Return the smallest number of rows or columns at whose multiples a split is possible."""
        return math.lcm(*(d.unit for tensor in self.tensors for d in tensor.dims if d.axis is axis))

    @property
    def width_unit(self) -> int:
        """Unit for splitting a width (the rows of one matrix and the columns of the next)."""
        return math.lcm(self.unit(Axis.ROWS), self.unit(Axis.COLUMNS))

    def split_width(
        self, columns: int, reads: Callable[[TensorFormat], bool]
    ) -> tuple[TensorFormat, int]:
        """Split a width (rows of one matrix, columns of the next) into `columns` per rank.

        Returns the next matrix's format, and the unit of the split. If the kernel `reads` smaller
        groups, a split may divide columns that share a scale. Each part then gets the shared scale.
        """
        held = self
        if self.regroup is not None and columns % self._group:
            finer = self.regroup(math.gcd(columns, self._group))
            held = finer if reads(finer) else self
        return held, math.lcm(self.unit(Axis.ROWS), held.unit(Axis.COLUMNS))

    @property
    def _group(self) -> int:
        """Number of columns that share a scale."""
        scales = (tensor for tensor in self.tensors if tensor.role is Role.SCALE)
        return max(d.unit for scale in scales for d in scale.dims if d.axis is Axis.COLUMNS)

    def enclose(self, region: Region, shape: tuple[int, int], *, unit: int | None = None) -> Region:
        """Return the smallest part of a matrix that contains `region` and splits no entry.

        If `unit` is given, the part begins and ends at multiples of `unit`.
        """
        units = (unit or self.unit(axis) for axis in (Axis.ROWS, Axis.COLUMNS))
        rows, columns = (
            range(part.start // unit * unit, min(-(-part.stop // unit) * unit, total))
            for part, unit, total in zip(region, units, shape, strict=True)
        )
        return rows, range(shape[1]) if self.permuted else columns

    def quantized_alone(self, region: Region, shape: tuple[int, int]) -> Region:
        """Return the smallest part of a matrix that contains `region` and can be quantized alone.

        Quantizing this part alone gives the same values as quantizing the whole matrix.
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
        """Return the bytes of all kept tensors per element of a matrix of `shape`."""
        stored = sum(
            math.prod(t.held().shape(shape)) * ITEM_BYTES[t.dtypes[0]]
            for t in self.tensors
            if t.is_kept
        )
        return stored / math.prod(shape)


@dataclass(frozen=True)
class ActivationFormat:
    """Rounded activations with an fp32 scale per token and group of columns."""

    element: str
    group: int  # columns per scale; 0: one scale for all columns of a token


@dataclass(frozen=True)
class StoredWeight:
    """The tensors that store matrices [..., rows, columns] in memory, under checkpoint names."""

    format: TensorFormat
    tensors: Mapping[str, Tensor]

    @property
    def values(self) -> Tensor:
        """The tensor of values. An unquantized weight has no other tensor."""
        return self.tensors[self.format.values.name]

    @property
    def scale(self) -> Tensor:
        (scale,) = (t for t in self.format.tensors if t.role is Role.SCALE and t.level == 1)
        return self.tensors[scale.name]
