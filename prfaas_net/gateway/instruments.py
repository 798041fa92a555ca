"""What the gateway counts."""

from __future__ import annotations

from prfaas_net.gateway.cache_metrics import CacheCollector
from prfaas_net.gateway.cache_watch import CacheWatch
from prfaas_net.gateway.record import RUNGS, RequestRecord
from prfaas_net.metrics import Metrics
from prfaas_net.scheduling import ClusterKind

__all__ = ["GatewayMetrics"]


class GatewayMetrics:
    """The gateway's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._caches: CacheCollector | None = None
        self.requests = self.metrics.counter(
            "requests", "Requests answered; 499 is a client that left.", ("route", "status")
        )
        self.duration = self.metrics.histogram(
            "request_duration_seconds", "Arrival to the end of the answer.", ("route",)
        )
        self.ttft = self.metrics.histogram(
            "ttft_seconds", "Arrival to first token, by where it was prefilled.", ("cluster",)
        )
        self.offloaded = self.metrics.counter(
            "offloaded_requests", "Requests prefilled in a PrfaaS cluster.", ("cluster",)
        )
        self.decisions = self.metrics.counter("decisions", "Decisions of the router.", ("policy", "cluster"))
        self.tokens = self.metrics.counter(
            "tokens", "Tokens of answered prompts, of those the cached ones, and of answers.", ("kind",)
        )
        self.kv_bytes = self.metrics.counter(
            "kv_transferred_bytes", "KVCache sent between nodes, by kind of state.", ("kind",)
        )
        self.fallbacks = self.metrics.counter(
            "fallbacks", "What was done when a node or a link failed a request, by rung of the ladder.", ("rung",)
        )
        for rung in RUNGS:
            self.fallbacks.labels(rung)
        self.reloads = self.metrics.counter("reloads", "Times that the configuration was read anew.", ("outcome",))
        self.joins = self.metrics.counter("joins", "Calls of nodes that join by themselves.", ("outcome",))
        self.in_flight = self.metrics.gauge("requests_in_flight", "Requests being served.")

    def follow_caches(self, caches: CacheWatch) -> None:
        """Show what is known of the nodes' caches; of a gateway that is started again, of the new ones."""
        if self._caches is not None:
            self.metrics.registry.unregister(self._caches)
        self._caches = CacheCollector(caches)
        self.metrics.registry.register(self._caches)

    def served(self, record: RequestRecord, kind: ClusterKind | None) -> None:
        """Count a request that was decided on, however it ended.

        Args:
            kind: of the cluster that prefilled it; None if that is not known.
        """
        if record.prefilled_in is None:
            return
        self.decisions.labels(record.policy or "", record.prefilled_in).inc()
        if kind is ClusterKind.PRFAAS:
            self.offloaded.labels(record.prefilled_in).inc()
        if record.ttft_s is not None:
            self.ttft.labels(record.prefilled_in).observe(record.ttft_s)
            self.tokens.labels("prompt").inc(record.prompt_tokens)
            self.tokens.labels("cached").inc(record.cached_tokens)
            self.tokens.labels("output").inc(record.output_tokens)
        for step in record.fallbacks:
            self.fallbacks.labels(step.rung).inc(step.times)
        for state, n_bytes in (record.kv_bytes or {}).items():
            self.kv_bytes.labels(state).inc(n_bytes)
