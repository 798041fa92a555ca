"""What an operator looks at: nodes, links, queues, verdicts over time and the requests of late; ``GET /v1/fleet``.

Read when it is asked for. All that is kept of the past is a bounded number of points and of changed verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from prfaas_net import __version__
from prfaas_net.clock import Clock
from prfaas_net.gateway.cache_watch import CacheWatch
from prfaas_net.gateway.fleet import Fleet, WatchedNode
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.state_watch import StateWatch
from prfaas_net.scheduling import ClusterKind, FleetEvent, LinkReport, LinkSeen, Router

__all__ = ["FleetView"]

# Requests shown: enough for a scatter, and an answer of some 60 KB.
KEPT_POINTS = 500
# Changes of a verdict kept for each pair of clusters: nodes tell four states a second, so 5 minutes at the very least.
KEPT_CHANGES = 1200


class FleetView:
    """The state of a gateway's fleet, as plain data.

    Args:
        model: the name under which it is served.
        clock: whose time ``now_s`` and every ``at_s`` are on.

    Attributes:
        planner: what the planner has to say.
    """

    def __init__(
        self, model: str, router: Router, fleet: Fleet, states: StateWatch, caches: CacheWatch, clock: Clock
    ) -> None:
        self._model = model
        self._router = router
        self._fleet = fleet
        self._states = states
        self._caches = caches
        self._clock = clock
        self.planner: Callable[[], dict[str, Any] | None] = lambda: None
        self._points: deque[dict[str, Any]] = deque(maxlen=KEPT_POINTS)
        self._changes: dict[tuple[str, str], deque[tuple[float, str]]] = {}

    def served(self, record: RequestRecord) -> None:
        """A request that was decided on is over, however it ended."""
        cluster = record.prefilled_in
        if cluster is None:
            return
        self._points.append(
            {
                "at_s": round(self._clock.now(), 3),
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
                "prefilled_in": cluster,
                "offloaded": self._router.state.kind_of(cluster) is ClusterKind.PRFAAS,
                "failed": record.error is not None,
            }
        )

    def note(self, event: FleetEvent) -> None:
        """Something was told to the router; verdicts on links are remembered when they change."""
        if not isinstance(event, LinkSeen):
            return
        changes = self._changes.setdefault((event.source, event.destination), deque(maxlen=KEPT_CHANGES))
        if not changes or changes[-1][1] != event.state.value:
            changes.append((round(self._clock.now(), 3), event.state.value))

    def describe(self) -> dict[str, Any]:
        """The answer to ``GET /v1/fleet``; docs/dashboard.md names every field."""
        state, policy, points = self._router.state, self._router.policy, list(self._points)
        known = sorted({node.info.cluster for node in self._fleet.nodes if node.info})
        offloaded = sum(point["offloaded"] for point in points)
        return {
            "now_s": round(self._clock.now(), 3),
            "version": __version__,
            "model": self._model,
            "policy": policy.name,
            "threshold_tokens": getattr(policy, "threshold_tokens", None),
            "offload_share": round(offloaded / len(points), 4) if points else None,
            "requests_in_flight": len(state.assignments),
            "clusters": [{"cluster": cluster, "kind": state.kind_of(cluster).value} for cluster in known],
            "nodes": [self._node(node) for node in self._fleet.nodes],
            "links": [
                _link(node_id, link) for node_id in sorted(self._states.links) for link in self._states.links[node_id]
            ],
            "verdicts": [self._verdicts(pair) for pair in sorted(self._changes)],
            "planner": self.planner(),
            "requests": points,
        }

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /v1/fleet``."""
        return web.Response(
            body=orjson.dumps(self.describe()),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    def _node(self, node: WatchedNode) -> dict[str, Any]:
        info, load = node.info, self._router.state.nodes.get(node.name)
        keeps_cache = info is not None and info.block_tokens > 0 and self._caches.manager is not None
        return {
            "node": node.name,
            "cluster": info.cluster if info else None,
            "role": info.role if info else None,
            "next_role": info.next_role if info else None,
            "convertible": info is not None and info.convertible,
            "up": node.up,
            "problem": node.problem,
            "restarts": node.restarts,
            "queue_tokens": load.pending_tokens + load.foreign_tokens if load else 0,
            "running_requests": load.running_requests if load else 0,
            "max_batch_requests": load.max_batch if load else 0,
            "cached_blocks": self._caches.blocks_of(node.name) if keeps_cache else None,
        }

    def _verdicts(self, pair: tuple[str, str]) -> dict[str, Any]:
        link = self._router.state.links.get(pair)
        return {
            "from_cluster": pair[0],
            "to_cluster": pair[1],
            "available_bps": link.available_bps if link else 0.0,
            "budget_bps": link.budget_bps if link else 0.0,
            "promised_bytes": round(link.promised_bits / 8) if link else 0,
            "transfers": link.transfers if link else 0,
            "changes": [{"at_s": at_s, "state": state} for at_s, state in self._changes[pair]],
        }


def _link(node_id: str, report: LinkReport) -> dict[str, Any]:
    """One node's link to another, as that node judges it."""
    base_s, queueing_s = _number(report, "base_rtt_s"), _number(report, "queueing_delay_s")
    return {
        "from": node_id,
        "to": report["peer"],
        "state": report["state"],
        "cause": report.get("cause") if isinstance(report.get("cause"), str) else None,
        "available_bps": _number(report, "available_bps"),
        "budget_bps": _number(report, "budget_bps"),
        "goodput_bps": _number(report, "goodput_bps") or 0.0,
        "rtt_s": round(base_s + (queueing_s or 0.0), 6) if base_s else None,
        "queueing_delay_s": queueing_s or 0.0,
        "retransmitted_share": _number(report, "retransmitted_share") or 0.0,
        "backlog_bytes": _number(report, "backlog_bytes") or 0,
        "confidence": _number(report, "confidence") or 0.0,
    }


def _number(report: LinkReport, name: str) -> float | None:
    """A field that only people look at: what does not fit is left out, not refused."""
    value = report.get(name)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
    return value if fits else None
