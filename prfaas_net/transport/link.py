"""A link: all connections from one sender to one receiver.

::

    link = await SenderLink.connect(ticket.endpoints, identity=..., key=..., options=...)
    outgoing = link.open(ticket, table, views, lifetime_s=30)
    outgoing.ready(0) ...            # from any thread, as chunks become final
    outgoing.seal({"first_token": 17})
    stats = await outgoing.wait()    # every byte has landed and was verified, or this raises
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.kv.chunks import ChunkTable, checksum
from prfaas_net.transport.driver import SessionDriver
from prfaas_net.transport.handshaking import dial
from prfaas_net.transport.lanes import Lane, SendLane
from prfaas_net.transport.options import LinkOptions
from prfaas_net.wire import (
    Delivered,
    Event,
    Hello,
    OutgoingTransfer,
    PeerIdentity,
    SenderStats,
    SendFailed,
    SendingSession,
    SessionLost,
    Ticket,
    Timers,
)

__all__ = ["Identity", "Outgoing", "SenderLink"]


@dataclass(frozen=True)
class Identity:
    """Who a process is to its peers: a name for people, and a boot id that is new at every start."""

    node: str
    boot_id: str = field(default_factory=lambda: secrets.token_hex(16))


class Outgoing:
    """One transfer on a link, for its user."""

    def __init__(self, link: SenderLink, transfer: OutgoingTransfer, views: Sequence[memoryview]) -> None:
        self.transfer = transfer
        self.views = views
        self._link = link
        self._done: asyncio.Future[SenderStats] = asyncio.get_running_loop().create_future()
        # A failure is also known to whoever never waits; that must not be reported as an unhandled future.
        self._done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def ready(self, chunk: int) -> None:
        """The chunk's bytes are final. From any thread; hashes them here, where they are still in the cache."""
        self._link._ready(self.transfer, chunk, checksum(self.views[chunk]))

    def ready_all(self) -> None:
        """Every chunk is final; the connections hash them, each chunk just before it is sent."""
        for chunk in range(len(self.views)):
            self._link._ready(self.transfer, chunk, None)

    def seal(self, body: dict[str, Any]) -> None:
        """Every chunk is ready; ``body`` travels ahead of them on the control connection. From any thread."""
        self._link._seal(self.transfer, body)

    def abort(self, error: PrfaasError) -> None:
        """Give up; the receiver gets ``error``. From any thread; harmless after the end."""
        self._link._abort(self.transfer, error)

    async def wait(self) -> SenderStats:
        """Until the receiver has confirmed everything.

        Raises:
            PrfaasError: it will not; the transfer's own deadline bounds the wait.
        """
        return await asyncio.shield(self._done)

    def _end(self, error: PrfaasError | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(self.transfer.stats)
        else:
            self._done.set_exception(error)


class SenderLink:
    """Made by :meth:`connect`. One control connection, ``options.connections`` data connections."""

    def __init__(self, peer: PeerIdentity, endpoint: tuple[str, int], *, timers: Timers, clock: Clock) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self._clock = clock
        self._session = SendingSession(timers=timers, now=clock.now())
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._driver = SessionDriver(
            self._session, clock=clock, lock=lock, on_event=self._event, on_pump=self._wake_lanes
        )
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, SendLane] = {}
        self._outgoing: dict[OutgoingTransfer, Outgoing] = {}

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[tuple[str, int]],
        *,
        identity: Identity,
        key: bytes | None,
        options: LinkOptions,
        timers: Timers | None = None,
        clock: Clock | None = None,
    ) -> SenderLink:
        """Dial the first endpoint that answers.

        Raises:
            PrfaasError: none did; the error of the last one, which names it.
        """
        error: PrfaasError = LinkError("a ticket without endpoints")
        for endpoint in endpoints:
            try:
                return await cls._connect(endpoint, identity, key, options, timers or Timers(), clock or SystemClock())
            except LinkError as caught:
                error = caught
        raise error

    @classmethod
    async def _connect(
        cls,
        endpoint: tuple[str, int],
        identity: Identity,
        key: bytes | None,
        options: LinkOptions,
        timers: Timers,
        clock: Clock,
    ) -> SenderLink:
        session = secrets.token_hex(16)

        def hello(lane: int) -> Hello:
            return Hello(session, lane, identity.node, identity.boot_id, secrets.token_hex(16))

        control, peer = await dial(endpoint, hello(0), key, options)
        lanes = range(1, options.connections + 1)
        dialled = await asyncio.gather(
            *(dial(endpoint, hello(lane), key, options) for lane in lanes), return_exceptions=True
        )
        sockets = [result[0] for result in dialled if isinstance(result, tuple)]
        failures = [result for result in dialled if isinstance(result, BaseException)]
        if failures:
            for sock in (control, *sockets):
                sock.close()
            raise failures[0]
        link = cls(peer, endpoint, timers=timers, clock=clock)
        await link._start(control, sockets)
        return link

    async def _start(self, control: socket.socket, sockets: Sequence[socket.socket]) -> None:
        for number, sock in enumerate(sockets, 1):
            lane = SendLane(
                number, sock, self._session, work=self._work, views=self._view, clock=self._clock,
                wake=self._driver.wake, on_end=self._lane_ended,
            )  # fmt: skip
            self._lanes[number] = lane
            lane.start()
        await self._driver.attach(control)

    # -- for the user -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether new transfers can be opened."""
        return self._session.error is None and not self._session.draining

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the last ping, application to application."""
        return self._session.rtt_s

    def open(
        self,
        ticket: Ticket,
        table: ChunkTable,
        views: Sequence[memoryview],
        *,
        lifetime_s: float | None = None,
    ) -> Outgoing:
        """Begin a transfer. On the loop.

        Args:
            views: each chunk's bytes, to be sent from where they lie; they must stay as they are from
                ``ready`` until the transfer has ended.
            lifetime_s: from now; the ticket's own lifetime bounds it.

        Raises:
            PrfaasError: the link is down or draining, or the ticket is for another table.
        """
        now = self._clock.now()
        lifetime_s = min(ticket.lifetime_s, lifetime_s or ticket.lifetime_s)
        with self._driver.lock:
            transfer = self._session.open(ticket, table, deadline=now + lifetime_s, now=now)
            outgoing = self._outgoing[transfer] = Outgoing(self, transfer, views)
        self._driver.pump()
        return outgoing

    async def close(self, reason: str = "the sender closed the link", *, timeout_s: float = 1.0) -> None:
        """End the link; transfers under way fail on both sides. Joins its threads."""
        await self._driver.close(reason, timeout_s=timeout_s)
        lanes = list(self._lanes.values())
        self._end_lanes()
        await asyncio.gather(*(asyncio.to_thread(lane.join, timeout_s) for lane in lanes))

    # -- for Outgoing -------------------------------------------------------------------------------------------

    def _ready(self, transfer: OutgoingTransfer, chunk: int, known: int | None) -> None:
        with self._work:
            self._session.ready(transfer, chunk, known)
            self._work.notify()

    def _seal(self, transfer: OutgoingTransfer, body: dict[str, Any]) -> None:
        with self._work:
            self._session.seal(transfer, body, now=self._clock.now())
        self._driver.wake()

    def _abort(self, transfer: OutgoingTransfer, error: PrfaasError) -> None:
        with self._work:
            self._session.abort(transfer, error, now=self._clock.now())
        self._driver.wake()

    # -- inside -------------------------------------------------------------------------------------------------

    def _view(self, transfer: OutgoingTransfer, chunk: int) -> memoryview:
        return self._outgoing[transfer].views[chunk]

    def _event(self, event: Event) -> None:
        if isinstance(event, (Delivered, SendFailed)):
            error = event.error if isinstance(event, SendFailed) else None
            with self._work:
                outgoing = self._outgoing.pop(event.transfer)
            outgoing._end(error)
        elif isinstance(event, SessionLost):
            self._end_lanes()

    def _wake_lanes(self) -> None:
        """Under the lock: a frame from the receiver may have freed chunks to send."""
        if self._session.waiting:
            self._work.notify_all()

    def _end_lanes(self) -> None:
        with self._work:
            for lane in self._lanes.values():
                lane.closing = True
            self._work.notify_all()
        for lane in self._lanes.values():
            lane.shutdown()

    def _lane_ended(self, lane: Lane, error: Exception | None) -> None:
        """From the lane's thread: its last act."""
        with self._work:
            self._session.lane_lost(lane.number)
            self._work.notify_all()
        try:
            self._loop.call_soon_threadsafe(self._forget_lane, lane, error)
        except RuntimeError:
            lane.sock.close()  # the loop is gone

    def _forget_lane(self, lane: Lane, error: Exception | None) -> None:
        lane.sock.close()
        del self._lanes[lane.number]
        if not self._lanes and self._session.error is None:
            found = str(error) if error else "end of stream"
            self._driver.lost(LinkError("every data connection of the link was closed", found=found))
