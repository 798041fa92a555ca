"""A link without a network: both ends in one process, for tests of whatever is built on links.

Same calls, same sessions, same promises as ``KvListener`` and ``SenderLink`` (one contract suite runs over both); bytes
are copied by tasks on the event loop. ``cut()`` is the one thing a network does that this does not do by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.kv.chunks import ChunkTable, checksum
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.incoming import Inbox, Incoming
from prfaas_net.transport.outgoing import Outgoing
from prfaas_net.wire import (
    Delivered,
    Header,
    OutgoingTransfer,
    ReceivingSession,
    SendFailed,
    SendingSession,
    Session,
    Ticket,
    Timers,
)

__all__ = ["MemoryLink", "MemoryListener"]


class MemoryListener:
    """The receiving end; see :class:`~prfaas_net.transport.KvListener`."""

    def __init__(self, *, identity: Identity, timers: Timers | None = None, clock: Clock | None = None) -> None:
        self.identity = identity
        self.address = ("memory", 0)
        self.timers = timers or Timers()
        self.clock = clock or SystemClock()
        self.lock = threading.Lock()
        self.inbox = Inbox(boot_id=identity.boot_id, clock=self.clock, lock=self.lock, writers=self)
        self.links: set[MemoryLink] = set()
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to take transfers."""
        self._expiring = asyncio.create_task(self.inbox.expire_forever())

    async def close(self) -> None:
        """End all links and reservations."""
        for link in tuple(self.links):
            link.end(link.receiver, LinkError("the receiver is shutting down"))
        await self.inbox.abort_all()
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)

    @property
    def reservations(self) -> int:
        return len(self.inbox)

    @property
    def connections(self) -> int:
        return len(self.links)

    def reserve(
        self,
        table: ChunkTable,
        destinations: Sequence[memoryview],
        *,
        lifetime_s: float,
        manifest: dict[str, Any] | None = None,
    ) -> Incoming:
        """See :meth:`~prfaas_net.transport.KvListener.reserve`."""
        return self.inbox.reserve(
            table, destinations, lifetime_s=lifetime_s, endpoints=[self.address], manifest=manifest
        )

    def pump(self, session: ReceivingSession) -> None:
        for link in tuple(self.links):
            if link.receiver is session:
                link.wake()

    def shut_lanes(self, session: ReceivingSession, numbers: set[int]) -> None:
        """Copies on the loop are never half done between two awaits."""


class MemoryLink:
    """The sending end; see :class:`~prfaas_net.transport.SenderLink`."""

    def __init__(self, listener: MemoryListener, identity: Identity) -> None:
        self._listener = listener
        self._clock = listener.clock
        self._lock = listener.lock
        self._loop = asyncio.get_running_loop()
        now = self._clock.now()
        self.sender = SendingSession(timers=listener.timers, now=now)
        self.receiver = ReceivingSession(
            listener.inbox.reservations, peer=identity.node, timers=listener.timers, now=now
        )
        self._outgoing: dict[OutgoingTransfer, Outgoing] = {}
        self._wanted = asyncio.Event()
        self._carrying = asyncio.create_task(self._carry())

    @classmethod
    async def connect(cls, listener: MemoryListener, *, identity: Identity) -> MemoryLink:
        """A link to a listener of the same process."""
        link = cls(listener, identity)
        listener.links.add(link)
        return link

    @property
    def alive(self) -> bool:
        return self.sender.error is None and not self.sender.draining

    def open(
        self, ticket: Ticket, table: ChunkTable, views: Sequence[memoryview], *, lifetime_s: float | None = None
    ) -> Outgoing:
        """See :meth:`~prfaas_net.transport.SenderLink.open`."""
        now = self._clock.now()
        lifetime_s = min(ticket.lifetime_s, lifetime_s or ticket.lifetime_s)
        with self._lock:
            transfer = self.sender.open(ticket, table, deadline=now + lifetime_s, now=now)
        outgoing = self._outgoing[transfer] = Outgoing(self, transfer, views)
        self.wake()
        return outgoing

    async def close(self, reason: str = "the sender closed the link") -> None:
        """End the link; transfers under way fail on both sides."""
        self.end(self.sender, LinkError(reason))
        await asyncio.gather(self._carrying, return_exceptions=True)

    def cut(self, error: LinkError) -> None:
        """What a network does: both ends find the connections dead."""
        with self._lock:
            for session in (self.sender, self.receiver):
                session.lost(error, now=self._clock.now())
        self.wake()

    def end(self, session: Session, error: PrfaasError) -> None:
        """One end closes on purpose, and the other is told."""
        with self._lock:
            session.fail(error, now=self._clock.now())
        self.wake()

    # -- for Outgoing, from any thread --------------------------------------------------------------------------

    def ready(self, transfer: OutgoingTransfer, chunk: int, known: int | None) -> None:
        with self._lock:
            self.sender.ready(transfer, chunk, known)
        self.wake()

    def seal(self, transfer: OutgoingTransfer, body: dict[str, Any]) -> None:
        with self._lock:
            self.sender.seal(transfer, body, now=self._clock.now())
        self.wake()

    def abort(self, transfer: OutgoingTransfer, error: PrfaasError) -> None:
        with self._lock:
            self.sender.abort(transfer, error, now=self._clock.now())
        self.wake()

    def wake(self) -> None:
        """There is something to carry; from any thread."""
        self._loop.call_soon_threadsafe(self._wanted.set)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _carry(self) -> None:
        """Chunks and control bytes, one chunk at a time, until both ends are over."""
        while self.sender.error is None or self.receiver.error is None:
            self._wanted.clear()
            while self._exchange_control() or self._copy_chunk():  # noqa: ASYNC110 - lets others run between chunks
                await asyncio.sleep(0)
            deadlines = [d for d in (self.sender.next_deadline(), self.receiver.next_deadline()) if d is not None]
            try:
                async with asyncio.timeout(max(0.0, min(deadlines, default=0.0) - self._clock.now())):
                    await self._wanted.wait()
            except TimeoutError:
                with self._lock:
                    for session in (self.sender, self.receiver):
                        session.handle_timeout(now=self._clock.now())
        self._exchange_control()
        self._listener.links.discard(self)

    def _exchange_control(self) -> bool:
        now = self._clock.now()
        with self._lock:
            forward = b"".join(self.sender.take_output(now=now))
            backward = b"".join(self.receiver.take_output(now=now))
            self.receiver.receive(forward, now=now)
            self.sender.receive(backward, now=now)
            events = [*self.sender.take_events(), *self.receiver.take_events()]
        for event in events:
            if isinstance(event, (Delivered, SendFailed)):
                self._outgoing.pop(event.transfer).end(event.error if isinstance(event, SendFailed) else None)
            else:
                self._listener.inbox.tell(event)
        return bool(forward or backward or events)

    def _copy_chunk(self) -> bool:
        now = self._clock.now()
        with self._lock:
            order = self.sender.next_chunk(1, now=now)
            if order is None:
                return False
            view = self._outgoing[order.transfer].views[order.chunk]
            known = order.checksum
            if known is None:
                known = checksum(view)
                self.sender.hashed(order, known)
            landing = self.receiver.admit(Header.unpack(order.header(known)), 1)
            if landing is not None:
                landing.view[:] = view
                self.receiver.landed(landing, checksum(landing.view), now=now)
        return True
