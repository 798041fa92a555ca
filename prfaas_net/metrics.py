"""Prometheus metrics: one registry a process, names ``prfaas_*`` with the unit last.

Only the shells count; the cores return events and leave counting to whoever drives them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "LATENCY_BUCKETS_S", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# 1 ms to 2 min: a token step on the left, a 128K-token prefill over a thin link on the right.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """A registry and short-hands to fill it; each process or test makes its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """A counter named ``prfaas_<name>_total``."""
        return Counter(f"prfaas_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"prfaas_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
        """A histogram over seconds."""
        return Histogram(f"prfaas_{name}", text, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)

    def render(self) -> bytes:
        """The exposition text for ``/metrics``."""
        return generate_latest(self.registry)
