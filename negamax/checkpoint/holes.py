"""Detection of holes in weight files. A hole is a range of zeros that an interrupted download left.

The check reads the stored bytes and does not decode them. A matrix of zeros can be intended, for
example in a pruned expert. A hole usually extends into the next tensor, which then starts or ends
with zeros. Formats that store integers with an offset never store 0 as a zero byte.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.log import get_logger
from negamax.checkpoint.reader import CheckpointReader, TensorEntry, list_first, read_header
from negamax.formats.tensor_format import TensorFormat

logger = get_logger(__name__)

_EDGE_BYTES = 4096  # bytes to check at the start or end of a neighbouring tensor
_CHUNK_BYTES = 2**20
_MOST_LOOKED_AT = 100


class ZeroMatrix(NamedTuple):
    """A matrix whose stored values consist of zero bytes only."""

    entry: TensorEntry  # the tensor with the values of the matrix
    format: TensorFormat


def is_zero(values: Tensor) -> bool:
    """Return whether all bytes of `values` (on the CPU, rows contiguous) are 0.

    An empty tensor yields False. For speed, other rows are read only if the first row is 0.
    """
    data = (values if values.dim() else values.reshape(1)).view(torch.uint8)
    return bool(data.numel()) and not bool(data[:1].any()) and not bool(data.any())


def check_zeros(reader: CheckpointReader, zeros: Mapping[str, ZeroMatrix]) -> None:
    """Log a warning that lists the matrices in `zeros`, whose stored bytes are all 0.

    Raises `CheckpointError` if a matrix is in a hole, or if its format never stores 0 as zero bits.
    """
    for name, (entry, stored) in list(zeros.items())[:_MOST_LOOKED_AT]:
        if stored.has_offset_codes:
            raise CheckpointError(
                f"{entry.file} has a hole: {entry.name} contains only zero bytes, but the format "
                f"{stored.name} never stores a matrix as zero bytes only",
                hint="download the file again",
            )
        if (torn := _find_torn(reader, entry)) is not None:
            raise CheckpointError(
                f"{entry.file} has a hole: {name} holds only zeros, and {torn.name} next to it "
                f"begins or ends with zeros",
                hint="download the file again",
            )
    if zeros:
        logger.warning(
            "%d matrices hold only zeros: %s; if this is unexpected, download the files again",
            len(zeros), list_first(list(zeros)),
        )  # fmt: skip


def _find_torn(reader: CheckpointReader, entry: TensorEntry) -> TensorEntry | None:
    """Return the tensor next to `entry` if zeros extend into the tensor, else None."""
    entries = sorted(read_header(entry.file), key=lambda each: each.offset)
    place = [each.name for each in entries].index(entry.name)
    for others, is_before in ((entries[:place][::-1], True), (entries[place + 1 :], False)):
        ends = ((each, each.offset, each.offset + each.num_bytes) for each in others)
        beside = next((each for each, *span in ends if not _is_zero(reader, each, *span)), None)
        if beside is None or beside.num_bytes < 2 * _EDGE_BYTES:
            continue
        end = beside.offset + beside.num_bytes
        start = end - _EDGE_BYTES if is_before else beside.offset
        if _is_zero(reader, beside, start, start + _EDGE_BYTES):
            return beside
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
