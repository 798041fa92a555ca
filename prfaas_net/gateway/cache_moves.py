"""Cached prefixes brought from one node to another: what the advisor advises, and what a request is told to wait for.

The receiver is asked first, and its ticket goes to the sender (:mod:`prfaas_net.nodes.cache_messages`). Everything is
bounded: how many run at a time (the advisor's bound, and each node's own), how long each may take, and a prefix that is
on its way to a node already is not sent twice. A move that fails costs itself alone: what is not there is computed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from prfaas_net.cache.advice import CopyPrefix, Replicate
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.manager import Match
from prfaas_net.clock import Clock
from prfaas_net.errors import BusyError, DeadlineError, PrfaasError, ProtocolError
from prfaas_net.gateway.cache_desk import CacheDesk
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import Fleet, WatchedNode
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.cache_messages import CacheCopyCall, CacheTakeCall
from prfaas_net.scheduling import Decision, Role, Router

__all__ = ["CacheMoves", "MoveCounters"]

log = logging.getLogger(__name__)

# Between two questions to the advisor: a fraction of the half-life of its counts.
ADVISE_EVERY_S = 2.0
# After a copy for a request has failed, none is proposed out of that cluster for so long.
BARRED_S = 30.0
# A request waits for a prefix twice as long as was predicted, and a second more: a few round trips and a busy loop.
PATIENCE_RATIO, PATIENCE_S = 2.0, 1.0


class MoveCounters:
    """In ``/metrics``; made once a process, however often its gateway is started."""

    def __init__(self, metrics: Metrics) -> None:
        self.moves = metrics.counter(
            "cache_moves", "Cached prefixes brought to another node, by why and how it ended", ("why", "outcome")
        )
        self.moved_bytes = metrics.counter("cache_moved_bytes", "KVCache of such prefixes that crossed")


class CacheMoves:
    """Has prefixes moved between nodes of our own kind.

    Args:
        desk: knows what is used where, and advises.
        clock: the advisor's.
    """

    def __init__(
        self, fleet: Fleet, client: NodeClient, desk: CacheDesk, router: Router, clock: Clock, counters: MoveCounters
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._desk = desk
        self._router = router
        self._clock = clock
        self._moves, self._bytes = counters.moves, counters.moved_bytes
        self._loop: asyncio.Task[None] | None = None
        self._running: dict[tuple[bytes, str], asyncio.Task[int]] = {}
        self._barred: dict[str, float] = {}  # clusters, until when
        self._steps: dict[Replicate | CopyPrefix, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to do what is advised."""
        self._loop = asyncio.create_task(self._advised(), name="cache moves")

    async def stop(self) -> None:
        """Give up what runs."""
        tasks = [task for task in (self._loop, *self._steps.values(), *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._steps.clear()
        self._running.clear()

    # -- for a request ------------------------------------------------------------------------------------------------

    def copyable(self, cached: Match) -> dict[str, int]:
        """By cluster, how long a prefix could be copied out of it."""
        able = {node.name for node in self._fleet.nodes if self._takes_part(node)}
        now = self._clock.now()
        return {
            cluster: held.usable_tokens
            for cluster, held in Match(tuple(n for n in cached.nodes if n.node_id in able)).by_cluster().items()
            if held.usable_tokens and self._barred.get(cluster, now) <= now
        }

    async def before(self, decision: Decision, keys: bytes, cached: Match, *, within_s: float) -> str:
        """Bring the prefix that a decision wants to its prefill node. Says what became of it; never raises for it."""
        holders = [node for node in cached.nodes if node.cluster == decision.copy_from]
        if not holders:
            return f"no prefix copied: {decision.copy_from} holds none any more"
        best = max(holders, key=lambda node: (node.usable_tokens, node.node_id))
        within_s = min(within_s, PATIENCE_RATIO * decision.wait_s + PATIENCE_S)
        n_keys = best.usable_tokens // self._block_tokens * KEY_BYTES
        try:
            async with asyncio.timeout(within_s):
                await self.bring(keys[:n_keys], best.node_id, decision.prefill_node, within_s=within_s, why="request")
        except TimeoutError:
            why = f"it took more than {within_s:.1f} s"
        except PrfaasError as error:
            why = error.line()
        else:
            return f"a prefix of {best.usable_tokens} tokens was copied from {best.node_id}"
        self._barred[best.cluster] = self._clock.now() + BARRED_S
        return f"no prefix copied from {best.node_id}: {why}"

    # -- moves --------------------------------------------------------------------------------------------------------

    async def bring(self, keys: bytes, source: str, target: str, *, within_s: float, why: str) -> int:
        """Bring a prefix to a node, or wait for the move that does so already. Returns the bytes that crossed.

        Raises:
            PrfaasError: it did not get there.
        """
        name = keys[-KEY_BYTES:], target
        task = self._running.get(name)
        if task is None:
            task = asyncio.create_task(self._move(keys, source, target, within_s, why), name=f"prefix to {target}")
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
            # Whoever waits may leave before it ends; then nobody asks for its error.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _move(self, keys: bytes, source: str, target: str, within_s: float, why: str) -> int:
        outcome = "failed"
        try:
            async with asyncio.timeout(within_s):
                n_bytes = await self._call(keys, self._fleet.find(source), self._fleet.find(target), within_s)
            outcome = "done" if n_bytes else "there"
            self._bytes.inc(n_bytes)
            return n_bytes
        except TimeoutError as error:
            raise DeadlineError("a prefix took too long to copy", expected=f"within {within_s:.1f} s") from error
        finally:
            self._moves.labels(why, outcome).inc()

    async def _call(self, keys: bytes, source: WatchedNode, target: WatchedNode, within_s: float) -> int:
        if source.info is None or target.info is None or not (self._takes_part(source) and self._takes_part(target)):
            raise BusyError("one of the nodes does not exchange prefixes now")
        request_id, text = f"prefix-{uuid.uuid4().hex}", keys.hex()
        take = CacheTakeCall(
            request_id=request_id, layout=target.info.layout, prefix_keys=text, source_cluster=source.info.cluster,
            deadline_s=within_s,
        )  # fmt: skip
        taking = await self._client.open(target.name, target.url, "/v1/cache/take", take)
        try:
            event = await taking.next()
            if event["event"] == "done":
                return 0
            if not isinstance(event.get("ticket"), dict):
                raise ProtocolError("a node sent something out of order", expected="a ticket", found=repr(event)[:120])
            copy = CacheCopyCall(
                request_id=request_id, prefix_keys=text, ticket=event["ticket"],
                destination_cluster=target.info.cluster, deadline_s=within_s,
            )  # fmt: skip
            copying = await self._client.open(source.name, source.url, "/v1/cache/copy", copy)
            try:
                while (sent := await copying.next())["event"] != "done":
                    pass
                while (await taking.next())["event"] != "done":
                    pass
            finally:
                copying.close()
        finally:
            taking.close()
        n_bytes = sent.get("kv_bytes")
        return n_bytes if type(n_bytes) is int else 0

    # -- what the advisor advises -------------------------------------------------------------------------------------

    async def _advised(self) -> None:
        while True:
            try:
                for step in self._desk.advise():
                    if step not in self._steps and (target := self._target(step)) is not None:
                        self._steps[step] = asyncio.create_task(self._take(step, target), name=step.reason)
            except Exception:
                log.exception("asking for advice failed")
            await asyncio.sleep(ADVISE_EVERY_S)

    async def _take(self, step: Replicate | CopyPrefix, target: str) -> None:
        """Do what was advised, and say how it ended."""
        ok = False
        try:
            within_s = self._desk.advisor.policy.deadline_s
            await self.bring(step.keys, step.source, target, within_s=within_s, why="advice")
            ok = True
            log.info("a prefix of %d tokens is on %s now, from %s: %s", step.n_tokens, target, step.source, step.reason)
        except PrfaasError as error:
            log.info("a prefix did not get from %s to %s: %s", step.source, target, error.line())
        finally:
            self._desk.advisor.done(step, ok=ok, now=self._clock.now())
            self._steps.pop(step, None)

    def _target(self, step: Replicate | CopyPrefix) -> str | None:
        """The node that a prefix is brought to; None where nobody would take it."""
        able = {node.name for node in self._fleet.nodes if node.up and self._takes_part(node)}
        if step.source not in able:
            return None
        if isinstance(step, Replicate):
            return step.target_node if step.target_node in able else None
        there = [
            node
            for node in self._router.state.up(Role.PREFILL)
            if node.cluster == step.target_cluster and node.node_id in able
        ]
        return min(there, key=lambda node: node.load).node_id if there else None

    @property
    def _block_tokens(self) -> int:
        manager = self._desk.caches.manager
        return manager.block_tokens if manager is not None else 1

    @staticmethod
    def _takes_part(node: WatchedNode) -> bool:
        return node.engine is None and node.info is not None and node.info.takes_prefixes
