"""A prefill node's links in its ``/metrics``: read when they are asked for, kept nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.transport import LinkBase, LinkStats

__all__ = ["LinkCollector", "describe_links"]

_GAUGES: tuple[tuple[str, str, Callable[[LinkStats], float]], ...] = (
    ("connections", "Data connections that are up", lambda s: s.connections),
    ("transfers", "Transfers that have not ended", lambda s: s.transfers),
    ("queued_bytes", "KVCache made and not acknowledged yet", lambda s: s.queued_bytes),
    ("goodput_bps", "Acknowledged bits a second, while there was something to send", lambda s: s.goodput_bps),
    ("rtt_seconds", "Round trip, application to application", lambda s: s.rtt_s or 0.0),
    ("tcp_rtt_seconds", "Round trip by the kernel, mean over data connections", lambda s: s.tcp_rtt_s),
    ("delivery_rate_bps", "The kernel's estimate, summed over data connections", lambda s: s.delivery_rate_bps),
    ("budget_bps", "What the link is paced to; 0 if it is not", lambda s: s.budget_bps or 0),
    ("available_bps", "What the link could carry now", lambda s: s.verdict.available_bps or 0.0),
    ("available_error_ratio", "How far that may be off, as a share of it", lambda s: s.verdict.available_error),
    ("queueing_delay_seconds", "Round trip above that of the empty path", lambda s: s.verdict.queueing_delay_s),
    ("retransmitted_ratio", "Bytes sent again of bytes sent, lately", lambda s: s.verdict.retransmitted_share),
    ("drain_seconds", "How long what is queued takes", lambda s: s.verdict.drain_s or 0.0),
    ("verdict_confidence", "How far the verdict can be trusted", lambda s: s.verdict.confidence),
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
        state = GaugeMetricFamily("prfaas_link_state", "1 for what the link is doing", labels=("peer", "state"))
        for stats in links:
            for one in LinkState:
                state.add_metric([stats.peer, one.value], float(one is stats.verdict.state))
        yield state


def describe_links(links: Iterable[LinkBase]) -> list[dict[str, Any]]:
    """The answer to ``GET /v1/links``."""
    rows = [(link, link.stats()) for link in links]
    return [
        {
            "peer": stats.peer,
            "boot_id": link.peer_boot_id,
            "budget_bps": stats.budget_bps,
            "configured_budget_bps": link.options.budget_bps,
            "probed": None if (found := link.telemetry.probed) is None else asdict(found),
            **stats.verdict.to_json(),
        }
        for link, stats in rows
    ]
