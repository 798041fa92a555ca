"""Data connections: one blocking socket and one thread each.

This is the design that measured best from Python: the thread sits in ``sendmsg`` or ``recv_into``, which release
the GIL, so bulk never runs on the event loop and a chunk goes from the source's memory to the destination's without
a copy. A lane ends when its socket does; whoever wants it to end shuts the socket down.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from prfaas_net.clock import Clock
from prfaas_net.congestion.coding import CodingGovernor
from prfaas_net.errors import CorruptionError, PrfaasError
from prfaas_net.kv.chunks import checksum
from prfaas_net.kv.codecs import Codec, Coder
from prfaas_net.transport.streams import Stream
from prfaas_net.units import MiB
from prfaas_net.wire import HEADER_BYTES, Flags, Header, OutgoingTransfer, ReceivingSession, SendingSession, SendOrder

__all__ = ["Lane", "ReceiveLane", "SendLane"]

# The event loop is woken when so much has landed, when so long has passed since it was last woken, or when the sender
# says that nothing follows: each wake-up costs 50 us, and one a chunk costs a fifth of the throughput.
WAKE_BYTES = 8 * MiB
WAKE_AFTER_S = 0.004
# How often an idle sending connection looks whether its peer has closed it. (The loop cannot watch the socket: uvloop
# makes every descriptor that it watches non-blocking.)
IDLE_CHECK_S = 0.25


class Lane:
    """One data connection."""

    def __init__(self, number: int, stream: Stream, on_end: Callable[[Lane, Exception | None], None]) -> None:
        stream.sock.setblocking(True)
        self.number = number
        self.stream = stream
        self.n_bytes = 0
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
        self.encoded_chunks = 0
        self.closing = False

    def _run(self) -> None:
        while True:
            with self._work:
                order = self._next_order()
                while order is None:
                    if self._stopping() or (not self._work.wait(IDLE_CHECK_S) and self._closed_by_peer()):
                        return
                    order = self._next_order()
                view = self._views(order.transfer, order.chunk)
            known = order.checksum
            if known is None:
                known = checksum(view)
                with self._work:
                    self._session.hashed(order, known)
                self._wake()
            self._send(order, known, view)

    def _send(self, order: SendOrder, known: int, view: memoryview) -> None:
        """One frame, encoded if that is sooner."""
        codec, payload = Codec.RAW, view
        wanted = Codec(order.transfer.codec)
        if wanted is not Codec.RAW and self._governor.wants(backlog=order.more):
            started = time.perf_counter()
            encoded = memoryview(self._coder.encode(wanted, view))
            self._governor.encoded(view.nbytes, encoded.nbytes, time.perf_counter() - started)
            if encoded.nbytes < view.nbytes:
                codec, payload = wanted, encoded
                self.encoded_chunks += 1
        started = time.perf_counter()
        self.stream.send_frame(order.header(known, codec=codec, payload_bytes=payload.nbytes), payload)
        self._governor.sent(payload.nbytes, time.perf_counter() - started)
        self.n_bytes += payload.nbytes

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

    def _run(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        while self.stream.receive_into(head):
            header = Header.unpack(head)
            with self._lock:
                landing = self._session.admit(header, self.number)
            if landing is None:
                self._wake()
                if not self.stream.drain(header.payload_bytes):
                    return
                self.n_bytes += header.payload_bytes
                with self._lock:
                    self._session.drained(header, now=self._clock.now())
                self._report(header)
                continue
            try:
                whole = self._receive_payload(header, landing.view)
            except OSError:
                whole = False
            if not whole:
                with self._lock:
                    self._session.aborted(landing)
                self._wake()
                return
            self.n_bytes += header.payload_bytes
            found = checksum(landing.view)
            with self._lock:
                self._session.landed(landing, found, now=self._clock.now())
            self._report(header)

    def _receive_payload(self, header: Header, view: memoryview) -> bool:
        """Straight into place, or through a scratch buffer if it is encoded; False if the peer closed."""
        if header.codec == Codec.RAW:
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
        if (
            not header.flags & Flags.MORE
            or self._unreported_bytes >= WAKE_BYTES
            or now - self._woken_at >= WAKE_AFTER_S
        ):
            self._unreported_bytes = 0
            self._woken_at = now
            self._wake()
