"""Data connections: one blocking socket and one thread each.

This is the design that measured best from Python: the thread sits in ``sendmsg`` or ``recv_into``, which release
the GIL, so bulk never runs on the event loop and a chunk goes from the source's memory to the destination's without
a copy. A lane ends when its socket does; whoever wants it to end shuts the socket down.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable

from prfaas_net.clock import Clock
from prfaas_net.congestion.coding import CodingGovernor
from prfaas_net.errors import CorruptionError, PrfaasError, UsageError
from prfaas_net.kv.chunks import checksum
from prfaas_net.kv.codecs import Codec, Coder
from prfaas_net.transport.streams import Stream
from prfaas_net.units import MiB
from prfaas_net.wire import (
    HEADER_BYTES,
    Flags,
    Header,
    Landing,
    OutgoingTransfer,
    ReceivingSession,
    SendingSession,
    SendOrder,
)

__all__ = ["Lane", "ReceiveLane", "SendLane", "batch_bytes", "join_lanes"]

# The event loop is woken when the session has news, when so much has landed, when so long has passed since it was last
# woken, or when the sender says that nothing follows: each wake-up costs 50 us, and one a chunk costs a fifth of the
# throughput.
WAKE_BYTES = 8 * MiB
WAKE_AFTER_S = 0.004
# Chunks travel together: what one costs besides its bytes is system calls, Python's work and the hand-over of the GIL.
# A batch is bounded in time too: an urgent transfer waits for the one under way, and whatever a slow connection has
# pulled no other can take from it. 4 MiB fill 2 ms at 17 Gbps; more gains nothing.
BATCH_BYTES = 4 * MiB
BATCH_S = 0.002
BATCH_CHUNKS = 64
MORE, FOLLOWS = int(Flags.MORE), int(Flags.FOLLOWS)
# How often an idle sending connection looks whether its peer has closed it. (The loop cannot watch the socket: uvloop
# makes every descriptor that it watches non-blocking.)
IDLE_CHECK_S = 0.25


def batch_bytes(rate: float | None, last_bytes: int) -> float:
    """How much is worth one system call on a connection that takes so many bytes a second; None: not known yet. A
    chunk is never cut: a batch is as many as it takes to get there, and at least one.

    Args:
        last_bytes: the batch before. The next one is at most twice that: what the first ones are measured to take is
            the speed of a socket's empty buffer, whatever the path behind it.
    """
    return 0.0 if rate is None else min(BATCH_BYTES, rate * BATCH_S, 2 * last_bytes)


class Lane:
    """One data connection."""

    def __init__(self, number: int, stream: Stream, on_end: Callable[[Lane, Exception | None], None]) -> None:
        stream.sock.setblocking(True)
        self.number = number
        self.stream = stream
        self._coder = Coder()
        self._on_end = on_end
        self._thread = threading.Thread(target=self._main, name=f"kv-lane-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give the descriptor back; after the thread has ended."""
        self.stream.sock.close()

    def shutdown(self) -> None:
        """Wake the thread out of any system call; it ends by itself."""
        try:
            self.stream.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it did not end in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        error: Exception | None = None
        try:
            self._run()
        except (OSError, PrfaasError) as caught:
            error = caught
        finally:
            self.shutdown()
            self._on_end(self, error)

    def _run(self) -> None:
        raise NotImplementedError


async def join_lanes(lanes: Iterable[Lane], timeout_s: float) -> None:
    """Wait for the threads of lanes that were shut down, and give their descriptors back at once: what an ended
    thread leaves to the loop is lost if the loop ends first."""

    async def join(lane: Lane) -> None:
        if await asyncio.to_thread(lane.join, timeout_s):
            lane.close()

    await asyncio.gather(*(join(lane) for lane in tuple(lanes)))


