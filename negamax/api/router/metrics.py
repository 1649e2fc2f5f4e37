"""Provide Prometheus metrics of the router."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from negamax.api.router.servers import RoutedServer

_METRICS = (  # Each entry has a kind, a name, an attribute of `RoutedServer` and a help text.
    (CounterMetricFamily, "requests", "num_requests", "Requests sent to a server."),
    (CounterMetricFamily, "retries", "num_retries", "Requests sent after another server failed."),
    (CounterMetricFamily, "failures", "num_failures", "Refused requests, and incomplete answers."),
    (CounterMetricFamily, "prefix_hits", "num_prefix_hits", "Requests with a known prefix."),
    (CounterMetricFamily, "kv_event_hits", "num_event_hits", "Requests with a prefix in a cache."),
    (CounterMetricFamily, "kv_event_losses", "num_event_losses", "Losses of KV events."),
    (GaugeMetricFamily, "kv_blocks", "num_blocks", "Blocks in caches, by KV events."),
    (GaugeMetricFamily, "up", "is_up", "1 if a server gets requests."),
    (GaugeMetricFamily, "open", "num_open", "Requests that a server is answering."),
)


class RouterMetrics(Collector):
    """The metrics of the router, in a separate registry."""

    def __init__(self, servers: Sequence[RoutedServer]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        for kind, name, attribute, text in _METRICS:
            family = kind(f"negamax:router_{name}", text, labels=("server", "role"))
            for server in self._servers:
                family.add_metric((server.url, server.role), getattr(server, attribute))
            yield family
