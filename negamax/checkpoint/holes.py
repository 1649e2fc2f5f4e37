"""Detection of holes: zeros that an interrupted download left in place of weights.

They are looked for in the stored bytes, whatever the values mean. Matrices of zeros can be
intended, such as pruned experts. A hole, however, does not end at a tensor border: the next tensor
then starts or ends with zeros. Packed integers that are stored plus an offset are never all 0.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.log import get_logger
from negamax.checkpoint.reader import CheckpointReader, TensorEntry, list_first, read_header
from negamax.formats.tensor_format import TensorFormat

logger = get_logger(__name__)

_EDGE_BYTES = 4096  # checked at the end of a tensor
_CHUNK_BYTES = 2**20
_MOST_LOOKED_AT = 100


class ZeroMatrix(NamedTuple):
    """A matrix whose stored values hold only bytes of 0."""

    entry: TensorEntry  # of the values
    format: TensorFormat


def is_zero(values: Tensor) -> bool:
    """Return whether all bytes of `values` (on the CPU, rows contiguous) are 0; False without any.

    Of most matrices only the first row is looked at.
    """
    data = (values if values.dim() else values.reshape(1)).view(torch.uint8)
    return bool(data.numel()) and not bool(data[:1].any()) and not bool(data.any())


def check_zeros(reader: CheckpointReader, zeros: Mapping[str, ZeroMatrix]) -> None:
    """Warn of matrices that hold only zeros, by name.

    Errors: `CheckpointError` if one of them lies in a hole, or if zeros cannot be meant.
    """
    for name, (entry, stored) in list(zeros.items())[:_MOST_LOOKED_AT]:
        if stored.has_offset_codes:
            raise CheckpointError(
                f"{entry.file} has a hole: {entry.name} holds only zeros, which {stored.name} does "
                f"not store for any matrix",
                hint="download the file again",
            )
        if (torn := _torn(reader, entry)) is not None:
            raise CheckpointError(
                f"{entry.file} has a hole: {name} holds only zeros, and so does an end of "
                f"{torn.name}",
                hint="download the file again",
            )
    if zeros:
        logger.warning(
            "%d matrices hold only zeros: %s; unless that is meant, download their files again",
            len(zeros), list_first(list(zeros)),
        )  # fmt: skip


def _torn(reader: CheckpointReader, entry: TensorEntry) -> TensorEntry | None:
    """Return the tensor in which the zeros around `entry` start or end; None at tensor borders."""
    entries = sorted(read_header(entry.file), key=lambda each: each.offset)
    place = [each.name for each in entries].index(entry.name)
    for others, is_before in ((entries[:place][::-1], True), (entries[place + 1 :], False)):
        beside = _first_with_values(reader, others)
        if beside is None or beside.num_bytes < 2 * _EDGE_BYTES:
            continue
        end = beside.offset + beside.num_bytes
        start = end - _EDGE_BYTES if is_before else beside.offset
        if _is_zero(reader, beside, start, start + _EDGE_BYTES):
            return beside
    return None


def _first_with_values(
    reader: CheckpointReader, entries: Sequence[TensorEntry]
) -> TensorEntry | None:
    for each in entries:
        if not _is_zero(reader, each, each.offset, each.offset + each.num_bytes):
            return each
    return None


def _is_zero(reader: CheckpointReader, entry: TensorEntry, start: int, stop: int) -> bool:
    """Return whether the bytes from `start` to `stop` of the entry's file are all zero."""
    size = _EDGE_BYTES
    while start < stop:
        data = torch.empty(min(size, stop - start), dtype=torch.uint8)
        reader.read_into(data, entry.file, start)
        if data.any():
            return False
        start, size = start + size, _CHUNK_BYTES
    return True
