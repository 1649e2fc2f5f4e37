"""What a server process counts and measures of its requests, as outputs pass. Where several
processes serve, each counts what passes it in numbers that they share.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from negamax.api.http.lifecycle import Lifecycle
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.output import RequestOutput
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
_REASONS = ("stop", "length", "abort", "error")
_OTHER = "other"
_REJECTIONS = (  # codes of refusals with a time to come back
    "queue_full",
    "queue_tokens_full",
    "queue_share_full",
    "memory",
    "draining",
    "engine_restarting",
    "engine_dead",
    "engine_silent",
    "server_process",
    _OTHER,
)
_EVENTS = ("requests", "tool_calls")


class Histogram:
    """Counts of values by bucket, and their sum, of all server processes. Single writer of a
    process's own: its event loop. A value costs a binary search: for every token there are two.
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


# Histogram: its buckets, its help, and all names it is sent under. Where there are several,
# dashboards of another generation or of SGLang ask for the later ones.
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str, tuple[str, ...]]] = {
    "ttft": (
        _TTFT_SECONDS,
        "Seconds from arrival to the first token.",
        ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ),
    "inter_token": (
        _TOKEN_SECONDS,
        "Seconds between two tokens of one choice.",
        (
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            "sglang:inter_token_latency_seconds",
        ),
    ),
    "tpot": (
        _TOKEN_SECONDS,
        "Mean seconds per token after the first, per choice.",
        ("vllm:request_time_per_output_token_seconds",),
    ),
    "e2e": (
        _REQUEST_SECONDS,
        "Seconds from arrival to the last token.",
        ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    ),
    "queue": (
        _REQUEST_SECONDS,
        "Seconds from arrival to the first step.",
        ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    ),
    "prefill": (
        _REQUEST_SECONDS,
        "Seconds from the first step to the first token.",
        ("vllm:request_prefill_time_seconds",),
    ),
    "decode": (
        _REQUEST_SECONDS,
        "Seconds from the first token to the last.",
        ("vllm:request_decode_time_seconds",),
    ),
    "inference": (
        _REQUEST_SECONDS,
        "Seconds from the first step to the last token.",
        ("vllm:request_inference_time_seconds",),
    ),
    "prompt_tokens": (_TOKEN_COUNTS, "Prompt tokens per request.", ("vllm:request_prompt_tokens",)),
    "generation_tokens": (
        _TOKEN_COUNTS,
        "Generated tokens per choice.",
        ("vllm:request_generation_tokens",),
    ),
    "max_tokens": (
        _TOKEN_COUNTS,
        "max_tokens per request that sets it.",
        ("vllm:request_params_max_tokens",),
    ),
    "n": (_CHOICES, "Choices per request.", ("vllm:request_params_n",)),
    "step_tokens": (
        _STEP_TOKENS,
        "Tokens per step of the engine.",
        ("vllm:iteration_tokens_total",),
    ),
}

# What the server processes share: Lifecycle's numbers first, then counts, then the histograms.
_COUNTS = (_REASONS, _REJECTIONS, _EVENTS)
NUM_COLUMNS = (
    Lifecycle.NUM_COLUMNS
    + sum(map(len, _COUNTS))
    + sum(Histogram.num_columns(bounds) for bounds, _, _ in HISTOGRAMS.values())
)


class Counts:
    """Counts by name, of all server processes. Single writer of a process's own: its event loop."""

    def __init__(
        self, names: Sequence[str], *, numbers: SharedNumbers, index: int, start: int
    ) -> None:
        """The counts of process `index` are kept in its row of `numbers`, from column `start`
        on.
        """
        self._columns = {name: start + place for place, name in enumerate(names)}
        self._numbers = numbers
        self._row = numbers.row(index)

    def add(self, name: str, count: int = 1) -> None:
        """Count; a name that is not known counts as "other", where there is that."""
        column = self._columns.get(name)
        self._row[self._columns[_OTHER] if column is None else column] += count

    def totals(self) -> dict[str, float]:
        """All counts."""
        return {name: self._numbers.total(column) for name, column in self._columns.items()}


