"""All vLLM and SGLang servers of a gateway: made from the configuration, listened to, and their metrics passed on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from prfaas_net.cache.engine_events_mirror import EngineMirror
from prfaas_net.gateway.cache_watch import CacheWatch
from prfaas_net.gateway.config import NodeSection
from prfaas_net.gateway.engines.ranks import member_of, node_of
from prfaas_net.gateway.engines.scrape import merged
from prfaas_net.gateway.engines.server import LAYOUTS, EngineServer
from prfaas_net.gateway.engines.settings import EngineKind
from prfaas_net.gateway.zmq_events import EngineEvents, EngineSource
from prfaas_net.metrics import CONTENT_TYPE
from prfaas_net.scheduling import Alone, FleetState, QueueSeen

__all__ = ["EngineDesk"]

log = logging.getLogger(__name__)

# After so many batches one block should have been understood.
DOUBTFUL_BATCHES = 16


class EngineDesk:
    """What a gateway does for servers that are not its own kind.

    Args:
        nodes: of the configuration; those of our own kind are left out.

    Attributes:
        servers: by address.

    """

    def __init__(self, nodes: Iterable[NodeSection], session: aiohttp.ClientSession) -> None:
        engines = [node for node in nodes if node.kind is not EngineKind.PRFAAS]
        self.servers = {node.url: EngineServer(node.url, node, session) for node in engines}
        self._queues: dict[str, QueueSeen] = {}
        self._events: EngineEvents | None = None
        self._caches: CacheWatch | None = None
        self._doubted: set[str] = set()

    def start(self, caches: CacheWatch) -> None:
        """Begin to listen to what the servers cache.

        Raises:
            ConfigError: pyzmq is not installed.
        """
        sources, self._caches = [], caches
        for server in self.servers.values():
            events = server.settings.kv_events
            if events is None:
                continue
            groups, layout = events.engine_groups(), LAYOUTS[server.settings.kind]
            kinds = frozenset(group.kind for group in groups.values())
            caches.expect(layout, events.block_tokens, kinds)
            for rank in range(events.dp_ranks):
                endpoint, replays = events.endpoints_of(rank)
                member = member_of(server.name, rank, events.dp_ranks)
                caches.clusters[member] = server.settings.cluster
                source = EngineSource(endpoint, replays, events.topic, reply_s=events.reply, silence_s=events.silence)
                sources.append((source, EngineMirror(member, layout, events.block_tokens, groups=groups)))
        if sources:
            self._events = EngineEvents(sources, caches.told)
            self._events.start()

    async def stop(self) -> None:
        """Listen no more, and wait for what servers had still to be told."""
        if self._events is not None:
            await self._events.stop()
            self._events = None
        for server in self.servers.values():
            await server.calls.close()

    def asked(self, server: EngineServer, state: FleetState, tell: Callable[[QueueSeen], None]) -> None:
        """A server has said how busy it is: the router learns what of it is not our own doing."""
        self._doubt(server)
        node = state.nodes.get(server.name)
        if node is None:
            return
        # A server that computes prompts itself is charged twice for a request until its prompt is computed.
        own_requests = node.running_requests - (len(node.queue) if node.alone is not Alone.NEVER else 0)
        seen = server.queue(node.pending_tokens, own_requests)
        if self._queues.get(server.name, QueueSeen(server.name, 0)) != seen:
            self._queues[server.name] = seen
            tell(seen)

    def routes(self) -> list[web.RouteDef]:
        """``GET /metrics/engines`` and ``GET /v1/engines``."""
        return [web.get("/metrics/engines", self.metrics), web.get("/v1/engines", self.handle)]

    async def metrics(self, request: web.Request) -> web.Response:
        """The metrics of all servers, as they were when each was asked last, and what is known of their caches."""
        texts = [
            (server.name, server.settings.cluster, server.metrics_text + self._events_text(server))
            for server in self.servers.values()
        ]
        return web.Response(body=merged(texts).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def handle(self, request: web.Request) -> web.Response:
        """What is known of each server."""
        return web.Response(body=orjson.dumps(self.describe()), content_type="application/json")

    def describe(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each server."""
        return [
            {
                "node": server.name,
                "kind": server.settings.kind.value,
                "role": server.settings.role.value if server.settings.role else None,
                "cluster": server.settings.cluster,
                "model": server.model,
                "running_requests": server.load.running,
                "waiting_requests": server.load.waiting,
                "kv_cache_usage": server.load.cache_usage,
                "kv_events": self._counts(server),
            }
            for server in self.servers.values()
        ]

    def _doubt(self, server: EngineServer) -> None:
        """Say so, once, when a server's events come and none of them tells of a block that can be used."""
        counts = self._counts(server)
        if counts is None or server.name in self._doubted:
            return
        if counts["batches"] >= DOUBTFUL_BATCHES and not counts["stored"] and counts["unplaced"]:
            self._doubted.add(server.name)
            log.warning(
                "KV events of %s: %d batches and no block that can be used: its cache does not count in routing; "
                "see docs/kv_events.md on replays, salts and images",
                server.name,
                counts["batches"],
            )

    def _counts(self, server: EngineServer) -> dict[str, int] | None:
        """How following a server's events goes, over all its ranks; None where they are not followed.

        Batches without blocks that are known mean that nothing of the server's cache counts in routing.
        """
        if server.settings.kv_events is None or self._events is None or self._caches is None:
            return None
        counts: dict[str, int] = {"known_blocks": self._caches.blocks_of(server.name)}
        for follower in self._events.followers:
            if node_of(follower.mirror.node_id) != server.name:
                continue
            for name, count in (follower.counters | follower.mirror.counters).items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def _events_text(self, server: EngineServer) -> str:
        counts = self._counts(server) or {}
        kinds = {name: "gauge" if name == "known_blocks" else "counter" for name in counts}
        lines = [""]
        for name, kind in kinds.items():
            full = f"prfaas_engine_kv_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# TYPE {full} {kind}", f"{full} {counts[name]}"]
        return "\n".join(lines) + "\n"
