"""Count requests and fill histograms. Each server process writes a row of shared numbers."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from negamax.api.http.lifecycle import Lifecycle
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.tables import read_table
from negamax.scheduler.request import SamplingParams

FINISH_REASONS = ("stop", "length", "abort", "error")
_OTHER = "other"
_REJECTIONS = (  # Error codes of refusals with a Retry-After header.
    "queue_full", "queue_tokens_full", "queue_share_full", "memory", "draining",
    "engine_restarting", "engine_dead", "engine_silent", "server_process", _OTHER,
)  # fmt: skip
_EVENTS = ("requests", "tool_calls")


# Tables of metrics.toml, whose comments describe each table.
METRICS = read_table(__file__, "metrics.toml")
HISTOGRAMS: dict[str, dict[str, str]] = METRICS["histograms"]
_BOUNDS: dict[str, list[float]] = {
    key: METRICS["bounds"][table["bounds"]] for key, table in HISTOGRAMS.items()
}


class Histogram:
    """Counts values per bucket, and sums all values. Only one event loop writes each row."""

    __slots__ = ("_bounds", "_numbers", "_row", "_start")

    def __init__(
        self, bounds: Sequence[float], *, numbers: SharedNumbers, index: int, start: int
    ) -> None:
        """`bounds` are the sorted upper bounds of the buckets. A further bucket has no upper bound.

        Row `index` of `numbers` stores the bucket counts from column `start` on, then the sum.
        """
        self._bounds = tuple(bounds)
        self._numbers = numbers
        self._start = start
        self._row = numbers.row(index, start=start, count=self.num_columns(bounds))

    @staticmethod
    def num_columns(bounds: Sequence[float]) -> int:
        return len(bounds) + 2

    def observe(self, value: float, count: int = 1) -> None:
        self._row[bisect_left(self._bounds, value)] += count
        self._row[-1] += value * count

    def family(self, name: str, text: str, *, model_name: str) -> HistogramMetricFamily:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        *counts, total = (
            self._numbers.total(self._start + column) for column in range(len(bounds) + 1)
        )
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model_name], list(zip(bounds, accumulate(counts), strict=True)), total)
        return family


# Names of counters, whose columns are between those of `Lifecycle` and those of histograms.
_COUNTS = (FINISH_REASONS, _REJECTIONS, _EVENTS)
NUM_COLUMNS = (
    Lifecycle.NUM_COLUMNS
    + sum(map(len, _COUNTS))
    + sum(map(Histogram.num_columns, _BOUNDS.values()))
)


class Counts:
    """Named counters, summed over all server processes. Only one event loop writes each row."""

    def __init__(
        self, names: Sequence[str], *, numbers: SharedNumbers, index: int, start: int
    ) -> None:
        self._columns = {name: start + place for place, name in enumerate(names)}
        self._numbers = numbers
        self._row = numbers.row(index)

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to the counter `name`, or to the counter "other" for an unknown name."""
        column = self._columns.get(name)
        self._row[self._columns[_OTHER] if column is None else column] += count

    def totals(self) -> dict[str, float]:
        return {name: self._numbers.total(column) for name, column in self._columns.items()}


class Measurements:
    """All counters and histograms of a server process. Only the event loop changes this object."""

    def __init__(self, numbers: SharedNumbers, *, index: int) -> None:
        """`numbers` have `NUM_COLUMNS` columns; this process writes row `index`."""
        start = Lifecycle.NUM_COLUMNS
        counts = []
        for names in _COUNTS:
            counts.append(Counts(names, numbers=numbers, index=index, start=start))
            start += len(names)
        # Counts of finished choices by reason, of refusals by code, and of requests and tool calls.
        self.finished, self.rejections, self.events = counts
        self.histograms: dict[str, Histogram] = {}
        for key, bounds in _BOUNDS.items():
            self.histograms[key] = Histogram(bounds, numbers=numbers, index=index, start=start)
            start += Histogram.num_columns(bounds)

    def count_request(self, sampling: SamplingParams) -> None:
        self.events.add("requests")
        self.histograms["n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self.histograms["max_tokens"].observe(sampling.max_tokens)