class Measurements:
    """What one server process counts and measures of its requests. Single writer: the event
    loop.
    """

    def __init__(self, numbers: SharedNumbers, *, index: int) -> None:
        """`numbers` have `NUM_COLUMNS`, and this process writes row `index`."""
        start = Lifecycle.NUM_COLUMNS
        counts = []
        for names in _COUNTS:
            counts.append(Counts(names, numbers=numbers, index=index, start=start))
            start += len(names)
        # choices by reason, refusals by code, requests and tool calls
        self.finished, self.rejections, self.events = counts
        self.histograms: dict[str, Histogram] = {}
        for key, (bounds, _, _) in HISTOGRAMS.items():
            self.histograms[key] = Histogram(bounds, numbers=numbers, index=index, start=start)
            start += Histogram.num_columns(bounds)

    def meter(self, sampling: SamplingParams, *, arrival: float) -> RequestMeter:
        """The observer of a request that arrived at `time.monotonic()` second `arrival`."""
        self.events.add("requests")
        self.histograms["n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self.histograms["max_tokens"].observe(sampling.max_tokens)
        return RequestMeter(self, arrival=arrival, num_choices=sampling.n)


class _ChoiceTimes:
    """When a choice had its first and its latest token, in monotonic seconds."""

    __slots__ = ("first", "latest")

    def __init__(self, now: float) -> None:
        self.first = self.latest = now


class RequestMeter:
    """Measures one request as it passes. Single writer: the request's stream."""

    __slots__ = ("_arrival", "_choices", "_measured", "_start", "_unfinished")

    def __init__(self, measured: Measurements, *, arrival: float, num_choices: int) -> None:
        self._measured = measured
        self._arrival = arrival
        self._unfinished = num_choices
        self._start: float | None = None
        self._choices: dict[int, _ChoiceTimes] = {}

    def started(self, at: float) -> None:
        """The request began to run; its later choices do not count."""
        if self._start is None:
            self._start = at
            self._measured.histograms["queue"].observe(max(0.0, at - self._arrival))

    def gained(self, output: RequestOutput) -> None:
        """Take an output of one choice."""
        now = time.monotonic()
        num_new = len(output.token_ids)
        choice = self._choices.get(output.index)
        if choice is not None:
            if num_new:
                self._measured.histograms["inter_token"].observe(
                    (now - choice.latest) / num_new, num_new
                )
                choice.latest = now
        elif num_new:
            choice = self._choices[output.index] = _ChoiceTimes(now)
            if len(self._choices) == 1:
                self._first_token(output, now)
        if output.finish_reason is not None:
            self._finish(output, choice, now)

    def ended(self, error: BaseException | None) -> None:
        """The request is over; what has not finished was aborted, or failed."""
        is_abort = error is None or isinstance(error, GeneratorExit | asyncio.CancelledError)
        self._measured.finished.add("abort" if is_abort else "error", self._unfinished)

    def _first_token(self, output: RequestOutput, now: float) -> None:
        histograms = self._measured.histograms
        histograms["ttft"].observe(now - self._arrival)
        histograms["prompt_tokens"].observe(output.num_prompt_tokens)
        if self._start is not None:
            histograms["prefill"].observe(max(0.0, now - self._start))

    def _finish(self, output: RequestOutput, choice: _ChoiceTimes | None, now: float) -> None:
        histograms = self._measured.histograms
        self._unfinished -= 1
        reason = output.finish_reason
        self._measured.finished.add(reason if reason in _REASONS else "error")
        histograms["e2e"].observe(now - self._arrival)
        histograms["generation_tokens"].observe(output.num_output_tokens)
        if choice is None:
            return
        histograms["decode"].observe(now - choice.first)
        if self._start is not None:
            histograms["inference"].observe(max(0.0, now - self._start))
        if output.num_output_tokens > 1:
            histograms["tpot"].observe((now - choice.first) / (output.num_output_tokens - 1))
