"""The receiving side: one port for control and data, and the memory that tickets promise.

::

    listener = KvListener(identity=..., key=...)
    await listener.start("127.0.0.1", 0)
    incoming = listener.reserve(table, destinations, lifetime_s=30, endpoints=[listener.address])
    ... hand incoming.ticket to the sender ...
    body = await incoming.sealed()     # the first token, before the last byte has landed
    await incoming.landed()            # every chunk is in its destination, verified
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.config import is_loopback
from prfaas_net.errors import ConfigError, CorruptionError, IncompatibleError, LinkError, PrfaasError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.kv.codecs import Codec
from prfaas_net.transport.driver import SessionDriver
from prfaas_net.transport.handshaking import accept_handshake
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.incoming import Inbox, Incoming
from prfaas_net.transport.lanes import Lane, ReceiveLane
from prfaas_net.transport.options import LinkOptions, tune
from prfaas_net.transport.security import Security
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import (
    MAX_LANES,
    Acceptor,
    Event,
    Hello,
    LaneGivenUp,
    ReceivingSession,
    SessionLost,
    TakenOver,
    Timers,
)

__all__ = ["Incoming", "KvListener"]

# All that this side can decode.
CODECS = (Codec.ZSTD, Codec.BF16_PLANES)
# Connections that have not shaken hands yet. When there are more the oldest is closed: whoever opens ten thousand of
# them costs no more than this, and an honest dialler, who needs a few round trips, still gets through.
MAX_PENDING_HANDSHAKES = 256


class _Peer:
    """One session of one sender."""

    def __init__(self, listener: KvListener, session: ReceivingSession, hello: Hello) -> None:
        self.session = session
        self.hello = hello
        self.lanes: dict[int, ReceiveLane] = {}
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
        self.address: tuple[str, int] = ("", 0)
        self._security = security or Security()
        self._options = options or LinkOptions()
        self._timers = timers or Timers()
        self._clock = clock or SystemClock()
        self._link_grace_s = link_grace_s
        self._lock = threading.Lock()
        self._inbox = Inbox(boot_id=identity.boot_id, clock=self._clock, lock=self._lock, writers=self)
        self._peers: dict[str, _Peer] = {}
        self._pending: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.refused_connections = 0
        self.last_refusal: PrfaasError | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or is open to others without a shared key.
        """
        if not self._security.authenticates and not is_loopback(host):
            raise ConfigError(
                f"will not listen on {host} without authentication",
                expected="a loopback address, a shared key or certificates",
                do="set kv.shared_key or kv.tls on both sides",
            )
        _ = self._security.server  # bad certificate files are found now, not by the first dialler
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}", found=error.strerror, do="choose another kv.listen"
            ) from error
        self._socket.setblocking(False)
        self.address = self._socket.getsockname()[:2]
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._inbox.expire_forever())]

    async def close(self, *, timeout_s: float = 1.0) -> None:
        """Stop listening and end all sessions and reservations; joins the threads."""
        for task in (*self._tasks, *self._pending):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._pending, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        peers = list(self._peers.values())
        lanes = [lane for peer in peers for lane in peer.lanes.values()]
        await asyncio.gather(*(p.driver.close("the receiver is shutting down", timeout_s=timeout_s) for p in peers))
        await self._inbox.abort_all()
        await asyncio.gather(*(asyncio.to_thread(lane.join, timeout_s) for lane in lanes))

    # -- for the user -------------------------------------------------------------------------------------------

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
            endpoints: where the sender should dial, in order of preference; the listener's address if not given.
        """
        return self._inbox.reserve(
            table, destinations, lifetime_s=lifetime_s, endpoints=endpoints or [self.address], manifest=manifest
        )

    # -- connections --------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(0.05)  # out of descriptors: let some close
                continue
            if len(self._pending) >= MAX_PENDING_HANDSHAKES:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                oldest.cancel()
            sock.setblocking(False)
            task = asyncio.create_task(self._welcome(sock))
            self._pending[task] = None
            task.add_done_callback(lambda done, sock=sock: self._welcomed(done, sock))  # type: ignore[misc]
            # Accepting may return at once for as long as there are connections: let the others run in between.
            await asyncio.sleep(0)

    def _welcomed(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._pending.pop(task, None)
        if task.cancelled():
            sock.close()  # perhaps before its first step

    async def _welcome(self, sock: socket.socket) -> None:
        acceptor = Acceptor(
            node=self.identity.node,
            boot_id=self.identity.boot_id,
            nonce=secrets.token_hex(16),
            key=self._security.key,
            features=tuple(codec.feature for codec in CODECS),
        )
        try:
            stream, hello = await accept_handshake(
                sock, acceptor, self._security, timeout_s=self._options.connect_timeout_s
            )
            tune(sock, self._options, data=False)
            await self._join(hello, stream)
        except BaseException as error:
            sock.close()
            self.refused_connections += 1
            if isinstance(error, PrfaasError):
                self.last_refusal = error
            elif not isinstance(error, OSError):
                raise

    async def _join(self, hello: Hello, stream: Stream) -> None:
        peer = self._peers.get(hello.session)
        if hello.lane == 0:
            if peer is not None:
                raise IncompatibleError("the session has a control connection already")
            session = ReceivingSession(
                self._inbox.reservations,
                peer=hello.node,
                timers=self._timers,
                now=self._clock.now(),
                link_grace_s=self._link_grace_s,
                codecs=[codec for codec in CODECS if codec.feature in hello.features],
            )
            peer = self._peers[hello.session] = _Peer(self, session, hello)
            await peer.driver.attach(stream)
            return
        if peer is None or hello.lane in peer.lanes or len(peer.lanes) >= MAX_LANES:
            raise LinkError("a data connection without its session, or one too many", found=f"lane {hello.lane}")
        owner = peer
        lane = ReceiveLane(
            hello.lane, stream, peer.session, lock=self._lock, clock=self._clock, wake=peer.driver.wake,
            on_end=lambda lane, error: self._lane_ended(owner, lane, error),
        )  # fmt: skip
        peer.lanes[hello.lane] = lane
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
        peer.lanes.pop(lane.number, None)
        peer.driver.pump()

    # -- for the inbox ------------------------------------------------------------------------------------------

    def pump(self, session: ReceivingSession) -> None:
        for peer in tuple(self._peers.values()):
            if peer.session is session:
                peer.driver.pump()

    def shut_lanes(self, numbers: set[int]) -> None:
        for peer in self._peers.values():
            for number in numbers & peer.lanes.keys():
                peer.lanes[number].shutdown()

    def _event(self, peer: _Peer, event: Event) -> None:
        match event:
            case SessionLost():
                self._peers.pop(peer.hello.session, None)
                for lane in peer.lanes.values():
                    lane.shutdown()
            case TakenOver() | LaneGivenUp():
                for number in event.lanes if isinstance(event, TakenOver) else (event.lane,):
                    if number in peer.lanes:
                        peer.lanes[number].shutdown()
            case _:
                self._inbox.tell(event)
