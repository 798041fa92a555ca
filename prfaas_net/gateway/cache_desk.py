"""What the fleet's caches hold and what had better be moved: the advisor, fed by requests, and ``GET /v1/cache``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.cache.advice import Advisor, CopyPrefix, Replicate
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.manager import Match
from prfaas_net.clock import Clock
from prfaas_net.gateway.cache_watch import CacheWatch
from prfaas_net.gateway.engines.server import LAYOUTS
from prfaas_net.scheduling import Decision, Role, Router

__all__ = ["CacheDesk"]


class CacheDesk:
    """Watches which prefixes are used where.

    Args:
        router: knows what moving and computing cost.
    """

    def __init__(self, caches: CacheWatch, router: Router, clock: Clock) -> None:
        self.caches = caches
        self.advisor = Advisor()
        self._router = router
        self._clock = clock

    def used(self, keys: bytes, match: Match, decision: Decision, *, private: bool) -> None:
        """A request was decided on: it could have started from the longest prefix that anybody holds."""
        manager = self.caches.manager
        if manager is not None and manager.layout in LAYOUTS.values():
            return  # engines that are not ours exchange no prefixes
        n_tokens = max((node.usable_tokens for node in match.nodes), default=0)
        if manager is not None and n_tokens:
            used = keys[: n_tokens // manager.block_tokens * KEY_BYTES]
            self.advisor.used(used, n_tokens, decision.prefill_cluster, private=private, now=self._clock.now())

    def advise(self) -> list[Replicate | CopyPrefix]:
        """What had better be moved now and is not being moved yet."""
        manager = self.caches.manager
        if manager is None:
            return []
        self.advisor.advise(manager, self._prefillers(), self, now=self._clock.now())
        return list(self.advisor.outstanding)

    def describe(self) -> dict[str, Any]:
        """The answer to ``GET /v1/cache``."""
        manager = self.caches.manager
        if manager is None:
            return {"enabled": False, "nodes": {}, "advice": []}
        nodes = {node.node_id: node.cluster for node in self._router.state.nodes.values()}
        self.advise()
        return {
            "enabled": True,
            "layout": manager.layout,
            "block_tokens": manager.block_tokens,
            "blocks": manager.n_blocks,
            "index_bytes": manager.memory_bytes,
            "nodes": {node: {"cluster": nodes[node], "blocks": self.caches.blocks_of(node)} for node in sorted(nodes)},
            "counters": {**manager.counters, **{f"advice_{name}": n for name, n in self.advisor.counters.items()}},
            "advice": [
                {"kind": type(step).__name__, **asdict(step), "keys": step.keys.hex()}
                for step in self.advisor.outstanding
            ],
        }

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /v1/cache``."""
        return web.Response(body=orjson.dumps(self.describe()), content_type="application/json")

    def _prefillers(self) -> dict[str, str]:
        return {node.node_id: node.cluster for node in self._router.state.up(Role.PREFILL)}

    # -- FleetCosts -----------------------------------------------------------------------------------------------

    def kv_bytes(self, start_tokens: int, stop_tokens: int) -> int:
        kv = self._router.predictor.kv
        return 0 if kv is None else round(kv.increment(start_tokens, stop_tokens))

    def prefill_s(self, cluster: str, start_tokens: int, stop_tokens: int) -> float:
        nodes = [node for node in self._router.state.up(Role.PREFILL) if node.cluster == cluster]
        return min((node.prefill_s(stop_tokens - start_tokens) for node in nodes), default=0.0)

    def bandwidth_bps(self, source_cluster: str, target_cluster: str) -> float:
        link = self._router.state.links.get((source_cluster, target_cluster))
        return 0.0 if link is None or not link.usable else link.rate_bps
