"""Slots that receive this rank's part of a checkpoint tensor, and matrices that slots fill."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import Axis, Region, StoredTensor, StoredWeight, TensorFormat
from negamax.kernels.op import Kernel, Op, P, R
from negamax.kernels.quantize.stored import check_entries
from negamax.kernels.registry import KernelTable
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat

# For each dimension: how often each entry is repeated, and how many repetitions are skipped.
Copies = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayerSetup:
    """The arguments that all layers of a rank share."""

    context: ParallelContext
    weights: WeightFormat
    kernels: KernelTable


@dataclass(frozen=True)
class StoredPart:
    """One checkpoint tensor of a quantized matrix, which a slot copies without conversion."""

    tensor: StoredTensor
    # shape of the matrix and this rank's region of the matrix; None: the slot's shape and region
    matrix: tuple[tuple[int, int], Region] | None = None
    # whether the slot only compares the tensor with its valid values and does not keep it
    is_compared: bool = False
    copies: Copies = ()  # how to repeat the entries; empty: no repetition


class WeightSlot:
    """The destination of a checkpoint tensor of `shape` on this rank. Only the loader writes slots.

    `target`: parameter or view that receives the part `region` (a range per dimension); None: this
    rank needs no part. The slot releases `target` after the write. `source`: the matrix's format in
    the checkpoint. `stored`: the stored tensor that the slot accepts; None: a dequantized matrix.
    `optional`: the tensor may be absent. `reason`: why the matrix is dequantized.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        target: Tensor | None,
        region: tuple[range, ...] = (),
        source: TensorFormat = PLAIN,
        stored: StoredPart | None = None,
        optional: bool = False,
        reason: str = "",
    ) -> None:
        self.name, self.shape, self.source = name, shape, source
        self.region = region or tuple(range(size) for size in shape)
        self.optional, self.reason, self.written = optional, reason, False
        self.target, self._part = target, stored
        self.needed = target is not None or (stored is not None and stored.is_compared)
        self.dtype = None if target is None else target.dtype
        self.device = None if target is None else target.device
        if target is not None and not (stored and (stored.copies or stored.tensor.is_number)):
            wanted = tuple(len(part) for part in self.region)
            assert tuple(target.shape) == wanted, f"{name}: {tuple(target.shape)} <- {self.region}"

    @property
    def stored(self) -> StoredTensor | None:
        """The stored tensor that the slot accepts; None: the dequantized matrix."""
        return None if self._part is None else self._part.tensor

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of the slot's matrix, or of the matrix that the slot's tensor belongs to."""
        rows, columns = self._part.matrix[0] if self._part and self._part.matrix else self.shape
        return rows, columns

    @property
    def matrix_region(self) -> Region:
        """This rank's part of the matrix of shape `matrix_shape`."""
        rows, columns = self._part.matrix[1] if self._part and self._part.matrix else self.region
        return rows, columns

    def split_rows(self, count: int) -> "Iterator[WeightSlot]":
        """Replace this slot by slots that accept at most `count` entries of the first dimension."""
        target, self.target, self.written = self.target, None, True
        first, *rest = self.region
        for at in range(0, len(first), count):
            region, stored = (first[at : at + count], *rest), None
            if self._part is not None:
                columns = rest[0] if rest else range(0)
                stored = StoredPart(self._part.tensor, (self.matrix_shape, (region[0], columns)))
            yield WeightSlot(
                self.name,
                self.shape,
                target=None if target is None else target[at : at + count],
                region=region,
                source=self.source,
                stored=stored,
            )

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's part of a full checkpoint tensor. Raises `CheckpointError` for a second
        write, a wrong shape or a wrong dtype.
        """
        self._check_shape(tensor, self.shape)
        for dim, wanted in enumerate(self.region):
            if len(wanted) != self.shape[dim]:
                tensor = tensor.narrow(dim, wanted.start, len(wanted))
        self.write_part(tensor)

    def write_part(self, part: Tensor, matrix: tuple[int, int] | None = None) -> Tensor:
        """Write the part `region` and return the written view of the parameter. `matrix`: matrix
        shape for which a compared tensor is checked, by default `matrix_shape`.
        """
        if self.written:
            raise CheckpointError(f"tensor {self.name} is in the checkpoint twice; remove one")
        self._check_shape(part, tuple(len(wanted) for wanted in self.region))
        dtype = str(part.dtype).removeprefix("torch.")
        if self.stored is None and not part.is_floating_point():
            raise CheckpointError(
                f"tensor {self.name} has dtype {dtype}; a floating-point dtype is needed"
            )
        if self.stored is not None and dtype not in self.stored.dtypes:
            raise CheckpointError(
                f"tensor {self.name} has dtype {dtype}; {self.source.name} is stored in "
                f"{' or '.join(self.stored.dtypes)}"
            )
        if self._part is not None and self._part.is_compared:
            matrix = matrix or self.matrix_shape
            check_entries(self._part.tensor, part, self.region, matrix, name=self.name)
        target, self.target = self.target, None
        self.written = True
        if target is None:
            return part
        for dim, (count, first) in enumerate(self._part.copies if self._part else ()):
            if count > 1:
                part = part.repeat_interleave(count, dim).narrow(dim, first, target.shape[dim])
        if self.stored is not None and target.element_size() == 1:
            # keep the bits: E8M0 and FP8 bytes may be stored under another dtype
            part = part.view(target.dtype)
        with torch.inference_mode():
            # the caller must not reuse the pinned memory of `part` before the copy ends
            return target.copy_(part, non_blocking=True)

    def mark_written(self) -> None:
        """Record that the caller has filled `target` itself."""
        self.target, self.written = None, True

    def _check_shape(self, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(tensor.shape)}; config.json requires "
                f"{list(expected)}",
                hint="config.json and the weights belong to different models",
            )

    def __repr__(self) -> str:
        state = "written" if self.written else "needed" if self.needed else "not needed"
        return f"WeightSlot({self.name!r}, {self.shape}, {state})"


class MatrixWeight:
    """One rank's matrices [..., rows, columns] in one parameter, in the format that their kernel
    reads. Entries that no slot fills are 0, so padding rows are 0 in every format. A scale of a
    whole matrix is 1 unless a slot fills it, because some formats divide by it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        stored: TensorFormat,
        *,
        weights: WeightFormat,
        padded: bool = False,
        reason: str = "",
    ) -> None:
        """`stored`: format of the matrices in memory; `PLAIN`: compute dtype. `reason`: why this
        format was chosen. `padded`: whether some entries belong to no slot.
        """
        *lead, rows, columns = shape
        self.format, self._weights, self._reason = stored, weights, reason
        self._tensors: dict[str, Tensor] = {}
        self._num_columns = columns
        for tensor in stored.tensors:
            if tensor.is_kept:
                fill = torch.ones if tensor.is_number else torch.zeros
                self._tensors[tensor.name] = (fill if padded else torch.empty)(
                    (*lead, *tensor.held().shape((rows, columns))),
                    dtype=weights.dtype if stored is PLAIN else getattr(torch, tensor.dtypes[0]),
                    device=weights.device,
                )

    def slots(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        region: Region | None,
        at: tuple[int, ...] = (0,),
    ) -> list[WeightSlot]:
        """Return the slots of the matrix `name`. This rank keeps `region` (None: nothing) at index
        `at` (leading indices, row) of the parameter. `region` must not cut a quantization group.
        """
        source = self._weights.stored(name)
        if self.format is PLAIN:
            target = None if region is None else self._place_of(PLAIN.values, region, at)
            part, why = region or (), self._reason
            return [WeightSlot(name, shape, target=target, region=part, source=source, reason=why)]
        assert region is None or region == self.format.enclose(region, shape), f"{name}: {region}"
        module = name.removesuffix(PLAIN.values.name)
        # if `region` is None, this rank keeps no tensor, and the code below does not use `held`
        all_held = source.tensors if region is None else self.format.tensors
        return [
            WeightSlot(
                module + tensor.name,
                tensor.shape(shape),
                target=self._place_of(held, region, at) if region and tensor.is_kept else None,
                region=tensor.part(region) if region else (),
                source=source,
                stored=StoredPart(
                    tensor,
                    (shape, region or (range(0), range(0))),
                    is_compared=bool(tensor.known and region),
                    copies=_copies(tensor, held, region) if region and tensor != held else (),
                ),
                optional=tensor.optional,
            )
            for tensor, held in zip(source.tensors, all_held, strict=True)
            if tensor.is_kept or not source.is_online
        ]

    def _place_of(self, tensor: StoredTensor, region: Region, at: tuple[int, ...]) -> Tensor:
        """Return a view of the parameter for `region`; the view begins at row at[-1], column 0."""
        held, own = self._tensors[tensor.name][at[:-1]], tensor.held()
        for n, (dim, part) in enumerate(zip(own.dims, own.part(region), strict=True)):
            row = at[-1] if dim.axis is Axis.ROWS else 0
            assert row % dim.unit == 0, f"{tensor.name} cuts a group at row {row}"
            held = held.narrow(n, row // dim.unit, len(part))
        return held

    def copy_rows(self, rows: range) -> StoredWeight:
        """Copy `rows` of the loaded matrix. `rows` must not cut a quantization group."""
        region, at = (rows, range(self._num_columns)), (rows.start,)
        kept = [tensor for tensor in self.format.tensors if tensor.is_kept]
        parts = {tensor.name: self._place_of(tensor, region, at).clone() for tensor in kept}
        return StoredWeight(self.format, parts)

    def take(self) -> StoredWeight:
        """Return the weight for a kernel's `prepare` and drop all references to its tensors."""
        tensors = self._tensors
        del self._tensors
        return StoredWeight(self.format, tensors)


def _copies(tensor: StoredTensor, held: StoredTensor, region: Region) -> Copies:
    """Return per dimension how often `held` repeats an entry, and the number of copies to skip."""
    assert tensor.name == held.name, f"{tensor.name} <- {held.name}"
    found = []
    for wide, fine in zip(tensor.dims, held.dims, strict=True):
        count = wide.unit // fine.unit
        found.append((count, fine.part(region).start - wide.part(region).start * count))
    return tuple(found)


def choose_kernel(
    op: Op[P, R],
    names: Iterable[str],
    setup: LayerSetup,
    *,
    columns: int,
    shares: Iterable[tuple[Axis, int]] = (),
) -> tuple[Kernel[P, R], TensorFormat, str]:
    """Return a kernel and a weight format for the matrices `names`, which share a parameter, and
    the reason for the format. The reason is "" if the format is the checkpoint's format. The
    checkpoint's format is kept if all matrices have it, a kernel reads it and no shard cuts a
    group. `columns`: number of columns of one matrix on this rank. `shares`: (axis, length per
    rank) of each axis that ranks split.
    """
    kernels, weights = setup.kernels, setup.weights
    if not weights.keep_quantized:
        return kernels[op], PLAIN, "this layer uses the compute dtype on every device"
    source, *others = dict.fromkeys(weights.stored(name) for name in names)
    if not all(source.is_held_as(other) for other in others):
        return kernels[op], PLAIN, "fused with weights in another format"
    kernel = None
    if source.stacks and not source.permuted:
        kernel = kernels.choose(op, source, columns=columns)
    if kernel is None:
        return kernels[op], PLAIN, "no kernel of this platform reads this format"
    if any(length % source.unit(axis) for axis, length in shares):
        return kernels[op], PLAIN, "the split over ranks cuts blocks or groups with one scale"
    return kernel, source, ""


def slots_by_name(slots: Iterable[WeightSlot]) -> dict[str, WeightSlot]:
    table: dict[str, WeightSlot] = {}
    for slot in slots:
        assert slot.name not in table, f"two slots named {slot.name}"
        table[slot.name] = slot
    return table
