"""Prometheus metrics under the names that vLLM's and SGLang's dashboards read, in a registry that
belongs to one server.

Counters and gauges come from the engine's own statistics when they are scraped; histograms are
filled as outputs pass. Where several processes serve, each counts what passes it in numbers that
they share, and the first one answers for all.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from negamax.api.http.lifecycle import Lifecycle
from negamax.api.load_report import LoadReport
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.output import RequestOutput
from negamax.engine.wire import RankStats
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
_SAMPLE_SECONDS = 1.0  # over which rates are measured
REASONS = ("stop", "length", "abort", "error")
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
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str, tuple[str, ...]]] = {
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

# Counters: names, help, and the value in the statistics of a data-parallel rank.
_COUNTERS: tuple[tuple[tuple[str, ...], str, Callable[[RankStats], float]], ...] = (
    (
        ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prompt_tokens,
    ),
    (
        (
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits",
            "vllm:prompt_tokens_cached",
            "sglang:cached_tokens",
        ),
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.cached_prompt_tokens,
    ),
    (
        ("vllm:prompt_tokens", "sglang:prompt_tokens"),
        "Prompt tokens, cached ones included.",
        lambda stats: stats.prompt_tokens,
    ),
    (
        ("vllm:generation_tokens", "sglang:generation_tokens"),
        "Generated tokens.",
        lambda stats: stats.generated_tokens,
    ),
    (
        ("vllm:num_preemptions",),
        "Sequences set back to make room for others.",
        lambda stats: stats.preemption_count,
    ),
    (("vllm:spec_decode_num_drafts",), "Drafts proposed.", lambda stats: stats.num_drafts),
    (
        ("vllm:spec_decode_num_draft_tokens",),
        "Draft tokens proposed.",
        lambda stats: stats.num_draft_tokens,
    ),
    (
        ("vllm:spec_decode_num_accepted_tokens",),
        "Draft tokens accepted.",
        lambda stats: stats.num_accepted_tokens,
    ),
)
_RUNNING, _WAITING = "Sequences in the running batch.", "Sequences waiting to run."
_CACHE = "Share of KV blocks in use, 0 to 1."


def _usage(stats: RankStats) -> float:
    total = stats.num_kv_blocks
    return 1.0 - stats.num_free_kv_blocks / total if total else 0.0


# Gauges of a data-parallel rank, likewise.
_RANK_GAUGES: tuple[tuple[tuple[str, ...], str, Callable[[RankStats], float]], ...] = (
    (("vllm:num_requests_running",), _RUNNING, lambda stats: stats.num_running),
    (("vllm:num_requests_waiting",), _WAITING, lambda stats: stats.num_waiting),
    (("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), _CACHE, _usage),
)

SYNTHETIC_ACCEPTANCE = "negamax:synthetic_acceptance_length"

# What the server processes share: Lifecycle's numbers first, then counts, then the histograms.
_COUNTS = (REASONS, _REJECTIONS, _EVENTS)
NUM_COLUMNS = (
    Lifecycle.NUM_COLUMNS
    + sum(map(len, _COUNTS))
    + sum(Histogram.num_columns(bounds) for bounds, _, _ in _HISTOGRAMS.values())
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


class ServerMetrics(Collector):
    """All metrics of one server. Single writer: the event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        lifecycle: Lifecycle,
        *,
        model_name: str,
        numbers: SharedNumbers,
        index: int,
    ) -> None:
        """`numbers` have `NUM_COLUMNS`, and this process writes row `index`."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        start = Lifecycle.NUM_COLUMNS
        counts = []
        for names in _COUNTS:
            counts.append(Counts(names, numbers=numbers, index=index, start=start))
            start += len(names)
        # choices by reason, refusals by code, requests and tool calls
        self.finished, self.rejections, self.events = counts
        self.histograms: dict[str, Histogram] = {}
        for key, (bounds, _, _) in _HISTOGRAMS.items():
            self.histograms[key] = Histogram(bounds, numbers=numbers, index=index, start=start)
            start += Histogram.num_columns(bounds)
        self._engine = engine
        self._lifecycle = lifecycle
        self._model_name = model_name
        self._throughput = 0.0  # generated tokens per second
        self._hit_rate = 0.0  # of the prefix cache
        for replica in engine.replicas:
            replica.on_steps = self._count_steps

    async def watch(self) -> None:
        """Measure rates over the last second or so, until cancelled."""
        report = LoadReport(self._engine.stats, now=time.monotonic())
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            load = report.next(self._engine.stats, now=time.monotonic())
            self._throughput = 0.0 if load is None else load["decode_tokens_per_s"]
            self._hit_rate = report.hit_rate

    def meter(self, sampling: SamplingParams, *, arrival: float) -> RequestMeter:
        """The observer of a request that arrived at `time.monotonic()` second `arrival`."""
        self.events.add("requests")
        self.histograms["n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self.histograms["max_tokens"].observe(sampling.max_tokens)
        return RequestMeter(self, arrival=arrival, num_choices=sampling.n)

    def collect(self) -> Iterator[Metric]:
        """Everything, as Prometheus asks for it."""
        yield from self._gauges()
        ranks = self._ranks()
        for names, text, value in _RANK_GAUGES:
            for name in names:
                yield self._by_rank(GaugeMetricFamily, name, text, value, ranks)
        for names, text, value in _COUNTERS:
            for name in names:
                yield self._by_rank(CounterMetricFamily, name, text, value, ranks)
        for key, (_, text, names) in _HISTOGRAMS.items():
            for name in names:
                yield self.histograms[key].family(name, text, model_name=self._model_name)
        yield from self._server_counters()
        yield from self._engines()
        yield from self._speculation()
        yield from self._experts()
        yield from self._cache_info()

    def _gauges(self) -> Iterator[Metric]:
        engine, stats, info = self._engine, self._engine.stats, self._engine.info
        total, free = stats.num_kv_blocks, stats.num_free_kv_blocks
        usage = _usage(stats)
        drafted, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        drafts = stats.num_drafts
        gauges: tuple[tuple[str, str, float], ...] = (
            ("sglang:num_running_reqs", _RUNNING, stats.num_running),
            ("sglang:num_queue_reqs", _WAITING, stats.num_waiting),
            ("sglang:token_usage", _CACHE, usage),
            (
                "sglang:num_used_tokens",
                "Tokens of KV cache in use.",
                (total - free) * info.block_size,
            ),
            (
                "sglang:max_total_num_tokens",
                "Tokens that the KV cache holds.",
                info.num_kv_blocks * info.block_size * engine.num_ranks,
            ),
            ("sglang:gen_throughput", "Generated tokens per second.", self._throughput),
            (
                "sglang:cache_hit_rate",
                "Share of prompt tokens found in the prefix cache, lately.",
                self._hit_rate,
            ),
            (
                "sglang:num_retracted_reqs",
                "Sequences set back to make room for others.",
                stats.preemption_count,
            ),
            (
                "sglang:utilization",
                "Share of the running batch's places in use.",
                stats.num_running / (info.max_num_seqs * engine.num_ranks),
            ),
            (
                "sglang:spec_accept_length",
                "Tokens per draft that were right, and one.",
                accepted / drafts + 1 if drafts else 0,
            ),
            (
                "sglang:spec_accept_rate",
                "Share of draft tokens that were right.",
                accepted / drafted if drafted else 0,
            ),
            (
                "negamax:waiting_tokens",
                "Prompt tokens of waiting sequences.",
                engine.admission.waiting_tokens,
            ),
            (
                "negamax:open_requests",
                "Requests that are being answered, also in the background.",
                self._lifecycle.total_open,
            ),
            ("negamax:draining", "1 while the server stops.", float(self._lifecycle.is_draining)),
            (
                "negamax:event_loop_lag_seconds",
                "How late the event loop was.",
                self._lifecycle.worst_lag,
            ),
        )
        rates = info.speculation.synthetic_acceptance_rates if info.speculation else None
        if rates is not None:
            text = "Tokens per verified row that a benchmark asked for: no draft is compared."
            gauges += ((SYNTHETIC_ACCEPTANCE, text, 1.0 + sum(rates)),)
        if stats.experts is not None:
            text = (
                "Mean of the ranks' tokens for experts over the busiest rank's, lately; 1: alike."
            )
            gauges += (("negamax:expert_balancedness", text, stats.experts.balancedness),)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _server_counters(self) -> Iterator[Metric]:
        finished, events = self.finished.totals(), self.events.totals()
        yield self._labelled(
            "vllm:request_success", "Finished choices by reason.", "finished_reason", finished
        )
        yield self._labelled(
            "vllm:admission_rejections",
            "Requests refused with 429 or 503.",
            "reason",
            self.rejections.totals(),
        )
        yield self._counter(
            "vllm:tool_call_parser_invocations", "Tool calls parsed.", events["tool_calls"]
        )
        yield self._counter("sglang:num_requests", "Requests.", events["requests"])
        yield self._counter(
            "sglang:num_aborted_requests", "Choices that were aborted.", finished["abort"]
        )

    def _engines(self) -> Iterator[Metric]:
        """Metrics of each engine process: whether it runs, and what its ranks have in common."""
        labels = ["model_name", "replica"]
        is_up = GaugeMetricFamily(
            "negamax:engine_up", "1 while the engine can serve.", labels=labels
        )
        restarts = CounterMetricFamily(
            "negamax:engine_restarts", "Restarts of the engine.", labels=labels
        )
        steps = CounterMetricFamily(
            "negamax:engine_steps", "Steps the engine has run.", labels=labels
        )
        for replica in self._engine.replicas:
            values = [self._model_name, str(replica.index)]
            is_up.add_metric(values, float(replica.alive))
            restarts.add_metric(values, replica.restart_count)
            steps.add_metric(values, replica.stats.step_count)
        yield from (is_up, restarts, steps)

    def _ranks(self) -> list[tuple[str, RankStats]]:
        """The statistics of each data-parallel rank by its number: what X-data-parallel-rank
        names, and vLLM calls an engine.
        """
        size = self._engine.info.data_parallel_size
        return [
            (str(replica.index * size + rank), stats)
            for replica in self._engine.replicas
            for rank, stats in enumerate(replica.stats.by_rank)
        ]

    def _by_rank(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: Callable[[RankStats], float],
        ranks: Sequence[tuple[str, RankStats]],
    ) -> Metric:
        metric = family(name, text, labels=["model_name", "engine"])
        for rank, stats in ranks:
            metric.add_metric([self._model_name, rank], value(stats))
        return metric

    def _speculation(self) -> Iterator[Metric]:
        accepted = {
            str(position): float(count)
            for position, count in enumerate(self._engine.stats.accepted_per_position)
        }
        yield self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted by position.",
            "position",
            accepted,
        )

    def _experts(self) -> Iterator[Metric]:
        found = self._engine.stats.experts
        if found is not None:
            rounds, moved = "Rebalances of experts.", "Experts moved from one slot to another."
            yield self._counter("negamax:expert_rebalances", rounds, found.num_rebalances)
            yield self._counter("negamax:experts_moved", moved, found.num_moved)

    def _cache_info(self) -> Iterator[Metric]:
        info = self._engine.info
        cache = InfoMetricFamily(
            "vllm:cache_config", "The KV cache as configured.", labels=["model_name"]
        )
        cache.add_metric(
            [self._model_name],
            {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_kv_blocks)},
        )
        yield cache

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _labelled(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, count in counts.items():
            counter.add_metric([self._model_name, value], count)
        return counter

    def _count_steps(self, step_tokens: list[int]) -> None:
        for num_tokens in step_tokens:
            self.histograms["step_tokens"].observe(num_tokens)


class _ChoiceTimes:
    """When a choice had its first and its latest token, in monotonic seconds."""

    __slots__ = ("first", "latest")

    def __init__(self, now: float) -> None:
        self.first = self.latest = now


class RequestMeter:
    """Measures one request as it passes. Single writer: the request's stream."""

    __slots__ = ("_arrival", "_choices", "_metrics", "_start", "_unfinished")

    def __init__(self, metrics: ServerMetrics, *, arrival: float, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._unfinished = num_choices
        self._start: float | None = None
        self._choices: dict[int, _ChoiceTimes] = {}

    def started(self, at: float) -> None:
        """The request began to run; its later choices do not count."""
        if self._start is None:
            self._start = at
            self._metrics.histograms["queue"].observe(max(0.0, at - self._arrival))

    def gained(self, output: RequestOutput) -> None:
        """Take an output of one choice."""
        now = time.monotonic()
        num_new = len(output.token_ids)
        choice = self._choices.get(output.index)
        if choice is not None:
            if num_new:
                self._metrics.histograms["inter_token"].observe(
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
        self._metrics.finished.add("abort" if is_abort else "error", self._unfinished)

    def _first_token(self, output: RequestOutput, now: float) -> None:
        histograms = self._metrics.histograms
        histograms["ttft"].observe(now - self._arrival)
        histograms["prompt_tokens"].observe(output.num_prompt_tokens)
        if self._start is not None:
            histograms["prefill"].observe(max(0.0, now - self._start))

    def _finish(self, output: RequestOutput, choice: _ChoiceTimes | None, now: float) -> None:
        histograms = self._metrics.histograms
        self._unfinished -= 1
        reason = output.finish_reason
        self._metrics.finished.add(reason if reason in REASONS else "error")
        histograms["e2e"].observe(now - self._arrival)
        histograms["generation_tokens"].observe(output.num_output_tokens)
        if choice is None:
            return
        histograms["decode"].observe(now - choice.first)
        if self._start is not None:
            histograms["inference"].observe(max(0.0, now - self._start))
        if output.num_output_tokens > 1:
            histograms["tpot"].observe((now - choice.first) / (output.num_output_tokens - 1))
