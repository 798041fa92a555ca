"""The receiving side: one port for control and data, and the memory that tickets promise.

::

    listener = KvListener(identity=..., security=...)
    await listener.start("127.0.0.1", 0)
    incoming = listener.reserve(table, destinations, lifetime_s=30, endpoints=[listener.address])
    ... hand incoming.ticket to the sender ...
    body = await incoming.sealed()     # the first token, before the last byte has landed
    await incoming.landed()            # every chunk is in its destination, verified
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.errors import CorruptionError, IncompatibleError, LinkError, PrfaasError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.transport.accepting import CODECS, Accepting
from prfaas_net.transport.driver import SessionDriver
from prfaas_net.transport.handshaking import dial
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.incoming import Inbox, Incoming
from prfaas_net.transport.lanes import Lane, ReceiveLane, join_lanes
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.security import Security
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import (
    MAX_LANES,
    Event,
    Hello,
    LaneGivenUp,
    ReceivingSession,
    SessionLost,
    TakenOver,
    Timers,
)

__all__ = ["Incoming", "KvListener"]

# Between two attempts to dial a sender again: doubles from the first to the last.
REDIAL_S = (0.05, 1.0)


class _Peer:
    """One session of one sender."""

    def __init__(self, listener: KvListener, session: ReceivingSession, hello: Hello) -> None:
        self.session = session
        self.hello = hello
        self.lanes: dict[int, ReceiveLane] = {}
        self.over = asyncio.Event()
        self.driver = SessionDriver(
            session,
            clock=listener._clock,
            lock=listener._lock,
            on_event=lambda event: listener._event(self, event),
        )


class KvListener:
    """Accepts senders and holds the reservations that they may fill.

    Args:
        security: how senders prove themselves; without it only loopback addresses can be listened on.
        link_grace_s: how long a transfer whose link died waits for its sender to come back.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        security: Security | None = None,
        options: LinkOptions | None = None,
        timers: Timers | None = None,
        clock: Clock | None = None,
        link_grace_s: float = 5.0,
    ) -> None:
        self.identity = identity
        self._security = security or Security()
        self._options = options or LinkOptions()
        self._timers = timers or Timers()
        self._clock = clock or SystemClock()
        self._link_grace_s = link_grace_s
        self._lock = threading.Lock()
        self._inbox = Inbox(boot_id=identity.boot_id, clock=self._clock, lock=self._lock, writers=self)
        self._peers: dict[str, _Peer] = {}
        # Of all peers, those too that are gone and whose threads have not ended yet.
        self._lanes: set[Lane] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._accepting = Accepting(identity, self._security, self._options, role="sender", on_ready=self._join)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or is open to others without authentication.
        """
        await self._accepting.start(host, port)
        self._tasks = [asyncio.create_task(self._inbox.expire_forever())]

    async def close(self, *, timeout_s: float = 1.0) -> None:
        """Stop listening and end all sessions and reservations; joins the threads."""
        await self._accepting.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        peers = list(self._peers.values())
        await asyncio.gather(*(p.driver.close("the receiver is shutting down", timeout_s=timeout_s) for p in peers))
        await self._inbox.abort_all()
        await join_lanes(self._lanes, timeout_s)

    def drain(self, reason: str = "the receiver is draining") -> None:
        """Ask every sender for no new transfers; those under way go on."""
        for peer in tuple(self._peers.values()):
            with self._lock:
                peer.session.go_away(reason)
            peer.driver.pump()

    async def dial_sender(self, endpoint: tuple[str, int]) -> None:
        """Open the link from this side, to a sender's gate, and keep it up; for senders that cannot dial us.

        Raises:
            PrfaasError: the first attempt failed.
        """
        lost = await self._dial_session(endpoint)
        self._tasks.append(asyncio.create_task(self._keep_dialled(endpoint, lost)))

    def keep_dialling(self, endpoint: tuple[str, int]) -> None:
        """The same without waiting for the first attempt: the sender may come up later."""
        over = asyncio.Event()
        over.set()
        self._tasks.append(asyncio.create_task(self._keep_dialled(endpoint, over)))

    # -- for the user -------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._accepting.address

    @property
    def refused_connections(self) -> int:
        """Strangers, and those that left or were too slow."""
        return self._accepting.refused_connections

    @property
    def last_refusal(self) -> PrfaasError | None:
        """Why the last of them was refused."""
        return self._accepting.last_refusal

    @property
    def reservations(self) -> int:
        """Transfers that are promised and have not ended."""
        return len(self._inbox)

    @property
    def connections(self) -> int:
        """Open connections of established sessions, control connections included."""
        return sum(1 + len(peer.lanes) for peer in self._peers.values())

    def reserve(
        self,
        table: ChunkTable,
        destinations: Sequence[memoryview],
        *,
        lifetime_s: float,
        endpoints: Sequence[tuple[str, int]] | None = None,
        manifest: dict[str, Any] | None = None,
    ) -> Incoming:
        """Promise to take a transfer into these destinations. On the loop.

        Args:
            lifetime_s: from now; when it has passed the transfer fails, whatever its state.
            endpoints: where the sender should dial, in order of preference; the listener's address if not given. Empty:
                nowhere, since this side dials the sender's gate.
        """
        return self._inbox.reserve(
            table,
            destinations,
            lifetime_s=lifetime_s,
            endpoints=[self.address] if endpoints is None else endpoints,
            manifest=manifest,
        )

    # -- connections --------------------------------------------------------------------------------------------

    async def _dial_session(self, endpoint: tuple[str, int]) -> asyncio.Event:
        """A session dialled by this side; the event is set when it is over."""
        hello = Hello(
            secrets.token_hex(16), 0, self.identity.node, self.identity.boot_id, secrets.token_hex(16),
            features=tuple(codec.feature for codec in CODECS), role="receiver",
        )  # fmt: skip
        control, sender = await dial(endpoint, hello, self._security, self._options)
        seen_as = replace(hello, node=sender.node)
        peer = self._add_peer(seen_as)
        try:
            for lane in range(1, self._options.connections + 1):
                numbered = replace(hello, lane=lane, nonce=secrets.token_hex(16))
                stream, _ = await dial(endpoint, numbered, self._security, self._options)
                self._add_lane(peer, lane, stream)
        except BaseException:
            control.sock.close()
            self._event(peer, SessionLost(LinkError("the link could not be opened"), final=True))
            raise
        await peer.driver.attach(control)
        return peer.over

    async def _keep_dialled(self, endpoint: tuple[str, int], lost: asyncio.Event) -> None:
        backoff_s = REDIAL_S[0]
        while True:
            await lost.wait()
            try:
                lost = await self._dial_session(endpoint)
                backoff_s = REDIAL_S[0]
            except PrfaasError:
                await asyncio.sleep(backoff_s)
                backoff_s = min(REDIAL_S[1], 2 * backoff_s)

    async def _join(self, hello: Hello, stream: Stream) -> None:
        peer = self._peers.get(hello.session)
        if hello.lane == 0:
            if peer is not None:
                raise IncompatibleError("the session has a control connection already")
            await self._add_peer(hello).driver.attach(stream)
            return
        if peer is None or hello.lane in peer.lanes or len(peer.lanes) >= MAX_LANES:
            raise LinkError("a data connection without its session, or one too many", found=f"lane {hello.lane}")
        self._add_lane(peer, hello.lane, stream)

    def _add_peer(self, hello: Hello) -> _Peer:
        session = ReceivingSession(
            self._inbox.reservations,
            peer=hello.node,
            timers=self._timers,
            now=self._clock.now(),
            link_grace_s=self._link_grace_s,
            codecs=[codec for codec in CODECS if codec.feature in hello.features],
        )
        peer = self._peers[hello.session] = _Peer(self, session, hello)
        return peer

    def _add_lane(self, peer: _Peer, number: int, stream: Stream) -> None:
        lane = peer.lanes[number] = ReceiveLane(
            number, stream, peer.session, lock=self._lock, clock=self._clock, wake=peer.driver.wake,
            on_end=lambda lane, error: self._lane_ended(peer, lane, error),
        )  # fmt: skip
        self._lanes.add(lane)
        lane.start()

    def _lane_ended(self, peer: _Peer, lane: Lane, error: Exception | None) -> None:
        """From the lane's thread: its last act."""
        if isinstance(error, PrfaasError) and not isinstance(error, CorruptionError):
            # A peer that sends nonsense on one connection is not to be trusted on the others. (Corruption is the
            # network's doing, and costs the connection only.)
            with self._lock:
                peer.session.fail(error, now=self._clock.now())
        try:
            peer.driver.loop.call_soon_threadsafe(self._forget_lane, peer, lane)
        except RuntimeError:
            lane.close()  # the loop is gone

    def _forget_lane(self, peer: _Peer, lane: Lane) -> None:
        lane.close()
        self._lanes.discard(lane)
        peer.lanes.pop(lane.number, None)
        peer.driver.pump()

    # -- for the inbox ------------------------------------------------------------------------------------------

    def pump(self, session: ReceivingSession) -> None:
        for peer in tuple(self._peers.values()):
            if peer.session is session:
                peer.driver.pump()

    def shut_lanes(self, session: ReceivingSession, numbers: set[int]) -> None:
        for peer in self._peers.values():
            for number in numbers & peer.lanes.keys() if peer.session is session else ():
                peer.lanes[number].shutdown()

    def _event(self, peer: _Peer, event: Event) -> None:
        match event:
            case SessionLost():
                self._peers.pop(peer.hello.session, None)
                peer.over.set()
                for lane in peer.lanes.values():
                    lane.shutdown()
            case TakenOver() | LaneGivenUp():
                for number in event.lanes if isinstance(event, TakenOver) else (event.lane,):
                    if number in peer.lanes:
                        peer.lanes[number].shutdown()
            case _:
                self._inbox.tell(event)
