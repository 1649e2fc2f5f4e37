"""Prometheus metrics under the names that vLLM dashboards read, in a registry that belongs to one server.

Counters and gauges come from the engine's own statistics when they are scraped; histograms are filled per request here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from negamax.engine.output import RequestOutput
from negamax.engine.wire import EngineStats, ModelInfo
from negamax.scheduler.request import SamplingParams

_TTFT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKEN_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

# metric, help, the value in the engine's statistics; the second generation of names is the one older dashboards ask for
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda stats: stats.num_running),
    ("vllm:num_requests_waiting", "Sequences waiting to run.", lambda stats: stats.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats: _usage(stats)),
    ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", lambda stats: _usage(stats)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.cached_prompt_tokens),
    ("vllm:gpu_prefix_cache_queries", "Older name of vllm:prefix_cache_queries.", lambda stats: stats.prompt_tokens),
    ("vllm:gpu_prefix_cache_hits", "Older name of vllm:prefix_cache_hits.", lambda stats: stats.cached_prompt_tokens),
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included.", lambda stats: stats.prompt_tokens),
    ("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", lambda stats: stats.cached_prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda stats: stats.generated_tokens),
    ("vllm:num_preemptions", "Sequences set back to make room for others.", lambda stats: stats.preemption_count),
    ("negamax:engine_steps", "Steps the engine has run.", lambda stats: stats.step_count),
)
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_SECONDS),
    ("vllm:inter_token_latency_seconds", "Between two tokens of one choice.", _TOKEN_SECONDS),
    ("vllm:time_per_output_token_seconds", "Older name of vllm:inter_token_latency_seconds.", _TOKEN_SECONDS),
    ("vllm:request_time_per_output_token_seconds", "Mean time per token after the first, per choice.", _TOKEN_SECONDS),
    ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKEN_COUNTS),
    ("vllm:request_generation_tokens", "Generated tokens per choice.", _TOKEN_COUNTS),
    ("vllm:request_params_max_tokens", "max_tokens per request that sets it.", _TOKEN_COUNTS),
    ("vllm:request_params_n", "Choices per request.", _CHOICES),
)


def _usage(stats: EngineStats) -> float:
    return 1.0 - stats.num_free_kv_blocks / stats.num_kv_blocks if stats.num_kv_blocks else 0.0


class _EngineCollector(Collector):
    """Reads the engine's latest statistics at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], *, info: ModelInfo, model_name: str) -> None:
        self._stats = stats
        self._info = info
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value(stats))
            yield counter
        cache = InfoMetricFamily("vllm:cache_config", "The KV cache as configured.", labels=["model_name"])
        sizes = {"block_size": str(self._info.block_size), "num_gpu_blocks": str(self._info.num_kv_blocks)}
        cache.add_metric([self._model_name], sizes)
        yield cache


class ServerMetrics:
    """All metrics of one server. Single writer: the event loop."""

    def __init__(self, stats: Callable[[], EngineStats], *, info: ModelInfo, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(stats, info=info, model_name=model_name))
        self._histograms = {
            name: Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(model_name)
            for name, text, buckets in _HISTOGRAMS
        }
        labels = ["model_name", "finished_reason"]
        success = Counter("vllm:request_success", "Finished choices by reason.", labels, registry=self.registry)
        self._finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

    async def record(
        self, outputs: AsyncGenerator[RequestOutput, None], *, sampling: SamplingParams, arrival: float
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass `outputs` on and measure them; `arrival` is the request's `time.monotonic()`. Closing closes `outputs`."""
        self._observe("vllm:request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", sampling.max_tokens)
        first: dict[int, float] = {}
        latest: dict[int, float] = {}
        unfinished, reason = sampling.n, "abort"
        try:
            async with aclosing(outputs) as stream:
                async for output in stream:
                    self._observe_output(output, first=first, latest=latest, arrival=arrival)
                    unfinished -= output.finish_reason is not None
                    yield output
        except Exception:
            reason = "error"
            raise
        finally:
            self._finished[reason].inc(unfinished)

    def _observe_output(
        self, output: RequestOutput, *, first: dict[int, float], latest: dict[int, float], arrival: float
    ) -> None:
        now = time.monotonic()
        index, num_new = output.index, len(output.token_ids)
        if num_new and index not in first:
            if not first:
                self._observe("vllm:time_to_first_token_seconds", now - arrival)
                self._observe("vllm:request_prompt_tokens", output.num_prompt_tokens)
            first[index] = latest[index] = now
        elif num_new:
            for _ in range(num_new):
                gap = (now - latest[index]) / num_new
                self._observe("vllm:inter_token_latency_seconds", gap)
                self._observe("vllm:time_per_output_token_seconds", gap)
            latest[index] = now
        if output.finish_reason is None:
            return
        self._finished.get(output.finish_reason, self._finished["error"]).inc()
        self._observe("vllm:e2e_request_latency_seconds", now - arrival)
        self._observe("vllm:request_generation_tokens", output.num_output_tokens)
        if output.num_output_tokens > 1:
            pace = (now - first[index]) / (output.num_output_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", pace)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
