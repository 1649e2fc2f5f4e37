"""A histogram that costs a binary search per value: the server fills two of them for every
token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from negamax.base.shared_numbers import SharedNumbers


class Histogram:
    """Counts of values by bucket, and their sum, of all server processes. Single writer of a
    process's own: its event loop.
    """

    __slots__ = ("_bounds", "_numbers", "_row", "_start")

    def __init__(
        self, bounds: Sequence[float], *, numbers: SharedNumbers, index: int, start: int
    ) -> None:
        """`bounds`: upper bounds of the buckets, rising; one more bucket takes what is larger. What
        process `index` counts is kept in its row of `numbers` from column `start` on, and the sum
        behind it."""
        self._bounds = tuple(bounds)
        self._numbers = numbers
        self._start = start
        self._row = numbers.row(index, start=start, count=self.num_columns(bounds))

    @staticmethod
    def num_columns(bounds: Sequence[float]) -> int:
        """Numbers that a histogram keeps."""
        return len(bounds) + 2

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value`, `count` times."""
        self._row[bisect_left(self._bounds, value)] += count
        self._row[-1] += value * count

    def family(self, name: str, text: str, *, model_name: str) -> HistogramMetricFamily:
        """The histogram as Prometheus reads it, under `name`."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        *counts, total = (
            self._numbers.total(self._start + column) for column in range(len(bounds) + 1)
        )
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model_name], list(zip(bounds, accumulate(counts), strict=True)), total)
        return family
