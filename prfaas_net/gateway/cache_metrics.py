"""What the gateway's index of cached blocks is worth: an index that stays empty steers nothing, and says nothing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas_net.gateway.cache_watch import CacheWatch

__all__ = ["CacheCollector"]


class CacheCollector(Collector):
    """Read when it is asked for."""

    def __init__(self, caches: CacheWatch) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        told, silent = self._caches.listening()
        nodes = GaugeMetricFamily(
            "prfaas_cache_nodes",
            "Nodes that keep a prefix cache: of those told we know what they hold, of the silent nothing.",
            labels=("state",),
        )
        nodes.add_metric(["told"], told)
        nodes.add_metric(["silent"], silent)
        yield nodes
        looked = CounterMetricFamily(
            "prfaas_cache_lookup_tokens",
            "Prompt tokens looked up in the index, and of those found on some node.",
            labels=("outcome",),
        )
        looked.add_metric(["asked"], self._caches.asked_tokens)
        looked.add_metric(["found"], self._caches.found_tokens)
        yield looked
