"""A prefill node's links in its ``/metrics``: read when they are asked for, kept nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas_net.transport import LinkStats

__all__ = ["LinkCollector"]

_GAUGES: tuple[tuple[str, str, Callable[[LinkStats], float]], ...] = (
    ("connections", "Data connections that are up", lambda s: s.connections),
    ("transfers", "Transfers that have not ended", lambda s: s.transfers),
    ("queued_bytes", "KVCache made and not acknowledged yet", lambda s: s.queued_bytes),
    ("goodput_bps", "Acknowledged bits a second, while there was something to send", lambda s: s.goodput_bps),
    ("rtt_seconds", "Round trip, application to application", lambda s: s.rtt_s or 0.0),
    ("tcp_rtt_seconds", "Round trip by the kernel, mean over data connections", lambda s: s.tcp_rtt_s),
    ("delivery_rate_bps", "The kernel's estimate, summed over data connections", lambda s: s.delivery_rate_bps),
)
_COUNTERS: tuple[tuple[str, str, Callable[[LinkStats], float]], ...] = (
    ("acked_bytes", "Bytes that have landed and were verified", lambda s: s.acked_bytes),
    ("sent_bytes", "Bytes that TCP sent, retransmissions included", lambda s: s.bytes_sent),
    ("retransmitted_bytes", "Bytes that TCP sent again", lambda s: s.bytes_retrans),
)


class LinkCollector(Collector):
    """
    Args:
        links: the links that are up, now.
    """

    def __init__(self, links: Callable[[], Iterable[LinkStats]]) -> None:
        self._links = links

    def collect(self) -> Iterator[Metric]:
        links = list(self._links())
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"prfaas_link_{name}", text, labels=("peer",))
            for stats in links:
                gauge.add_metric([stats.peer], value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"prfaas_link_{name}", text, labels=("peer",))
            for stats in links:
                counter.add_metric([stats.peer], value(stats))
            yield counter
