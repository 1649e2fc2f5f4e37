"""Reader that joins the parts of tensors in a checkpoint that is split for ranks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.reader import CheckpointReader, TensorEntry

Parts = tuple[range, ...]
Entries = Mapping[str, TensorEntry]  # tensor name -> entry of one rank


class JoiningReader(CheckpointReader):
    """Reads whole tensors from the parts of all ranks."""

    def __init__(self, ranks: Sequence[Entries]) -> None:
        super().__init__()
        self._ranks = ranks

    def read(self, entry: TensorEntry, region: Parts | None = None) -> Tensor:
        """Read `region` of `entry`, an entry of any rank, from the files of all ranks."""
        wanted = region or tuple(map(range, entry.shape))
        found = []
        for mine in (entries[entry.name] for entries in self._ranks):
            part = tuple(_common(*both) for both in zip(wanted, _held(mine), strict=True))
            if all(part):
                found.append((part, super().read(mine, part)))
        joined = torch.empty(tuple(map(len, wanted)), dtype=found[0][1].dtype)
        for part, tensor in found:
            places = zip(part, wanted, strict=True)
            joined[tuple(slice(p.start - w.start, p.stop - w.start) for p, w in places)] = tensor
        return joined


def join(ranks: Sequence[Entries]) -> dict[str, TensorEntry]:
    """Return one entry per tensor, from the rank that has the largest part of the tensor.

    Raises `CheckpointError` if the parts of the ranks do not cover the whole tensor.
    """
    joined = {}
    for name in dict.fromkeys(name for entries in ranks for name in entries):
        mine = [entries[name] for entries in ranks if name in entries]
        is_alike = len({(one.dtype, one.shape) for one in mine}) == 1
        if len(mine) < len(ranks) or not is_alike or not _covers(mine):
            files = ", ".join(dict.fromkeys(one.file.name for one in mine))
            raise CheckpointError(
                f"the parts of {name} in {files} do not cover the whole tensor",
                hint="convert the checkpoint again",
            )
        joined[name] = max(mine, key=lambda one: one.num_bytes)
    return joined


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _held(entry: TensorEntry) -> Parts:
    return entry.part or tuple(map(range, entry.shape))


def _covers(entries: Sequence[TensorEntry]) -> bool:
    held, shape = [_held(one) for one in entries], entries[0].shape
    if any(tuple(map(len, part)) == shape for part in held):
        return True
    borders = [
        sorted({0, size, *(at for part in held for at in (part[dim].start, part[dim].stop))})
        for dim, size in enumerate(shape)
    ]
    return all(
        any(
            all(r.start <= low and high <= r.stop for r, (low, high) in zip(p, cell, strict=True))
            for p in held
        )
        for cell in product(*map(pairwise, borders))
    )
