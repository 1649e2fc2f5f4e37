"""A converted checkpoint, read again and compared with its source, weight by weight."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from negamax.checkpoint.reader import CheckpointReader, read_entries
from negamax.convert.convert import ShowProgress
from negamax.convert.shards import JoiningReader
from negamax.convert.source import Source, Weight
from negamax.convert.threads import in_order
from negamax.parallel.layout import ParallelLayout

_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Difference:
    """Of one weight: |W' - W| / |W| by the Frobenius norm (0 for zeros that stay), and its format
    now.
    """

    name: str
    format: str
    error: float

    @property
    def kind(self) -> str:
        """The name without the numbers of layer and expert."""
        return _NUMBERED.sub("*", self.name)


@dataclass(frozen=True)
class KindSummary:
    """All weights of one kind."""

    kind: str
    format: str
    count: int
    mean: float
    largest: float


def compare(
    source: Source,
    destination: Path,
    *,
    tp: int = 1,
    ep: int = 1,
    progress: ShowProgress | None = None,
) -> list[Difference]:
    """Every weight of `source` beside the same of the checkpoint in `destination`, which is split
    for `tp` and `ep` ranks.

    Errors: those of a load.
    """
    layouts = [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    converted = Source(destination, layouts[0])
    ranks = [read_entries(destination, layout) for layout in layouts] if tp > 1 else []
    theirs = {weight.name: weight for weight in converted.weights}
    found: list[Difference] = []
    done, total = 0, sum(weight.num_bytes for weight in source.weights)
    for layer in source.layers:
        weights = source.of_layer(layer)
        joining = JoiningReader(ranks) if ranks else CheckpointReader()
        with CheckpointReader() as reader, joining:
            pairs = ((weight, theirs[weight.name]) for weight in weights)
            calls = (
                partial(_relative, one, one.read(reader), other, other.read(joining))
                for one, other in pairs
            )
            for weight, error in zip(weights, in_order(calls), strict=True):
                found.append(Difference(weight.name, theirs[weight.name].format.name, error))
                done += weight.num_bytes
                if progress:
                    progress(done, total)
    return found


def _relative(
    one: Weight, ours: Mapping[str, Tensor], other: Weight, theirs: Mapping[str, Tensor]
) -> float:
    plain = one.dequantize(ours)
    size = torch.linalg.vector_norm(plain).item()
    difference = torch.linalg.vector_norm(other.dequantize(theirs) - plain).item()
    return difference / size if size else difference


def by_kind(differences: Sequence[Difference]) -> list[KindSummary]:
    """In the order of the weights."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in differences:
        groups[one.kind, one.format].append(one.error)
    return [
        KindSummary(kind, stored, len(errors), sum(errors) / len(errors), max(errors))
        for (kind, stored), errors in groups.items()
    ]
