"""A gateway, started and stopped."""

from __future__ import annotations

import asyncio
import logging
import platform
import random
import ssl
from collections.abc import Callable
from dataclasses import replace

import aiohttp
from aiohttp import web

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import UsageError
from prfaas_net.gateway.api_errors import ApiError, error_response
from prfaas_net.gateway.cache_desk import CacheDesk
from prfaas_net.gateway.cache_moves import CacheMoves, MoveCounters
from prfaas_net.gateway.cache_watch import CacheWatch
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.dashboard import Dashboard
from prfaas_net.gateway.engines.desk import EngineDesk
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.fleet_view import FleetView
from prfaas_net.gateway.follower import Follower
from prfaas_net.gateway.http import HttpApi
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.joining import JoinDesk
from prfaas_net.gateway.keys import KeyRing
from prfaas_net.gateway.lifecycle import Lifecycle
from prfaas_net.gateway.middleware import Surroundings
from prfaas_net.gateway.planning import Planning
from prfaas_net.gateway.planning_events import PlanningLog
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.reloading import Reloader
from prfaas_net.gateway.run import Services
from prfaas_net.gateway.serving import Serving
from prfaas_net.gateway.state_watch import StateWatch
from prfaas_net.gateway.traces import Traces
from prfaas_net.nodes.engine_api import TextTokenizer
from prfaas_net.nodes.http_site import listen
from prfaas_net.scheduling import (
    FleetEvent,
    LinkSeen,
    NodeSeen,
    Policy,
    PolicySettings,
    Router,
    ThresholdSet,
    make_policy,
)
from prfaas_net.tracing.tracer import Tracer, open_tracer

__all__ = ["Gateway"]

log = logging.getLogger(__name__)

# What a stop leaves to requests for writing their error, before their connections are cut.
SHUTDOWN_TIMEOUT_S = 0.5


