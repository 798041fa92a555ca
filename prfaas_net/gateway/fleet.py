"""The fleet: which nodes there are, what they are, and which of them take work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas_net.errors import BusyError, IncompatibleError, LinkError, PrfaasError, UsageError
from prfaas_net.gateway.calls import NodeClient, NodeDraining
from prfaas_net.gateway.config import FleetSection
from prfaas_net.gateway.engines.server import EngineServer
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.scheduling import (
    Alone,
    DecodeProfile,
    FleetEvent,
    KvSize,
    NodeDown,
    NodeForgotten,
    NodeProfile,
    NodeSeen,
    PiecewiseLinear,
    Role,
)

__all__ = ["Fleet", "WatchedNode"]

log = logging.getLogger(__name__)


@dataclass
class WatchedNode:
    """One node as the gateway sees it.

    Attributes:
        info: what it last said of itself; None until it answered once.
        up: whether new work is given to it.
        problem: why it is not up, in one line.
        restarts: times that it came back with another boot id.
        engine: set where it is not one of ours, but a vLLM or SGLang server.
        joined: it came by itself, and may go again.
    """

    url: str
    info: NodeInfo | None = None
    up: bool = False
    problem: str | None = "has not answered yet"
    failures: int = 0
    successes: int = 0
    restarts: int = 0
    joined: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    engine: EngineServer | None = None
    told: NodeSeen | None = None

    @property
    def computes(self) -> bool:
        """Whether it computes prompts, for others or for itself."""
        if self.engine is not None and self.engine.alone is not Alone.NEVER:
            return True
        return self.info is not None and self.info.role == Role.PREFILL.value

    @property
    def name(self) -> str:
        """The node's id, or its address until it has told us its id."""
        return self.info.node_id if self.info else self.engine.name if self.engine else self.url


