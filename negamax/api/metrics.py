"""Prometheus metrics under the names that vLLM's and SGLang's dashboards read, in a registry that
belongs to one server.

Counters and gauges come from the engine's own statistics when they are scraped, the rest from the
`Measurements` of all server processes; the first one answers for all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from negamax.api.http.lifecycle import Lifecycle
from negamax.api.load_report import LoadReport
from negamax.api.measurements import HISTOGRAMS, Measurements
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.wire import RankStats

_SAMPLE_SECONDS = 1.0  # over which rates are measured
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
        self.measured = Measurements(numbers, index=index)
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
        for key, (_, text, names) in HISTOGRAMS.items():
            for name in names:
                yield self.measured.histograms[key].family(name, text, model_name=self._model_name)
        yield from self._server_counters()
        yield from self._engines()
        yield self._accepted(ranks)
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
        measured = self.measured
        finished, events = measured.finished.totals(), measured.events.totals()
        yield self._labelled(
            "vllm:request_success", "Finished choices by reason.", "finished_reason", finished
        )
        yield self._labelled(
            "vllm:admission_rejections",
            "Requests refused with 429 or 503.",
            "reason",
            measured.rejections.totals(),
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

    def _accepted(self, ranks: Sequence[tuple[str, RankStats]]) -> Metric:
        labels = ["model_name", "engine", "position"]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        metric = CounterMetricFamily(name, "Accepted by position.", labels=labels)
        for rank, stats in ranks:
            for position, count in enumerate(stats.accepted_per_position):
                metric.add_metric([self._model_name, rank, str(position)], count)
        return metric

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
            self.measured.histograms["step_tokens"].observe(num_tokens)