class Gateway:
    """OpenAI-compatible HTTP over the nodes of a configuration.

    Usage::

        async with Gateway(config, tokenizer) as gateway:
            print(gateway.address)

    Args:
        tokenizer: of the model that the nodes run.
        clock: for times in records and for the router.
        reread: reads the configuration anew, where it came from a file (``POST /v1/reload``).

    Raises:
        ConfigError: the policy cannot be made from the configuration.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: TextTokenizer,
        *,
        clock: Clock | None = None,
        reread: Callable[[], GatewayConfig] | None = None,
    ) -> None:
        self.config = config
        self._reread = reread
        self.clock = clock or SystemClock()
        self.instruments = GatewayMetrics()
        self.router = Router(_policy(config), {cluster.name: cluster.kind for cluster in config.clusters})
        self._tokenizer = tokenizer
        self._session: aiohttp.ClientSession | None = None
        self._client: NodeClient | None = None
        self._fleet: Fleet | None = None
        self._engines: EngineDesk | None = None
        self._moves: CacheMoves | None = None
        self._move_counters = MoveCounters(self.instruments.metrics)
        self._followers: list[Follower] = []
        self._joining: JoinDesk | None = None
        self._planning: Planning | None = None
        self._planning_log = PlanningLog(self.instruments.metrics)
        self._view: FleetView | None = None
        self._serving: Serving | None = None
        self._tracer: Tracer | None = None
        self._surroundings: Surroundings | None = None
        self._tls: ssl.SSLContext | None = None
        self._lifecycle: Lifecycle | None = None
        self._runner: web.AppRunner | None = None

    @property
    def fleet(self) -> Fleet:
        """The nodes, as seen now.

        Raises:
            UsageError: the gateway is not running.
        """
        if self._fleet is None:
            raise UsageError("the gateway is not running", do="await start() first")
        return self._fleet

    @property
    def planning(self) -> Planning:
        """The long-timescale planner.

        Raises:
            UsageError: the gateway is not running.
        """
        if self._planning is None:
            raise UsageError("the gateway is not running", do="await start() first")
        return self._planning

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on.

        Raises:
            UsageError: the gateway is not running.
        """
        if self._runner is None or not self._runner.addresses:
            raise UsageError("the gateway is not running", do="await start() first")
        host, port = self._runner.addresses[0][:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """Base URL that clients use, without ``/v1``."""
        host, port = self.address
        scheme = "http" if self.config.http.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        """Listen, and ask every node once. Nodes that are not there yet are no error; ``/health`` names them.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        config = self.config
        self._tracer = open_tracer(config.tracing, "prfaas-gateway", f"{platform.node()}:{config.http.port}")
        tls = config.fleet.tls.context()
        self._session = aiohttp.ClientSession(
            # How many calls are open is the router's business, not the connection pool's.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        node_key = config.node_key.get_secret_value() if config.node_key else None
        client = self._client = NodeClient(node_key, tls=tls)
        engines = self._engines = EngineDesk(config.nodes, self._session)
        self._fleet = Fleet(
            [node.url for node in config.nodes],
            client,
            config.fleet,
            observe=self._note,
            engines=engines.servers,
        )
        caches = CacheWatch(self._fleet.nodes, client, self.clock)
        self.instruments.follow_caches(caches)
        states = StateWatch(self._fleet.nodes, client, self._note, self._own_tokens)
        self._followers = [caches, states] if config.fleet.follow_state else [caches]
        self._view = FleetView(config.model, self.router, self._fleet, states, caches, self.clock)
        desk = CacheDesk(caches, self.router, self.clock)
        moves = self._moves = CacheMoves(self._fleet, client, desk, self.router, self.clock, self._move_counters)
        self._lifecycle = Lifecycle(
            Services(self.router, self._fleet, client, desk, self.clock, config.ttft_limit, moves)
        )
        self._fleet.on_restart, self._fleet.on_silent = self._lifecycle.abort_node, self._lifecycle.abandon_node
        client.on_unreachable = self._fleet.suspect
        self._fleet.on_asked = lambda server: engines.asked(server, self.router.state, self._note)
        for server in engines.servers.values():
            server.calls.on_unreachable = self._fleet.suspect
        self._joining = self._open_joining(self._fleet)
        self._planning = Planning(
            config.planner, self.router, self._fleet, client, self.clock, self._note, self._planning_log
        )
        self._view.planner = self._planning.summary
        try:
            await self._listen(self._application(self._fleet, self._lifecycle, self._view))
            self._note_budgets(config)
            await self._fleet.start()
            for follower in self._followers:
                follower.start()
            engines.start(caches)
            moves.start()
            self._joining.start()
            self._planning.start()
        except BaseException:
            await self.stop()
            raise
        log.info("serving %s at %s", config.model, self.url)

    async def drain(self) -> None:
        """Take no new requests, and finish those in flight, within the configured time. ``/ready`` says so."""
        if self._serving is not None:
            await self._serving.drain(self.config.drain_timeout)

    async def stop(self) -> None:
        """Stop listening, end requests in flight with an error of their own, and let go of everything; in 1 s."""
        if self._lifecycle is not None:
            self._lifecycle.abort_all()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._moves is not None:
            await self._moves.stop()
        if self._planning is not None:
            await self._planning.stop()
        if self._joining is not None:
            await self._joining.stop()
        for follower in self._followers:
            await follower.stop()
        if self._engines is not None:
            await self._engines.stop()
        if self._fleet is not None:
            await self._fleet.stop()
        if self._client is not None:
            await self._client.close()
        if self._session is not None:
            await self._session.close()
        if self._tracer is not None:
            await self._tracer.close()
        self._tracer = None
        self._followers, self._view = [], None
        self._runner = self._fleet = self._engines = self._serving = self._lifecycle = self._session = None

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Start, serve until ``stop`` is set, stop."""
        async with self:
            await stop.wait()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _open_joining(self, fleet: Fleet) -> JoinDesk:
        for follower in self._followers:
            fleet.on_added.append(follower.follow)
            fleet.on_removed.append(follower.unfollow)
        return JoinDesk(fleet, self.config.join, self.clock, lambda word: self.instruments.joins.labels(word).inc())

    def _reconfigure(self, config: GatewayConfig) -> None:
        """Put another configuration in force, for requests that come from now on.

        Raises:
            ConfigError: the policy cannot be made from it, or a certificate cannot be read anew.
        """
        if self._tls is not None and config.http.tls is not None:
            config.http.tls.read_into(self._tls)
        old, steady = self.config, ("policy", "policy_seed", "link_patience")
        if any(getattr(old, name) != getattr(config, name) for name in steady):
            self.router.policy = _policy(config)
        elif config.threshold_tokens != old.threshold_tokens:
            self._note(ThresholdSet(config.threshold_tokens))
        if config.links != old.links:
            self._note_budgets(config)
        self.config = config
        if self._serving is not None:
            self._serving.reconfigure(config)
        if self._surroundings is not None:
            self._surroundings.keys = KeyRing(config.holders)
        if self._lifecycle is not None:
            self._lifecycle.services = replace(self._lifecycle.services, ttft_limit_s=config.ttft_limit)
        if self._joining is not None:
            self._joining.settings = config.join

    def _note_budgets(self, config: GatewayConfig) -> None:
        """What links may carry; what else is known of them stays."""
        for link in config.links:
            known = self.router.state.links.get((link.source, link.destination))
            state = LinkState.IDLE if known is None else known.state
            available_bps, paced_bps = (known.available_bps, known.paced_bps) if known is not None else (None, None)
            seen = LinkSeen(link.source, link.destination, state, available_bps, link.budget, paced_bps=paced_bps)
            self._note(seen)

    def _note(self, event: FleetEvent) -> None:
        """Tell the router."""
        if isinstance(event, NodeSeen) and self._fleet is not None:
            self.router.predictor.kv = self._fleet.kv_size
        self.router.observe(event, now=self.clock.now())
        if self._view is not None:
            self._view.note(event)

    def _served(self, record: RequestRecord) -> None:
        """A request that was decided on is over."""
        if self._view is not None:
            self._view.served(record)
        if self._planning is not None:
            self._planning.served(record)

    def _own_tokens(self, node_id: str) -> int:
        node = self.router.state.nodes.get(node_id)
        return 0 if node is None else node.pending_tokens

    def _application(self, fleet: Fleet, lifecycle: Lifecycle, view: FleetView) -> web.Application:
        surroundings = self._surroundings = Surroundings(self.instruments, KeyRing(self.config.holders))
        serving = self._serving = Serving(self.config, self._tokenizer, lifecycle, self.instruments)
        serving.on_end.append(self._served)
        middlewares = [surroundings.middleware]
        if self._tracer is not None:
            traces = Traces(self._tracer)
            middlewares.append(traces.middleware)
            serving.on_end.append(traces.served)
        app = web.Application(middlewares=middlewares, client_max_size=self.config.max_body)
        app.add_routes(HttpApi(self.config, serving, fleet, self.instruments).routes())
        if self._engines is not None:
            app.add_routes(self._engines.routes())
        if self._joining is not None:
            app.add_routes(self._joining.routes())
        app.router.add_get("/v1/cache", lifecycle.services.desk.handle)
        app.router.add_get("/v1/fleet", view.handle)
        reloader = Reloader(
            self._reread, lambda: self.config, self._reconfigure, fleet, lifecycle.services.client, self.instruments
        )
        app.router.add_post("/v1/reload", reloader.handle)
        if self._planning is not None:
            app.router.add_get("/v1/plan", self._planning.handle)
        app.router.add_get("/", Dashboard().handle)
        app.on_response_prepare.append(surroundings.echo_id)
        app.on_response_prepare.append(serving.part)
        return app

    async def _listen(self, app: web.Application) -> None:
        # A client that leaves cancels its handler, and with it everything the request holds.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S, access_log=None
        )
        await self._runner.setup()
        http = self.config.http
        self._tls = http.tls.context() if http.tls is not None else None
        await listen(self._runner, http.host, http.port, refusal=_refusal, limits=http.limits, tls=self._tls)


def _policy(config: GatewayConfig) -> Policy:
    """How requests are routed.

    Raises:
        ConfigError: it cannot be made from the configuration.
    """
    rng = random.Random(config.policy_seed)
    return make_policy(
        config.policy, PolicySettings(config.threshold_tokens, rng, link_patience_s=config.link_patience)
    )


def _refusal(status: int, line: str) -> web.Response:
    """For what is not even a request."""
    return error_response(ApiError(line, status=status, api_code="bad_http"))