class Fleet:
    """Polls the nodes and tells the router what changes.

    Args:
        observe: told every change, as an event of the router.
        on_restart: told the id of a node that restarted: its calls are lost, whatever their connections say.
        on_silent: told the id of a node that no longer answers at all; its calls may go on or not.
        engines: by address, those that are vLLM or SGLang servers.

    Attributes:
        on_added, on_removed: told of nodes that come and go while the fleet is watched.
        on_asked: told of every answer of a vLLM or SGLang server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        client: NodeClient,
        settings: FleetSection,
        observe: Callable[[FleetEvent], None],
        on_restart: Callable[[str], None] = lambda node_id: None,
        on_silent: Callable[[str], None] = lambda node_id: None,
        engines: Mapping[str, EngineServer] | None = None,
    ) -> None:
        self.nodes = [WatchedNode(url, engine=(engines or {}).get(url)) for url in urls]
        self.on_asked: Callable[[EngineServer], None] = lambda server: None
        self._client = client
        self._settings = settings
        self._observe = observe
        self.on_restart, self.on_silent = on_restart, on_silent
        self.on_added: list[Callable[[WatchedNode], None]] = []
        self.on_removed: list[Callable[[WatchedNode], None]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Ask every node once, then keep asking. Nodes that do not answer are no error: they may come up."""
        await asyncio.gather(*(self.poll(node) for node in self.nodes))
        for node in self.nodes:
            self._begin(node)

    async def stop(self) -> None:
        """Stop asking."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def add(self, url: str) -> WatchedNode:
        """Take in a node that joins: ask it once, then keep asking."""
        node = WatchedNode(url, joined=True)
        self.nodes.append(node)
        await self.poll(node)
        if node in self.nodes:
            self._begin(node)
            for tell in self.on_added:
                tell(node)
        return node

    async def remove(self, node: WatchedNode, *, silent: bool = False) -> None:
        """Forget a node. What it has goes on; if it is ``silent``, elsewhere."""
        if silent and node.info is not None:
            self.on_silent(node.info.node_id)
        if node in self.nodes:
            self.nodes.remove(node)
        task = self._tasks.pop(node.url, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for tell in self.on_removed:
            tell(node)
        known = [other.info.node_id for other in self.nodes if other.info is not None and other.up]
        if node.info is not None and node.info.node_id not in known:
            self._observe(NodeForgotten(node.info.node_id))

    def find_url(self, url: str) -> WatchedNode | None:
        """The node at this address, if it is watched."""
        return next((node for node in self.nodes if node.url == url), None)

    def _begin(self, node: WatchedNode) -> None:
        self._tasks[node.url] = asyncio.create_task(self._watch(node), name=f"watch {node.url}")

    def find(self, node_id: str) -> WatchedNode:
        """The node of this id.

        Raises:
            BusyError: it has just disappeared.
        """
        for node in self.nodes:
            if node.info is not None and node.info.node_id == node_id:
                return node
        raise BusyError("the node has just disappeared", do="try again", node=node_id)

    def role_of(self, node_id: str) -> Role | None:
        """What a node does; None if it is not known."""
        infos = (node.info for node in self.nodes)
        return next((Role(info.role) for info in infos if info is not None and info.node_id == node_id), None)

    def computes(self, node_id: str) -> bool:
        """Whether a node computes prompts."""
        return any(node.computes for node in self.nodes if node.info is not None and node.info.node_id == node_id)

    def suspect(self, name: str) -> None:
        """A call to this node (by id or address) broke: count it, and ask the node now rather than later."""
        for node in self.nodes:
            if node.up and node.name == name:
                self._failed(node, LinkError("a call to the node broke", node=name))
                node.wake.set()

    @property
    def client_fields(self) -> frozenset[str]:
        """What clients may ask for beyond what our own nodes know: fields of the engine's own."""
        engine = next((node.engine for node in self.nodes if node.engine is not None), None)
        return engine.dialect.client_fields if engine is not None else frozenset()

    @property
    def vocab_size(self) -> int | None:
        """Smallest vocabulary of the nodes that are up; None while none is."""
        return min((n.info.vocab_size for n in self.nodes if n.info and n.up), default=None)

    @property
    def kv_size(self) -> KvSize | None:
        """S_kv(l) of the model that is served (all nodes that are up have one layout); None while no node said it."""
        told = next((n.info.kv_size for n in self.nodes if n.info and n.info.kv_size), None)
        return None if told is None else KvSize(**told.model_dump())

    def missing_roles(self) -> list[Role]:
        """Roles without any node that is up."""
        present = {node.info.role for node in self.nodes if node.info and node.up}
        if any(node.up and node.computes for node in self.nodes):
            present.add(Role.PREFILL.value)
        return [role for role in Role if role.value not in present]

    def describe(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each node, for ``/health``."""
        return [
            {
                "node": node.name,
                "url": node.url,
                "cluster": node.info.cluster if node.info else None,
                "role": node.info.role if node.info else None,
                "up": node.up,
                "problem": node.problem,
                "restarts": node.restarts,
            }
            for node in self.nodes
        ]

    async def poll(self, node: WatchedNode) -> None:
        """Ask one node; never raises for what the node does."""
        try:
            asked = node.engine or self._client
            info = await asked.info(node.url, timeout_s=self._settings.poll_timeout)
            self._admit(node, info)
        except (IncompatibleError, UsageError, NodeDraining) as error:
            # It answers, and what it says rules it out: no use in waiting for more of the same.
            self._failed(node, error, at_once=True)
        except PrfaasError as error:
            self._failed(node, error)
        else:
            self._answered(node, info)

    async def _watch(self, node: WatchedNode) -> None:
        while True:
            interval_s = self._settings.poll_interval
            try:
                async with asyncio.timeout(interval_s if node.up else interval_s / 4):
                    await node.wake.wait()
            except TimeoutError:
                pass
            node.wake.clear()
            await self.poll(node)

    def _admit(self, node: WatchedNode, info: NodeInfo) -> None:
        """Check that a node fits the others that are up.

        Raises:
            UsageError: another address answers with the same id.
            IncompatibleError: its cache layout is another one.
        """
        for other in self.nodes:
            if other is node or other.info is None or not other.up:
                continue
            if other.info.node_id == info.node_id:
                raise UsageError(
                    f"two addresses answer as node {info.node_id}: {other.url} and {node.url}",
                    do="list each node once, and give each its own id",
                )
            if other.info.layout != info.layout:
                raise IncompatibleError(
                    f"nodes {other.info.node_id} and {info.node_id} keep different state",
                    expected=f"layout {other.info.layout} ({other.info.model}, as on {other.info.node_id})",
                    found=f"layout {info.layout} ({info.model}, on {info.node_id})",
                    do="run the same checkpoint and precision on both",
                )

    def _answered(self, node: WatchedNode, info: NodeInfo) -> None:
        before = node.info
        node.info = info
        node.failures = 0
        node.successes += 1
        if before is not None and before.node_id != info.node_id:
            self._observe(NodeForgotten(before.node_id))
        if before is not None and before.boot_id != info.boot_id:
            node.restarts += 1
            log.warning("node %s has restarted", before.node_id)
            self.on_restart(before.node_id)
        # A node that was never up has given no reason to doubt it: its first answer counts.
        if not node.up and before is not None and node.successes < self._settings.up_after:
            return
        seen = _seen(node, info)
        if not node.up or before != info or node.told != seen:
            node.told = seen
            self._observe(seen)
        if not node.up:
            log.info("%s node %s of cluster %s is up", info.role, info.node_id, info.cluster)
        node.up = True
        node.problem = None
        if node.engine is not None:
            self.on_asked(node.engine)

    def _failed(self, node: WatchedNode, error: PrfaasError, *, at_once: bool = False) -> None:
        node.successes = 0
        node.failures += 1
        if node.up and not at_once and node.failures < self._settings.down_after:
            return
        if node.up:
            log.warning("node %s is down: %s", node.name, error.line())
            self._observe(NodeDown(node.name))
        elif at_once and node.problem != error.line():
            log.error("node %s is not admitted: %s", node.name, error.line())
        node.up = False
        node.problem = error.line()
        if isinstance(error, LinkError):
            # Every time: who could take over may have come up since.
            self.on_silent(node.name)


def _seen(node: WatchedNode, info: NodeInfo) -> NodeSeen:
    """What the router needs to know of a node."""
    told, engine = info.profile, node.engine
    profile = engine.prefill.profile if engine is not None else None
    if told is not None:
        curve = PiecewiseLinear.of(*zip(*told.prefill, strict=True))
        profile = NodeProfile(info.node_id, curve, DecodeProfile(told.decode_step_s, told.max_batch))
    return NodeSeen(
        info.node_id,
        info.cluster,
        Role(info.role),
        info.max_model_tokens,
        info.prefill_chunk_tokens,
        profile,
        told.max_batch if told is not None else 0,
        engine.alone if engine is not None else Alone.NEVER,
        info.convertible,
        None if info.next_role is None else Role(info.next_role),
    )
