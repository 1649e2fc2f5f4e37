"""Provide Prometheus metrics with the names that vLLM's and SGLang's dashboards read.

Each scrape reads counters and gauges from the engine's statistics, and other metrics from the
`Measurements` of all server processes. Process 0 answers scrapes for all processes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from negamax.api.http.lifecycle import Lifecycle
from negamax.api.load_report import LoadReport, compute_cache_usage
from negamax.api.measurements import HISTOGRAMS, METRICS, Measurements
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.wire import RankStats

_SAMPLE_SECONDS = 1.0  # Interval over which rates are measured.
_TEXTS: dict[str, str] = METRICS["texts"]  # Metric -> help text.
# `_COPIES`: (field that counts copied KV blocks, vLLM's name of the copy direction).
_COPIES = (("num_host_stores", "GPU_to_CPU"), ("num_host_loads", "CPU_to_GPU"))
# (field that counts KV blocks read from or written to files, SGLang's metric in tokens).
_FILES = (
    ("num_file_reads", "sglang:prefetched_tokens"),
    ("num_file_writes", "sglang:backuped_tokens"),
)
_FILE_BYTES = (("num_file_bytes_read", "read"), ("num_file_bytes_written", "write"))

MetricFamily = type[GaugeMetricFamily] | type[CounterMetricFamily]
Samples = Iterable[tuple[tuple[str, ...], float]]  # Pairs of label values and metric value.


class ServerMetrics(Collector):
    """All metrics of one server, in one registry. Only the event loop changes this object."""

    def __init__(
        self,
        engine: AsyncEngine,
        lifecycle: Lifecycle,
        *,
        model_name: str,
        numbers: SharedNumbers,
        index: int,
    ) -> None:
        """`numbers` have `NUM_COLUMNS` columns; this process writes row `index`."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.measured = Measurements(numbers, index=index)
        self._engine = engine
        self._lifecycle = lifecycle
        self._model_name = model_name
        self._throughput = 0.0  # Generated tokens per second.
        self._hit_rate = 0.0  # Prefix cache hit rate, 0 to 1.
        for replica in engine.replicas:
            replica.on_steps = self._count_steps

    async def watch(self) -> None:
        report = LoadReport(self._engine.stats, now=time.monotonic())
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            load = report.next(self._engine.stats, now=time.monotonic())
            self._throughput = 0.0 if load is None else load["decode_tokens_per_s"]
            self._hit_rate = report.hit_rate

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges().items():
            yield self._metric(GaugeMetricFamily, name, [((), value)])
        yield from self._rank_metrics()
        for key, table in HISTOGRAMS.items():
            histogram, text = self.measured.histograms[key], table["text"]
            for name in table["names"].split():
                yield histogram.family(name, text, model_name=self._model_name)
        yield from self._server_counters()
        yield from self._engine_metrics()
        engine = self._engine.info
        pages, size = str(engine.num_kv_blocks), str(engine.block_size)
        for name, labels in (
            ("vllm:cache_config", {"block_size": size, "num_gpu_blocks": pages}),
            ("sglang:cache_config", {"page_size": size, "num_pages": pages}),
        ):
            info = InfoMetricFamily(name, _TEXTS[name], labels=["model_name"])
            info.add_metric([self._model_name], labels)
            yield info
        # Some routers need this metric, even without LoRA adapters.
        adapters = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        never = [(("0", "", ""), time.time())]
        yield self._metric(GaugeMetricFamily, "vllm:lora_requests_info", never, *adapters)

    def _metric(
        self, kind: MetricFamily, name: str, samples: Samples, *labels: str, text: str | None = None
    ) -> Metric:
        metric = kind(name, text or _TEXTS[name], labels=["model_name", *labels])
        for values, value in samples:
            metric.add_metric([self._model_name, *values], value)
        return metric

    def _gauges(self) -> dict[str, float]:
        engine, stats, info = self._engine, self._engine.stats, self._engine.info
        used_blocks = stats.num_kv_blocks - stats.num_free_kv_blocks
        drafted, drafts = stats.num_draft_tokens, stats.num_drafts
        accepted = stats.num_accepted_tokens
        gauges = {
            "sglang:num_running_reqs": stats.num_running,
            "sglang:num_queue_reqs": stats.num_waiting,
            "sglang:token_usage": compute_cache_usage(stats),
            "sglang:num_used_tokens": used_blocks * info.block_size,
            "sglang:max_total_num_tokens": info.num_kv_blocks * info.block_size * engine.num_ranks,
            "sglang:gen_throughput": self._throughput,
            "sglang:cache_hit_rate": self._hit_rate,
            "sglang:num_retracted_reqs": stats.preemption_count,
            "sglang:utilization": stats.num_running / (info.max_num_seqs * engine.num_ranks),
            "sglang:spec_accept_length": accepted / drafts + 1 if drafts else 0,
            "sglang:spec_accept_rate": accepted / drafted if drafted else 0,
            "negamax:waiting_tokens": engine.admission.waiting_tokens,
            "negamax:open_requests": self._lifecycle.total_open,
            "negamax:draining": self._lifecycle.is_draining,
            "negamax:event_loop_lag_seconds": self._lifecycle.worst_lag,
        }
        rates = info.speculation.synthetic_acceptance_rates if info.speculation else None
        if rates is not None:
            gauges["negamax:synthetic_acceptance_length"] = 1.0 + sum(rates)
        if stats.num_host_blocks:
            used, total = stats.num_used_host_blocks, stats.num_host_blocks
            gauges["vllm:cpu_cache_usage_perc"] = used / total
            gauges["sglang:hicache_host_used_tokens"] = used * info.block_size
            gauges["sglang:hicache_host_total_tokens"] = total * info.block_size
        if stats.num_file_blocks:
            share = stats.num_used_file_blocks / stats.num_file_blocks
            gauges["negamax:kv_file_usage_perc"] = share
        if info.transfer is not None:
            gauges["negamax:kv_leases"] = stats.num_leases
        if stats.experts is not None:
            gauges["negamax:expert_balancedness"] = stats.experts.balancedness
        return gauges

    def _rank_metrics(self) -> Iterator[Metric]:
        """Yield the metrics of each data-parallel rank.

        As in vLLM, the label `engine` is the rank that clients can send in X-data-parallel-rank.
        """
        size = self._engine.info.data_parallel_size
        ranks = [
            (str(replica.index * size + rank), stats)
            for replica in self._engine.replicas
            for rank, stats in enumerate(replica.stats.by_rank)
        ]
        gauges: tuple[tuple[str, Callable[[RankStats], float]], ...] = (
            ("vllm:num_requests_running", attrgetter("num_running")),
            ("vllm:num_requests_waiting", attrgetter("num_waiting")),
            ("vllm:num_requests_swapped", lambda _: 0),
            ("vllm:kv_cache_usage_perc", compute_cache_usage),
            ("vllm:gpu_cache_usage_perc", compute_cache_usage),
        )
        for name, read in gauges:
            samples = [((rank,), read(stats)) for rank, stats in ranks]
            yield self._metric(GaugeMetricFamily, name, samples, "engine")
        for field, text, names in METRICS["rank_counters"]:
            samples = [((rank,), getattr(stats, field)) for rank, stats in ranks]
            for name in names.split():
                yield self._metric(CounterMetricFamily, name, samples, "engine", text=text)
        info = self._engine.info
        for field, name in _FILES:
            samples = [((rank,), getattr(stats, field) * info.block_size) for rank, stats in ranks]
            yield self._metric(CounterMetricFamily, name, samples, "engine")
        for name, num_bytes, fields in (
            ("vllm:kv_offload_total_bytes", info.host_block_bytes, _COPIES),
            ("negamax:kv_file_bytes", 1, _FILE_BYTES),
        ):
            copied = [
                ((rank, direction), getattr(stats, field) * num_bytes)
                for rank, stats in ranks
                for field, direction in fields
            ]
            yield self._metric(CounterMetricFamily, name, copied, "engine", "transfer_type")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        accepted = [
            ((rank, str(position)), count)
            for rank, stats in ranks
            for position, count in enumerate(stats.accepted_per_position)
        ]
        yield self._metric(CounterMetricFamily, name, accepted, "engine", "position")

    def _server_counters(self) -> Iterator[Metric]:
        measured, experts = self.measured, self._engine.stats.experts
        finished, events = measured.finished.totals(), measured.events.totals()
        for name, label, counts in (
            ("vllm:request_success", "finished_reason", finished),
            ("vllm:admission_rejections", "reason", measured.rejections.totals()),
        ):
            samples = [((value,), count) for value, count in counts.items()]
            yield self._metric(CounterMetricFamily, name, samples, label)
        counters = {
            "vllm:tool_call_parser_invocations": events["tool_calls"],
            "sglang:num_requests": events["requests"],
            "sglang:num_aborted_requests": finished["abort"],
        }
        if experts is not None:
            counters["negamax:expert_rebalances"] = experts.num_rebalances
            counters["negamax:experts_moved"] = experts.num_moved
        for name, total in counters.items():
            yield self._metric(CounterMetricFamily, name, [((), total)])

    def _engine_metrics(self) -> Iterator[Metric]:
        for kind, name, value in (
            (GaugeMetricFamily, "negamax:engine_up", "alive"),
            (CounterMetricFamily, "negamax:engine_restarts", "restart_count"),
            (CounterMetricFamily, "negamax:engine_steps", "stats.step_count"),
        ):
            read = attrgetter(value)
            samples = [((str(each.index),), float(read(each))) for each in self._engine.replicas]
            yield self._metric(kind, name, samples, "replica")

    def _count_steps(self, step_tokens: list[int]) -> None:
        for num_tokens in step_tokens:
            self.measured.histograms["step_tokens"].observe(num_tokens)
