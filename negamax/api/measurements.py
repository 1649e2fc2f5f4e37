"""Count requests and fill histograms. Each server process writes a row of shared numbers."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from negamax.api.http.lifecycle import Lifecycle
from negamax.base.shared_numbers import SharedNumbers
from negamax.scheduler.request import SamplingParams

_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    10, 40,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
)  # fmt: skip
_TOKEN_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
FINISH_REASONS = ("stop", "length", "abort", "error")
_OTHER = "other"
_REJECTIONS = (  # Error codes of refusals with a Retry-After header.
    "queue_full", "queue_tokens_full", "queue_share_full", "memory", "draining",
    "engine_restarting", "engine_dead", "engine_silent", "server_process", _OTHER,
)  # fmt: skip
_EVENTS = ("requests", "tool_calls")


class Histogram:
    """The number of values per bucket, and their sum. Only one event loop writes each row."""

    __slots__ = ("_bounds", "_numbers", "_row", "_start")

    def __init__(
        self, bounds: Sequence[float], *, numbers: SharedNumbers, index: int, start: int
    ) -> None:
        """`bounds` are the sorted upper bounds of the buckets. A last bucket counts larger values.

        From column `start`, row `index` of `numbers` has the bucket counts, then the sum of values.
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


# Bucket bounds, help text and metric names of each histogram. Names after the first name are for
# older dashboards and for SGLang's dashboards.
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str, str]] = {
    "ttft": (
        _TTFT_SECONDS,
        "Seconds from arrival to the first token.",
        "vllm:time_to_first_token_seconds sglang:time_to_first_token_seconds",
    ),
    "inter_token": (
        _TOKEN_SECONDS,
        "Seconds between two tokens of one choice.",
        "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds "
        "sglang:inter_token_latency_seconds",
    ),
    "tpot": (
        _TOKEN_SECONDS,
        "Mean seconds per token of a choice, without its first token.",
        "vllm:request_time_per_output_token_seconds",
    ),
    "e2e": (
        _REQUEST_SECONDS,
        "Seconds from arrival to the last token.",
        "vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds",
    ),
    "queue": (
        _REQUEST_SECONDS,
        "Seconds from arrival to the first step.",
        "vllm:request_queue_time_seconds sglang:queue_time_seconds",
    ),
    "prefill": (
        _REQUEST_SECONDS,
        "Seconds from the first step to the first token.",
        "vllm:request_prefill_time_seconds",
    ),
    "decode": (
        _REQUEST_SECONDS,
        "Seconds from the first token to the last token.",
        "vllm:request_decode_time_seconds",
    ),
    "inference": (
        _REQUEST_SECONDS,
        "Seconds from the first step to the last token.",
        "vllm:request_inference_time_seconds",
    ),
    "prompt_tokens": (_TOKEN_COUNTS, "Prompt tokens per request.", "vllm:request_prompt_tokens"),
    "generation_tokens": (_TOKEN_COUNTS, "Tokens of a choice.", "vllm:request_generation_tokens"),
    "max_generation_tokens": (
        _TOKEN_COUNTS,
        "Generated tokens of a request's longest choice.",
        "vllm:request_max_num_generation_tokens",
    ),
    "max_tokens": (_TOKEN_COUNTS, "max_tokens of requests.", "vllm:request_params_max_tokens"),
    "n": (_CHOICES, "Choices per request.", "vllm:request_params_n"),
    "step_tokens": (_STEP_TOKENS, "Tokens per step of the engine.", "vllm:iteration_tokens_total"),
}

# Names of counters, whose columns follow those of `Lifecycle` and precede those of histograms.
_COUNTS = (FINISH_REASONS, _REJECTIONS, _EVENTS)
NUM_COLUMNS = (
    Lifecycle.NUM_COLUMNS
    + sum(map(len, _COUNTS))
    + sum(Histogram.num_columns(bounds) for bounds, _, _ in HISTOGRAMS.values())
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
        # Finished choices by reason, refusals by code, and numbers of requests and tool calls.
        self.finished, self.rejections, self.events = counts
        self.histograms: dict[str, Histogram] = {}
        for key, (bounds, _, _) in HISTOGRAMS.items():
            self.histograms[key] = Histogram(bounds, numbers=numbers, index=index, start=start)
            start += Histogram.num_columns(bounds)

    def count_request(self, sampling: SamplingParams) -> None:
        self.events.add("requests")
        self.histograms["n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self.histograms["max_tokens"].observe(sampling.max_tokens)
