"""The decode side: reserve memory, hand the ticket to the prefill server, put what lands into the engine's pages."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prfaas_net.aio import see_through
from prfaas_net.config import is_loopback
from prfaas_net.connectors.agreement import Share
from prfaas_net.connectors.config import WILDCARDS, ConnectorConfig
from prfaas_net.connectors.layout import PROTOCOL, EngineLayout, StateKind
from prfaas_net.connectors.messages import ClaimCall
from prfaas_net.connectors.orders import LoadOrder, ReleaseOrder
from prfaas_net.connectors.pages import PagedMemory
from prfaas_net.connectors.peers import Peer, PeerBook
from prfaas_net.connectors.plan import PageChunk, PagePlan, sections_of, state_block
from prfaas_net.connectors.room import Room, views_of
from prfaas_net.connectors.stats import ConnectorStats
from prfaas_net.errors import DeadlineError, InternalError, InvalidRequest, LinkError, PrfaasError
from prfaas_net.transport import Incoming, KvListener

__all__ = ["DecodeDesk", "LoadResults"]

log = logging.getLogger(__name__)
# A wait on the stream's own word, once the prefill server has said that everything was delivered.
GRACE_S = 5.0


@dataclass
class LoadResults:
    """Loads that ended since they were asked for last.

    Attributes:
        received: every one of them, whatever became of it.
        failed: those that did not succeed.
        bad_blocks: blocks that were to be filled and were not.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class DecodeDesk:
    """Loads of one rank. On the loop, but for :meth:`begin`, :meth:`cancel` and :meth:`take`."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: EngineLayout,
        memory: PagedMemory,
        room: Room,
        listener: KvListener,
        peers: PeerBook,
        stats: ConnectorStats,
    ) -> None:
        self._config = config
        self._layout = layout
        self._memory = memory
        self._room = room
        self._listener = listener
        self._peers = peers
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._results = LoadResults()

    def __len__(self) -> int:
        return len(self._jobs)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def begin(self, loads: Iterable[LoadOrder], releases: Iterable[ReleaseOrder]) -> None:
        for load in loads:
            self._loop.call_soon_threadsafe(self._start, load)
        for release in releases:
            self._loop.call_soon_threadsafe(self._start_release, release)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more; they end soon, as failed."""
        for request_id in request_ids:
            self._loop.call_soon_threadsafe(self._cancel, request_id)

    def take(self) -> LoadResults:
        with self._lock:
            results, self._results = self._results, LoadResults()
        return results

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _start(self, order: LoadOrder) -> None:
        job = self._jobs[order.request_id] = asyncio.create_task(self._load(order))
        # Not inside the job: one that is given up before its first step would never get there.
        job.add_done_callback(partial(self._ended, order))

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            job.cancel()

    def _start_release(self, order: ReleaseOrder) -> None:
        task = asyncio.create_task(self._release(order))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def close(self) -> None:
        """End every job, and wait until none writes into the engine's pages."""
        tasks = [*self._jobs.values(), *self._errands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, order: LoadOrder, job: asyncio.Task[None]) -> None:
        """Whatever happened, the engine is told exactly once."""
        self._jobs.pop(order.request_id, None)
        error = None if job.cancelled() else job.exception()
        if job.cancelled():
            log.info("request %s: the load was given up", order.request_id)
        elif isinstance(error, PrfaasError):
            log.warning("request %s: the KVCache could not be loaded: %s", order.request_id, error.line())
        elif error is not None:
            bug = InternalError("the load failed", found=f"{type(error).__name__}: {error}")
            log.error("request %s: %s", order.request_id, bug.line(), exc_info=error)
        failed = job.cancelled() or error is not None
        with self._lock:
            self._results.received.add(order.request_id)
            if failed:
                self._results.failed.add(order.request_id)
                self._results.bad_blocks |= self._filled_by(order)
        if failed:
            self._stats.add("failed_loads")

    def _filled_by(self, order: LoadOrder) -> set[int]:
        blocks: set[int] = set()
        for table, group in zip(order.blocks, self._layout.groups, strict=True):
            if group.kind is not StateKind.STATE:
                blocks.update(table[order.start // group.block_tokens : -(-order.stop // group.block_tokens)])
        return blocks - {0}

    async def _load(self, order: LoadOrder) -> None:
        if order.refusal:
            raise InvalidRequest(order.refusal)
        deadline = self._loop.time() + order.deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                peer = await self._peers.get(order.host, order.port)
                try:
                    await self._load_all(order, peer, deadline)
                except _Stale:
                    for rank in range(len(peer.agreement.claims)):
                        self._peers.forget(order.host, order.port + rank)
                    await self._load_all(order, await self._peers.get(order.host, order.port), deadline)
        except TimeoutError as error:
            raise DeadlineError(
                f"the KVCache was not here within {order.deadline_s:.1f} s", transfer=order.transfer_id,
                do="raise deadline, or look at what the prefill server and the link are doing",
            ) from error  # fmt: skip
        except _Stale as error:
            raise LinkError("the prefill server restarts all the time", found=f"{order.host}:{order.port}") from error

    async def _load_all(self, order: LoadOrder, peer: Peer, deadline: float) -> None:
        started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._load_from(order, rank, shares, deadline))
                    for rank, shares in peer.agreement.shares.items()
                ]
                if self._layout.tp_rank == 0:
                    for rank, claims in enumerate(peer.agreement.claims):
                        if claims == 0:
                            group.create_task(self._claim_nothing(order, rank, 1, deadline))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        received = [task.result() for task in tasks]
        sealed_at = max((sealed for _, sealed in received), default=started)
        now = time.monotonic()
        self._stats.add("received_bytes", sum(n_bytes for n_bytes, _ in received))
        self._stats.add("received_s", now - started)
        self._stats.add("received_exposed_s", now - sealed_at)

    # -- one transfer ------------------------------------------------------------------------------------------------

    async def _load_from(
        self, order: LoadOrder, rank: int, shares: dict[str, Share], deadline: float
    ) -> tuple[int, float]:
        """Take one prefill rank's part. Returns (bytes, when the prefill was over on the monotonic clock)."""
        peer = await self._peers.get(order.host, order.port + rank)
        claims = peer.agreement.claims[rank]
        sections = sections_of(self._layout, shares, order.blocks, order.start, order.stop)
        if not sections:
            await self._claim_nothing(order, rank, claims, deadline)
            return 0, time.monotonic()
        plan = PagePlan(order.stop, sections, self._config.chunk_tokens, self._config.chunk)
        block = await self._room.reserve(plan.table.total_bytes)
        try:
            views = views_of(plan, block)
            left_s = deadline - self._loop.time()
            incoming = self._listener.reserve(
                plan.table, views, lifetime_s=max(left_s, 0.001), endpoints=self._endpoints(peer), manifest={}
            )
            try:
                sealed_at = await self._land(order, peer, claims, plan, incoming, left_s)
            finally:
                await see_through(incoming.abort())
            await see_through(asyncio.to_thread(self._fill, order, plan, shares, views))
            return plan.table.total_bytes, sealed_at
        finally:
            self._room.release(block)

    async def _land(
        self, order: LoadOrder, peer: Peer, claims: int, plan: PagePlan, incoming: Incoming, left_s: float
    ) -> float:
        call = ClaimCall(
            protocol=PROTOCOL, boot_id=peer.info.boot_id, transfer_id=order.transfer_id, digest=order.digest,
            stop_token=order.stop, ticket=incoming.ticket.to_json(), plan=plan.to_json(),
            claims=claims, deadline_s=max(left_s, 0.001),
        )  # fmt: skip
        claiming = asyncio.create_task(self._claim(peer, call))
        landing = asyncio.create_task(_landed(incoming))
        try:
            await asyncio.wait([claiming, landing], return_when=asyncio.FIRST_COMPLETED)
            if claiming.done() and not landing.done():
                sent = await claiming  # its error says more than the stream's
                async with asyncio.timeout(GRACE_S if sent else 0):
                    return await landing
            return await landing
        except TimeoutError as error:
            raise LinkError("the prefill server ended the claim early", transfer=order.transfer_id) from error
        finally:
            if landing.done() and not landing.cancelled() and landing.exception() is None:
                self._leave_open(claiming)
            else:
                claiming.cancel()
            landing.cancel()
            await see_through(asyncio.wait([landing]))

    def _leave_open(self, claiming: asyncio.Task[bool]) -> None:
        """All is here; the prefill server has yet to hear that, and closing the claim now would look like giving up."""
        self._errands.add(claiming)
        claiming.add_done_callback(self._errands.discard)
        claiming.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._loop.call_later(GRACE_S, claiming.cancel)

    async def _claim(self, peer: Peer, call: ClaimCall) -> bool:
        """Follow a claim to its end; whether all of it was sent and confirmed."""
        sent = False
        async with aclosing(self._peers.claim(peer, call)) as events:
            async for event in events:
                if event.get("event") == "stale":
                    raise _Stale
                sent = sent or event.get("event") == "sent"
        return sent

    async def _claim_nothing(self, order: LoadOrder, rank: int, claims: int, deadline: float) -> None:
        peer = await self._peers.get(order.host, order.port + rank)
        call = ClaimCall(
            protocol=PROTOCOL, boot_id=peer.info.boot_id, transfer_id=order.transfer_id, digest=order.digest,
            stop_token=order.stop, claims=claims, deadline_s=max(deadline - self._loop.time(), 0.001),
        )  # fmt: skip
        await self._claim(peer, call)

    async def _release(self, order: ReleaseOrder) -> None:
        """Tell every rank of a prefill server that nobody will come for a prompt."""
        try:
            async with asyncio.timeout(order.deadline_s):
                peer = await self._peers.get(order.host, order.port)
                for rank in range(len(peer.agreement.claims)):
                    call = ClaimCall(
                        protocol=PROTOCOL, transfer_id=order.transfer_id, release=True, deadline_s=order.deadline_s
                    )
                    await self._claim(await self._peers.get(order.host, order.port + rank), call)
        except (PrfaasError, TimeoutError) as error:
            log.info("transfer %s: the prefill server could not be told to let go: %s", order.transfer_id, error)

    def _endpoints(self, peer: Peer) -> list[tuple[str, int]]:
        kv, cluster = self._config.kv, peer.info.cluster
        if cluster in kv.dial:
            return []  # this side dials that site's gates
        rank = self._layout.tp_rank
        advertised = kv.advertise.get(cluster) or kv.advertise.get("*")
        if advertised is not None:
            return [(advertised[0], advertised[1] + rank)]
        host, port = self._listener.address
        if host in WILDCARDS:
            # The address that reached the prefill server is the one that it will reach.
            host = peer.local_host
        if is_loopback(host) and not is_loopback(peer.local_host):
            raise LinkError(
                "the prefill server is on another host and could not send here", found=f"kv.listen {host}:{port}",
                do="set kv.listen to an address that it can reach, or kv.advertise",
            )  # fmt: skip
        return [(host, port)]

    # -- pages -------------------------------------------------------------------------------------------------------

    def _fill(self, order: LoadOrder, plan: PagePlan, shares: dict[str, Share], views: list[memoryview]) -> None:
        """In a thread: from the landing memory into the pages."""
        for chunk, view in zip(plan.chunks, views, strict=True):
            section = plan.sections[chunk.section]
            heads = shares[chunk.layer].target_heads
            self._memory.scatter(chunk, section, self._table(order, chunk), view, heads)
        self._memory.settle()

    def _table(self, order: LoadOrder, chunk: PageChunk) -> list[int]:
        index, group, _ = self._layout.by_layer[chunk.layer]
        table = order.blocks[index]
        return [state_block(table, group.spare_blocks)] if group.kind is StateKind.STATE else table


class _Stale(Exception):
    """The prefill server has restarted since its layout was asked for."""


async def _landed(incoming: Incoming) -> float:
    await incoming.sealed()
    sealed_at = time.monotonic()
    await incoming.landed()
    return sealed_at
