"""One rank's connector: a loop on a thread of its own beside the engine's, and what the engine's thread calls.

The engine's thread never waits for the network: it hands orders over, copies (on the CPU) the chunks that its layers
have finished, and collects results.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import uvloop
from aiohttp import web

from prfaas_net.connectors.config import ConnectorConfig
from prfaas_net.connectors.decode import DecodeDesk, LoadResults
from prfaas_net.connectors.layout import EngineLayout
from prfaas_net.connectors.messages import ClaimCall, PeerInfo
from prfaas_net.connectors.orders import StepOrders
from prfaas_net.connectors.pages import PagedMemory
from prfaas_net.connectors.peers import PeerBook
from prfaas_net.connectors.prefill import PrefillDesk
from prfaas_net.connectors.room import Room
from prfaas_net.connectors.stats import ConnectorStats
from prfaas_net.errors import UsageError
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.link_metrics import LinkCollector
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.nodes.server import ControlServer, Emit, parse_call
from prfaas_net.transport import Identity, KvListener, LinkPool, SenderGate

__all__ = ["ConnectorWorker", "StepResults", "WorkerRole"]

START_S = 30.0
STOP_S = 15.0


@dataclass(frozen=True)
class WorkerRole:
    """What this rank does.

    Attributes:
        engine_id: the engine's name for itself, for people.
        max_model_tokens, vocab_size: of the model, for ``GET /v1/node``.
    """

    prefills: bool
    decodes: bool
    engine_id: str = ""
    max_model_tokens: int = 1
    vocab_size: int = 1


@dataclass
class StepResults:
    """What ended since the engine asked last.

    Attributes:
        sent: finished prompts whose blocks may be freed.
    """

    sent: set[str] = field(default_factory=set)
    loads: LoadResults = field(default_factory=LoadResults)


class _Services:
    """Everything that lives on the loop."""

    def __init__(
        self,
        config: ConnectorConfig,
        role: WorkerRole,
        layout: EngineLayout,
        memory: PagedMemory,
        let_go: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self.config, self.role, self.layout = config, role, layout
        self.identity = Identity(f"{config.node_id}-{layout.tp_rank}")
        self.stats = ConnectorStats(metrics)
        key = config.node_key.get_secret_value() if config.node_key else None
        security, options = config.kv.security(), config.kv.options()
        self.prefill: PrefillDesk | None = None
        self.decode: DecodeDesk | None = None
        self.rooms: list[Room] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.control = ControlServer(self._info, metrics, node_key=key)
        if role.prefills:
            self.gate = SenderGate(identity=self.identity, security=security, options=options)
            self.links = LinkPool(identity=self.identity, security=security, options=options, gate=self.gate)
            # One for each way: two servers that send to each other must not wait for each other's.
            self.rooms.append(room := Room(config.kv.arena))
            self.prefill = PrefillDesk(config, layout, memory, room, self.links, self.stats, let_go)
            self.prefill.boot_id = self.identity.boot_id
            metrics.registry.register(LinkCollector(lambda: [link.stats() for link in self.links.links]))
            self.control.app.router.add_get("/v1/kv/layout", self._layout)
            self.control.app.router.add_post("/v1/kv/claims", self._claims)
        if role.decodes:
            self.listener = KvListener(
                identity=self.identity, security=security, options=options, link_grace_s=config.kv.resume_window
            )
            self.peers = PeerBook(layout, node_key=key)
            self.rooms.append(room := Room(config.kv.arena))
            self.decode = DecodeDesk(config, layout, memory, room, self.listener, self.peers, self.stats)

    def _info(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.identity.node,
            boot_id=self.identity.boot_id,
            cluster=self.config.cluster,
            role="prefill" if self.role.prefills else "decode",
            model=self.layout.model,
            layout=self.layout.fingerprint,
            max_model_tokens=self.role.max_model_tokens,
            vocab_size=self.role.vocab_size,
            prefill_chunk_tokens=self.config.chunk_tokens,
        )

    async def start(self) -> None:
        """
        Raises:
            ConfigError: an address is taken, not ours, or open to others without a key.
        """
        rank, kv = self.layout.tp_rank, self.config.kv
        if self.prefill is not None:
            if kv.gate is not None:
                await self.gate.start(*_of_rank(kv.gate, rank))
            self._tasks.append(asyncio.create_task(self.prefill.reap_forever()))
        if self.decode is not None:
            await self.listener.start(*_of_rank(kv.listen, rank))
            for gates in kv.dial.values():
                for gate in gates:
                    self.listener.keep_dialling(_of_rank(gate, rank))
        if self.prefill is not None:
            await self.control.start(*_of_rank(self.config.listen, rank))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.decode is not None:
            await self.decode.close()
            await self.peers.close()
            await self.listener.close()
        await self.control.close()
        if self.prefill is not None:
            await self.links.close()
            await self.gate.close()

    async def _layout(self, request: web.Request) -> web.Response:
        info = PeerInfo(
            boot_id=self.identity.boot_id, engine_id=self.role.engine_id, cluster=self.config.cluster,
            layout=self.layout.to_json(),
        )  # fmt: skip
        return web.Response(body=info.model_dump_json(), content_type="application/json")

    async def _claims(self, request: web.Request) -> web.StreamResponse:
        desk = self.prefill
        assert desk is not None
        call = await parse_call(ClaimCall, request)

        async def job(emit: Emit) -> None:
            await desk.serve(call, emit)

        return await self.control.run(request, job, deadline_s=call.deadline_s)


class ConnectorWorker:
    """Made, used and closed in the engine's thread.

    Raises:
        ConfigError: a port cannot be had, or the host has not the memory.
    """

    def __init__(self, config: ConnectorConfig, role: WorkerRole, layout: EngineLayout, memory: PagedMemory) -> None:
        self.metrics = Metrics()
        self._sent: set[str] = set()
        self._lock = threading.Lock()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prfaas-connector", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._services: _Services = self._call(self._open(config, role, layout, memory), START_S)
        except BaseException:
            self._stop_loop()
            raise

    async def _open(
        self, config: ConnectorConfig, role: WorkerRole, layout: EngineLayout, memory: PagedMemory
    ) -> _Services:
        services = _Services(config, role, layout, memory, self._let_go, self.metrics)
        try:
            await services.start()
        except BaseException:
            await services.close()
            raise
        return services

    def close(self) -> None:
        """End everything; harmless the second time."""
        if not self._closed:
            self._closed = True
            try:
                self._call(self._services.close(), STOP_S)
            finally:
                self._stop_loop()

    def _call(self, work: Coroutine[Any, Any, Any], within_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    # -- where it listens --------------------------------------------------------------------------------------------

    @property
    def control_address(self) -> tuple[str, int]:
        """Where tickets are taken."""
        return self._services.control.address

    @property
    def kv_address(self) -> tuple[str, int]:
        """Where KVCache lands."""
        if self._services.decode is None:
            raise UsageError("this rank receives nothing")
        return self._services.listener.address

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """Before the step's first layer. Blocks of preempted and dropped prompts are not read once this returns."""
        if self._services.prefill is not None:
            self._services.prefill.begin_step(orders)

    def layer_done(self, layer: str) -> None:
        """The layer has run this step's tokens; those of offered prompts leave now."""
        if self._services.prefill is not None:
            self._services.prefill.layer_done(layer)

    def end_step(self, orders: StepOrders) -> None:
        """Every layer has run. Loads begin."""
        if self._services.prefill is not None:
            self._services.prefill.end_step()
        if self._services.decode is not None:
            self._services.decode.begin(orders.loads, orders.releases)

    def finish(self, finished_request_ids: Iterable[str]) -> StepResults:
        """What ended since the last call.

        Args:
            finished_request_ids: requests that the engine no longer knows: their loads are given up.
        """
        with self._lock:
            results, self._sent = StepResults(self._sent), set()
        if self._services.decode is not None:
            self._services.decode.cancel(finished_request_ids)
            results.loads = self._services.decode.take()
        return results

    def take_stats(self) -> dict[str, list[float]]:
        """See :class:`ConnectorStats`."""
        return self._services.stats.take()

    @property
    def under_way(self) -> tuple[int, int]:
        """Offers and loads that have not ended."""
        prefill, decode = self._services.prefill, self._services.decode
        return 0 if prefill is None else len(prefill), 0 if decode is None else len(decode)

    @property
    def held_bytes(self) -> int:
        """Of the memory that chunks pass through."""
        return sum(room.arena.used_bytes for room in self._services.rooms)

    def _let_go(self, request_id: str) -> None:
        with self._lock:
            self._sent.add(request_id)


def _of_rank(address: tuple[str, int], rank: int) -> tuple[str, int]:
    """Port 0 stays 0: the system picks one."""
    return address[0], address[1] + rank if address[1] else 0
