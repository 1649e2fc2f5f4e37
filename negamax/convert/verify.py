"""Comparison of a converted checkpoint with its source, weight by weight."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from negamax.base.progress import ShowProgress
from negamax.convert.source import Source, Weight
from negamax.convert.targets import TARGETS, Target
from negamax.convert.threads import run_in_order
from negamax.formats.floats import PLAIN

_PART_ELEMENTS = 2**18  # elements of unquantized matrices that are compared at a time
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Difference:
    """The difference between a weight W and the converted weight W'."""

    name: str
    format: str  # Format of W'.
    error: float  # Relative change |W' - W| / |W| (Frobenius norm); |W'| if W is 0.
    is_copy: bool  # Whether W and W' have the same format and dtype.

    @property
    def kind(self) -> str:
        """The name of the weight with `*` instead of layer and expert numbers."""
        return _NUMBERED.sub("*", self.name)

    def limit(self, target: Target | None) -> float:
        if target is None or self.is_copy:
            return 0.0
        return TARGETS["bf16"].limit if self.format == PLAIN.name else target.limit


@dataclass(frozen=True)
class KindSummary:
    kind: str
    format: str
    count: int
    mean: float
    largest: float


def compare(
    source: Source, destination: Path, *, progress: ShowProgress | None = None
) -> list[Difference]:
    """Compare all weights with `destination`. Raises `ConfigError` or `CheckpointError`."""
    converted = Source(destination)
    theirs = {weight.name: weight for weight in converted.weights}
    found: list[Difference] = []
    done, total = 0, sum(weight.move.num_bytes for weight in source.weights)
    for layer in source.layers:
        pairs = [(weight, theirs[weight.name]) for weight in source.read_layer(layer)]
        with source.reader() as reader, converted.reader() as their_reader:
            norms = run_in_order(
                partial(_norms, one, one.read(reader, rows), other, other.read(their_reader, rows))
                for one, other in pairs
                for rows in _parts(one, other)
            )
            for one, other in pairs:
                parts = [next(norms) for _ in _parts(one, other)]
                size, changed = (math.hypot(*numbers) for numbers in zip(*parts, strict=True))
                error = changed / size if size else changed
                stored = [(each.format, each.move.entries[0].dtype) for each in (one, other)]
                found.append(Difference(one.name, other.format.name, error, stored[0] == stored[1]))
                done += one.move.num_bytes
                if progress:
                    progress(done, total)
    return found


def _parts(one: Weight, other: Weight) -> Iterator[range]:
    """Yield ranges of rows. The caller compares range by range to save memory."""
    count, size = one.spec.shape[0], math.prod(one.spec.shape)
    is_plain = one.format is PLAIN and other.format is PLAIN
    rows = max(1, _PART_ELEMENTS * count // size) if is_plain else count
    return (range(first, min(first + rows, count)) for first in range(0, count, rows))


def _norms(
    one: Weight, ours: Mapping[str, Tensor], other: Weight, theirs: Mapping[str, Tensor]
) -> tuple[float, float]:
    plain = one.dequantize(ours)
    changed = other.dequantize(theirs) - plain
    return torch.linalg.vector_norm(plain).item(), torch.linalg.vector_norm(changed).item()


def group_by_kind(differences: Sequence[Difference]) -> list[KindSummary]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in differences:
        groups[one.kind, one.format].append(one.error)
    return [
        KindSummary(kind, stored, len(errors), sum(errors) / len(errors), max(errors))
        for (kind, stored), errors in groups.items()
    ]
