"""Provide Prometheus metrics with the names that vLLM's and SGLang's dashboards read.

Each scrape reads counters and gauges from the engine's statistics, and other metrics from the
`Measurements` of all server processes. Process 0 answers scrapes for all processes.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
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
from negamax.api.measurements import HISTOGRAMS, Measurements
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.engine_client import AsyncEngine

_SAMPLE_SECONDS = 1.0  # Interval over which rates are measured.
# Counters of each data-parallel rank. An entry has a statistics field, a help text and names.
_COUNTERS = (
    (
        "prompt_tokens",
        "Prompt tokens looked up in the prefix cache.",
        "vllm:prefix_cache_queries vllm:gpu_prefix_cache_queries",
    ),
    (
        "cached_prompt_tokens",
        "Prompt tokens found in the prefix cache.",
        "vllm:prefix_cache_hits vllm:gpu_prefix_cache_hits vllm:prompt_tokens_cached "
        "sglang:cached_tokens",
    ),
    (
        "prompt_tokens",
        "Prompt tokens, including cached tokens.",
        "vllm:prompt_tokens sglang:prompt_tokens",
    ),
    ("generated_tokens", "Generated tokens.", "vllm:generation_tokens sglang:generation_tokens"),
    ("preemption_count", "Preempted sequences.", "vllm:num_preemptions"),
    ("num_drafts", "Drafts proposed.", "vllm:spec_decode_num_drafts"),
    ("num_draft_tokens", "Draft tokens proposed.", "vllm:spec_decode_num_draft_tokens"),
    ("num_accepted_tokens", "Draft tokens accepted.", "vllm:spec_decode_num_accepted_tokens"),
    ("num_host_queries", "KV tokens sought in main memory.", "vllm:external_prefix_cache_queries"),
    ("num_host_hits", "KV tokens found in main memory.", "vllm:external_prefix_cache_hits"),
    ("num_host_evictions", "KV blocks evicted from main memory.", "negamax:kv_offload_evictions"),
    ("num_file_evictions", "KV files deleted at the size limit.", "negamax:kv_file_evictions"),
    ("num_file_errors", "Damaged KV files, and system errors.", "negamax:kv_file_errors"),
    ("num_kv_event_batches", "Batches of KV events that were sent.", "negamax:kv_event_batches"),
    ("num_dropped_kv_events", "Steps whose KV events were dropped.", "negamax:kv_events_dropped"),
    ("num_remote_prefills", "Prompts that another server computed.", "negamax:remote_prefills"),
    ("num_failed_prefills", "Remote prompts that failed.", "negamax:failed_remote_prefills"),
    ("num_local_prefills", "Requests with locally computed prompts.", "negamax:local_prefills"),
    ("num_pulled_blocks", "KV blocks read from other servers.", "negamax:pulled_kv_blocks"),
    ("num_expired_leases", "Kept prompts that no server read.", "negamax:expired_kv_leases"),
)
# Counters of copied KV blocks. An entry has a statistics field and vLLM's copy direction.
_COPIES = (("num_host_stores", "GPU_to_CPU"), ("num_host_loads", "CPU_to_GPU"))
# Counters of KV blocks in files. An entry has a statistics field, SGLang's name and a help text.
_FILES = (
    ("num_file_reads", "sglang:prefetched_tokens", "Tokens of KV cache read from files."),
    ("num_file_writes", "sglang:backuped_tokens", "Tokens of KV cache written into files."),
)
_FILE_BYTES = (("num_file_bytes_read", "read"), ("num_file_bytes_written", "write"))
_RUNNING, _WAITING = "Sequences in the running batch.", "Sequences waiting to run."
_ACCEPTED = "Mean number of accepted tokens and bonus tokens per draft."
_OPEN = "Requests that are being answered, also in the background."
_LAG = "Delay of the event loop in seconds."
_HITS = "Fraction of recent prompt tokens that were found in the prefix cache."
_CACHE = "Fraction of KV blocks in use, 0 to 1."
_HOST = "Fraction of the KV blocks in main memory that have content, 0 to 1."
_IN_FILES = "Fraction of the KV blocks in files that have content, 0 to 1."
_LEASES = "Prompts that are kept for other servers."
_BALANCE = "Recent mean expert load of the ranks divided by the busiest rank's load."
_SYNTHETIC = "Tokens per step that a benchmark prescribes without verifying drafts."

SYNTHETIC_ACCEPTANCE = "negamax:synthetic_acceptance_length"

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
        for name, text, value in self._gauges():
            yield self._metric(GaugeMetricFamily, name, text, [((), value)])
        yield from self._rank_metrics()
        for key, (_, text, names) in HISTOGRAMS.items():
            for name in names.split():
                yield self.measured.histograms[key].family(name, text, model_name=self._model_name)
        yield from self._server_counters()
        yield from self._engine_metrics()
        engine = self._engine.info
        pages, size = str(engine.num_kv_blocks), str(engine.block_size)
        for name, labels in (
            ("vllm:cache_config", {"block_size": size, "num_gpu_blocks": pages}),
            ("sglang:cache_config", {"page_size": size, "num_pages": pages}),
        ):
            info = InfoMetricFamily(name, "Configuration of the KV cache.", labels=["model_name"])
            info.add_metric([self._model_name], labels)
            yield info
        # Some routers need this metric, even without LoRA adapters.
        adapters = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        name, text = "vllm:lora_requests_info", "Adapters, which are not supported."
        yield self._metric(GaugeMetricFamily, name, text, [(("0", "", ""), time.time())], *adapters)

    def _metric(
        self, kind: MetricFamily, name: str, text: str, samples: Samples, *labels: str
    ) -> Metric:
        metric = kind(name, text, labels=["model_name", *labels])
        for values, value in samples:
            metric.add_metric([self._model_name, *values], value)
        return metric

    def _gauges(self) -> Sequence[tuple[str, str, float]]:
        engine, stats, info = self._engine, self._engine.stats, self._engine.info
        used_blocks = stats.num_kv_blocks - stats.num_free_kv_blocks
        drafted, drafts = stats.num_draft_tokens, stats.num_drafts
        accepted = stats.num_accepted_tokens
        used_tokens = used_blocks * info.block_size
        all_tokens = info.num_kv_blocks * info.block_size * engine.num_ranks
        utilization = stats.num_running / (info.max_num_seqs * engine.num_ranks)
        accept_length = accepted / drafts + 1 if drafts else 0
        accept_rate = accepted / drafted if drafted else 0
        waiting_tokens, num_open = engine.admission.waiting_tokens, self._lifecycle.total_open
        gauges = [
            ("sglang:num_running_reqs", _RUNNING, stats.num_running),
            ("sglang:num_queue_reqs", _WAITING, stats.num_waiting),
            ("sglang:token_usage", _CACHE, compute_cache_usage(stats)),
            ("sglang:num_used_tokens", "Tokens in the KV cache.", used_tokens),
            ("sglang:max_total_num_tokens", "Capacity of the KV cache in tokens.", all_tokens),
            ("sglang:gen_throughput", "Generated tokens per second.", self._throughput),
            ("sglang:cache_hit_rate", _HITS, self._hit_rate),
            ("sglang:num_retracted_reqs", "Preempted sequences.", stats.preemption_count),
            ("sglang:utilization", "Running sequences divided by the limit.", utilization),
            ("sglang:spec_accept_length", _ACCEPTED, accept_length),
            ("sglang:spec_accept_rate", "Fraction of accepted draft tokens.", accept_rate),
            ("negamax:waiting_tokens", "Prompt tokens of waiting sequences.", waiting_tokens),
            ("negamax:open_requests", _OPEN, num_open),
            ("negamax:draining", "1 while the server stops.", float(self._lifecycle.is_draining)),
            ("negamax:event_loop_lag_seconds", _LAG, self._lifecycle.worst_lag),
        ]
        rates = info.speculation.synthetic_acceptance_rates if info.speculation else None
        if rates is not None:
            gauges.append((SYNTHETIC_ACCEPTANCE, _SYNTHETIC, 1.0 + sum(rates)))
        if stats.num_host_blocks:
            used, total = stats.num_used_host_blocks, stats.num_host_blocks
            gauges += [
                ("vllm:cpu_cache_usage_perc", _HOST, used / total),
                ("sglang:hicache_host_used_tokens", "Host tokens in use.", used * info.block_size),
                ("sglang:hicache_host_total_tokens", "Host token limit.", total * info.block_size),
            ]
        if stats.num_file_blocks:
            used, total = stats.num_used_file_blocks, stats.num_file_blocks
            gauges.append(("negamax:kv_file_usage_perc", _IN_FILES, used / total))
        if info.transfer is not None:
            gauges.append(("negamax:kv_leases", _LEASES, stats.num_leases))
        if stats.experts is not None:
            gauges.append(("negamax:expert_balancedness", _BALANCE, stats.experts.balancedness))
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
        gauges = (
            ("vllm:num_requests_running", _RUNNING, attrgetter("num_running")),
            ("vllm:num_requests_waiting", _WAITING, attrgetter("num_waiting")),
            ("vllm:num_requests_swapped", "Swapped sequences, always 0.", lambda _: 0),
            ("vllm:kv_cache_usage_perc", _CACHE, compute_cache_usage),
            ("vllm:gpu_cache_usage_perc", _CACHE, compute_cache_usage),
        )
        for name, text, value in gauges:
            samples = [((rank,), value(stats)) for rank, stats in ranks]
            yield self._metric(GaugeMetricFamily, name, text, samples, "engine")
        for field, text, names in _COUNTERS:
            samples = [((rank,), getattr(stats, field)) for rank, stats in ranks]
            for name in names.split():
                yield self._metric(CounterMetricFamily, name, text, samples, "engine")
        info, labels = self._engine.info, ("engine", "transfer_type")
        for field, name, text in _FILES:
            samples = [((rank,), getattr(stats, field) * info.block_size) for rank, stats in ranks]
            yield self._metric(CounterMetricFamily, name, text, samples, "engine")
        for name, text, num_bytes, fields in (
            (
                "vllm:kv_offload_total_bytes",
                "Bytes copied from and to main memory.",
                info.host_block_bytes,
                _COPIES,
            ),
            ("negamax:kv_file_bytes", "Bytes of KV blocks read and written.", 1, _FILE_BYTES),
        ):
            copied = [
                ((rank, direction), getattr(stats, field) * num_bytes)
                for rank, stats in ranks
                for field, direction in fields
            ]
            yield self._metric(CounterMetricFamily, name, text, copied, *labels)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        accepted = [
            ((rank, str(position)), count)
            for rank, stats in ranks
            for position, count in enumerate(stats.accepted_per_position)
        ]
        labels = ("engine", "position")
        yield self._metric(
            CounterMetricFamily, name, "Accepted draft tokens by position.", accepted, *labels
        )

    def _server_counters(self) -> Iterator[Metric]:
        measured, experts = self.measured, self._engine.stats.experts
        finished, events = measured.finished.totals(), measured.events.totals()
        refused = measured.rejections.totals()
        for name, text, label, counts in (
            ("vllm:request_success", "Finished choices by reason.", "finished_reason", finished),
            ("vllm:admission_rejections", "Requests refused with 429 or 503.", "reason", refused),
        ):
            samples = [((value,), count) for value, count in counts.items()]
            yield self._metric(CounterMetricFamily, name, text, samples, label)
        counters = [
            ("vllm:tool_call_parser_invocations", "Tool calls parsed.", events["tool_calls"]),
            ("sglang:num_requests", "Requests.", events["requests"]),
            ("sglang:num_aborted_requests", "Choices that were aborted.", finished["abort"]),
        ]
        if experts is not None:
            counters += [
                ("negamax:expert_rebalances", "Rebalances of experts.", experts.num_rebalances),
                ("negamax:experts_moved", "Experts moved to another slot.", experts.num_moved),
            ]
        for name, text, total in counters:
            yield self._metric(CounterMetricFamily, name, text, [((), total)])

    def _engine_metrics(self) -> Iterator[Metric]:
        for kind, name, text, value in (
            (GaugeMetricFamily, "engine_up", "1 while the engine can serve.", "alive"),
            (CounterMetricFamily, "engine_restarts", "Restarts of the engine.", "restart_count"),
            (CounterMetricFamily, "engine_steps", "Steps the engine has run.", "stats.step_count"),
        ):
            read = attrgetter(value)
            samples = [((str(each.index),), float(read(each))) for each in self._engine.replicas]
            yield self._metric(kind, f"negamax:{name}", text, samples, "replica")

    def _count_steps(self, step_tokens: list[int]) -> None:
        for num_tokens in step_tokens:
            self.measured.histograms["step_tokens"].observe(num_tokens)