class SendLane(Lane):
    """Pulls chunks and sends them."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        session: SendingSession,
        *,
        work: threading.Condition,
        views: Callable[[OutgoingTransfer, int], memoryview],
        clock: Clock,
        wake: Callable[[], None],
        on_end: Callable[[Lane, Exception | None], None],
    ) -> None:
        super().__init__(number, stream, on_end)
        self._session = session
        self._work = work
        self._views = views
        self._clock = clock
        self._wake = wake
        self._governor = CodingGovernor()
        self._last_bytes = 0
        self.closing = False

    def _run(self) -> None:
        while (pulled := self._pull()) is not None:
            orders, views = pulled
            try:
                self._send(orders, self._checksums(orders, views), views)
            except ValueError as error:
                # Python's word for a view that was released. What was already written of the frames is unknown.
                raise self._give_up(orders, views, error) from error

    def _give_up(self, orders: list[SendOrder], views: list[memoryview], error: ValueError) -> PrfaasError:
        """A transfer's own user broke it: no connection can carry the chunk."""
        broken = UsageError("the source of a chunk is gone", found=str(error))
        for order, view in zip(orders, views, strict=True):
            try:
                _ = view.nbytes
            except ValueError:
                broken = UsageError(
                    f"the source of chunk {order.chunk} is gone", do="keep the views until the transfer has ended",
                    transfer=order.transfer.transfer_id,
                )  # fmt: skip
                with self._work:
                    self._session.abort(order.transfer, broken, now=self._clock.now())
        self._wake()
        return broken

    def _pull(self) -> tuple[list[SendOrder], list[memoryview]] | None:
        """The next chunk, and as many behind it as are worth one system call; None: it is time to end."""
        with self._work:
            order = self._next_order()
            while order is None:
                if self._stopping() or (not self._work.wait(IDLE_CHECK_S) and self._closed_by_peer()):
                    return None
                order = self._next_order()
            orders, n_bytes, enough = [order], order.n_bytes, batch_bytes(self._governor.send_rate, self._last_bytes)
            # (Whether encoding pays is learnt from one send to the next, so there each chunk goes alone.)
            while order.more and not order.transfer.codec and n_bytes < enough and len(orders) < BATCH_CHUNKS:
                order = self._next_order()
                if order is None:
                    break
                orders.append(order)
                n_bytes += order.n_bytes
            self._last_bytes = n_bytes
            # Under the same lock: the views are let go of when their transfer ends.
            return orders, [self._views(order.transfer, order.chunk) for order in orders]

    def _checksums(self, orders: list[SendOrder], views: list[memoryview]) -> list[int]:
        """Of every chunk; those that were not known are reported."""
        known = [o.checksum if o.checksum is not None else checksum(v) for o, v in zip(orders, views, strict=True)]
        if any(order.checksum is None for order in orders):
            with self._work:
                sealed = [self._session.hashed(o, k) for o, k in zip(orders, known, strict=True) if o.checksum is None]
            if any(sealed):
                self._wake()
        return known

    def _send(self, orders: list[SendOrder], known: list[int], views: list[memoryview]) -> None:
        """Frames in one system call, each encoded if that is sooner."""
        parts: list[bytes | memoryview] = []
        n_bytes = 0
        for index, (order, digest, view) in enumerate(zip(orders, known, views, strict=True), 1):
            codec, payload = self._encode(order, view)
            follows = index < len(orders)
            parts.append(order.header(digest, codec=codec, payload_bytes=payload.nbytes, follows=follows))
            parts.append(payload)
            n_bytes += payload.nbytes
        started = time.perf_counter()
        self.stream.send_frames(parts)
        self._governor.sent(n_bytes, time.perf_counter() - started)

    def _encode(self, order: SendOrder, view: memoryview) -> tuple[Codec, memoryview]:
        wanted = Codec(order.transfer.codec) if order.transfer.codec else Codec.RAW
        if wanted is Codec.RAW or not self._governor.wants(backlog=order.more):
            return Codec.RAW, view
        started = time.perf_counter()
        encoded = memoryview(self._coder.encode(wanted, view))
        self._governor.encoded(view.nbytes, encoded.nbytes, time.perf_counter() - started)
        if encoded.nbytes >= view.nbytes:
            return Codec.RAW, view
        return wanted, encoded

    def _stopping(self) -> bool:
        return self.closing or self._session.error is not None

    def _next_order(self) -> SendOrder | None:
        return None if self._stopping() else self._session.next_chunk(self.number, now=self._clock.now())

    def _closed_by_peer(self) -> bool:
        """Nothing ever comes back on a data connection, so whatever can be read is its end."""
        try:
            self.stream.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True


class ReceiveLane(Lane):
    """Takes chunks straight into their destinations and verifies them there."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        session: ReceivingSession,
        *,
        lock: threading.Lock,
        clock: Clock,
        wake: Callable[[], None],
        on_end: Callable[[Lane, Exception | None], None],
    ) -> None:
        super().__init__(number, stream, on_end)
        self._session = session
        self._lock = lock
        self._clock = clock
        self._wake = wake
        self._unreported_bytes = 0
        self._woken_at = 0.0
        self._news = False

    def _run(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        have_head = False
        while have_head or self.stream.receive_into(head):
            header = Header.unpack(head)
            have_head = bool(header.flags & FOLLOWS)
            with self._lock:
                landing = self._session.admit(header, self.number)
            whole = self._drain(header) if landing is None else self._land(header, landing, head)
            if not whole:
                return
            if landing is None or header.codec != Codec.RAW:
                have_head = False  # only a raw payload is read together with the next header
            self._report(header)

    def _drain(self, header: Header) -> bool:
        """Nobody wants the payload, or it is a probe's."""
        self._wake()
        if not self.stream.drain(header.payload_bytes):
            return False
        with self._lock:
            self._session.drained(header, now=self._clock.now())
            self._news = self._session.has_news
        return True

    def _land(self, header: Header, landing: Landing, head: memoryview) -> bool:
        """The payload into its place, verified there; and the next header, if it comes right behind."""
        try:
            whole = self._receive_payload(header, landing.view, head)
        except OSError:
            whole = False
        if not whole:
            with self._lock:
                self._session.aborted(landing)
            self._wake()
            return False
        found = checksum(landing.view)
        with self._lock:
            self._session.landed(landing, found, now=self._clock.now())
            # The sender calls the chunk that it pulled last the last one; on several connections another one may be.
            self._news = self._session.has_news
        return True

    def _receive_payload(self, header: Header, view: memoryview, head: memoryview) -> bool:
        """Straight into place, or through a scratch buffer if it is encoded; False if the peer closed."""
        if header.codec == Codec.RAW:
            if header.flags & FOLLOWS:
                return self.stream.receive_both(view, head)
            return self.stream.receive_into(view)
        scratch = memoryview(bytearray(header.payload_bytes))
        if not self.stream.receive_into(scratch):
            return False
        try:
            self._coder.decode_into(Codec(header.codec), scratch, view)
        except CorruptionError:
            pass  # what is in the view now has another checksum, and the chunk is asked for again
        return True

    def _report(self, header: Header) -> None:
        self._unreported_bytes += header.payload_bytes
        now = self._clock.now()
        soon = self._news or not header.flags & MORE
        if soon or self._unreported_bytes >= WAKE_BYTES or now - self._woken_at >= WAKE_AFTER_S:
            self._unreported_bytes = 0
            self._woken_at = now
            self._wake()
