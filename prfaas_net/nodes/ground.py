"""What a node stands on, whichever role it plays: its name, its memory, its metrics, its control port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import orjson
from aiohttp import web

from prfaas_net.errors import ConfigError
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.config import LinkSection, NodeConfig
from prfaas_net.nodes.engine_api import Engine
from prfaas_net.nodes.feed import Feed
from prfaas_net.nodes.info import describe_node
from prfaas_net.nodes.joining import Joiner
from prfaas_net.nodes.kv_memory import open_memory
from prfaas_net.nodes.memory_metrics import MemoryCollector
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.nodes.profile_file import read_profile
from prfaas_net.nodes.reloading import change_of, read_anew
from prfaas_net.nodes.server import ControlServer
from prfaas_net.tracing.tracer import open_tracer
from prfaas_net.transport import Identity

__all__ = ["NodeGround"]

log = logging.getLogger(__name__)

# What takes effect while a node serves; of kv, what is about links.
NODE_HOT = ("drain_timeout", *(f"kv.{name}" for name in LinkSection.model_fields), "kv.links")


class NodeGround:
    """Made by a node for itself, or once for the two roles of a node that can change (:mod:`prfaas_net.nodes.pd`).

    Attributes:
        config: may be replaced while the node serves; ``on_reload`` is told.
        reread: reads it anew, where it came from a file.
        describe: what ``GET /v1/node`` answers with.
    """

    def __init__(self, config: NodeConfig, engine: Engine) -> None:
        self.config = config
        # Before anything is opened that would have to be closed.
        self._tls = None if config.tls is None else config.tls.context()
        self.identity = Identity(config.node_id)
        self.metrics = Metrics()
        profile = read_profile(config.profile, engine.layout.fingerprint) if config.profile else None
        self.describe: Callable[[], NodeInfo] = lambda: describe_node(config, self.identity, engine, profile)
        self.memory = open_memory(config, engine.layout)
        self.metrics.registry.register(MemoryCollector(self.memory))
        self.cache_feed = Feed(self.memory, {"node": config.node_id, "boot": self.identity.boot_id})
        key = config.node_key.get_secret_value() if config.node_key else None
        self.control = ControlServer(lambda: self.describe(), self.metrics, node_key=key)
        self.control.app.router.add_get("/v1/cache/events", self.cache_feed.handle)
        self.joiner: Joiner | None = None
        self.reread: Callable[[], NodeConfig] | None = None
        self.on_reload: list[Callable[[NodeConfig], None]] = []
        self.control.app.router.add_post("/v1/reload", self._reload)
        self._reloads = self.metrics.counter("reloads", "Times that the configuration was read anew", ("outcome",))

    async def start(self) -> None:
        """Open the control port; the last thing that a node does before it serves."""
        config = self.config
        self.control.tracer = open_tracer(
            config.tracing, "prfaas-pd" if config.convertible else f"prfaas-{config.role}", config.node_id
        )
        await self.control.start(*self.config.listen, tls=self._tls)
        if self.config.join.gateways:
            url = self.config.url_at(self.control.address)
            self.joiner = Joiner(self.config.join, lambda: self.describe(), url)
            self.joiner.start()

    async def _reload(self, request: web.Request) -> web.Response:
        """``POST /v1/reload``: budgets of links from now on, their other settings for new links."""
        try:
            new = await read_anew(self.reread)
            if self._tls is not None and self.config.tls is not None:
                self.config.tls.read_into(self._tls)
        except ConfigError:
            self._reloads.labels("refused").inc()
            raise
        change = change_of(self.config, new, NODE_HOT)
        self.config = change.config
        for tell in self.on_reload:
            tell(self.config)
        self._reloads.labels(change.outcome).inc()
        log.info("reloaded: %s", change.line())
        return web.Response(body=orjson.dumps(change.to_json()), content_type="application/json")

    async def drain(self) -> None:
        """Leave the gateways, take no new work, and finish what is held, within the configured time."""
        self.control.draining = True
        if self.joiner is not None:
            await self.joiner.leave()
        await self.control.drain(self.config.drain_timeout)

    async def end_calls(self) -> None:
        """Leave the gateways, stop listening, and cancel what runs: the first thing that a node does to stop."""
        if self.joiner is not None:
            await self.joiner.leave()
        self.cache_feed.close()
        await self.control.close()

    async def close(self) -> None:
        """Let go of the memory: the last thing."""
        if self.control.tracer is not None:
            await self.control.tracer.close()
        await asyncio.to_thread(self.memory.close)
