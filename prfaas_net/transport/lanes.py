"""Data connections: one blocking socket and one thread each.

This is the design that measured best from Python: the thread sits in ``sendmsg`` or ``recv_into``, which release
the GIL, so bulk never runs on the event loop and a chunk goes from the source's memory to the destination's without
a copy. A lane ends when its socket does; whoever wants it to end shuts the socket down.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from prfaas_net.clock import Clock
from prfaas_net.errors import PrfaasError
from prfaas_net.kv.chunks import MAX_CHUNK_BYTES, checksum
from prfaas_net.units import MiB
from prfaas_net.wire import HEADER_BYTES, Flags, Header, OutgoingTransfer, ReceivingSession, SendingSession

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

    def __init__(self, number: int, sock: socket.socket, on_end: Callable[[Lane, Exception | None], None]) -> None:
        sock.setblocking(True)
        self.number = number
        self.sock = sock
        self.n_bytes = 0
        self._on_end = on_end
        self._thread = threading.Thread(target=self._main, name=f"kv-lane-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shutdown(self) -> None:
        """Wake the thread out of any system call; it ends by itself."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
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
        sock: socket.socket,
        session: SendingSession,
        *,
        work: threading.Condition,
        views: Callable[[OutgoingTransfer, int], memoryview],
        clock: Clock,
        wake: Callable[[], None],
        on_end: Callable[[Lane, Exception | None], None],
    ) -> None:
        super().__init__(number, sock, on_end)
        self._session = session
        self._work = work
        self._views = views
        self._clock = clock
        self._wake = wake
        self.closing = False

    def _run(self) -> None:
        while True:
            with self._work:
                order = self._session.next_chunk(self.number, now=self._clock.now())
                while order is None:
                    if self.closing or self._session.error is not None:
                        return
                    if not self._work.wait(IDLE_CHECK_S) and self._closed_by_peer():
                        return
                    order = self._session.next_chunk(self.number, now=self._clock.now())
                view = self._views(order.transfer, order.chunk)
            known = order.checksum
            if known is None:
                known = checksum(view)
                with self._work:
                    self._session.hashed(order, known)
                self._wake()
            self._send(order.header(known), view)
            self.n_bytes += view.nbytes

    def _closed_by_peer(self) -> bool:
        """Nothing ever comes back on a data connection, so whatever can be read is its end."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _send(self, header: bytes, view: memoryview) -> None:
        sent = self.sock.sendmsg((header, view))
        if sent < HEADER_BYTES:
            self.sock.sendall(header[sent:])
            sent = HEADER_BYTES
        rest = view[sent - HEADER_BYTES :]
        if rest.nbytes:
            self.sock.sendall(rest)


class ReceiveLane(Lane):
    """Takes chunks straight into their destinations and verifies them there."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        session: ReceivingSession,
        *,
        lock: threading.Lock,
        clock: Clock,
        wake: Callable[[], None],
        on_end: Callable[[Lane, Exception | None], None],
    ) -> None:
        super().__init__(number, sock, on_end)
        self._session = session
        self._lock = lock
        self._clock = clock
        self._wake = wake
        self._unreported_bytes = 0
        self._woken_at = 0.0

    def _run(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        while self._receive(head):
            header = Header.unpack(head)
            with self._lock:
                landing = self._session.admit(header, self.number)
            if landing is None:
                self._drain(header.payload_bytes)
                continue
            try:
                whole = self._receive(landing.view)
            except OSError:
                whole = False
            if not whole:
                with self._lock:
                    self._session.aborted(landing)
                self._wake()
                return
            found = checksum(landing.view)
            with self._lock:
                self._session.landed(landing, found, now=self._clock.now())
            self._report(header)

    def _receive(self, view: memoryview) -> bool:
        """Fill the view; False if the peer closed before it was full."""
        while view.nbytes:
            n = self.sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if n == 0:
                return False
            self.n_bytes += n
            view = view[n:]
        return True

    def _drain(self, n_bytes: int) -> None:
        """Throw a payload away; MSG_TRUNC spares the copy on Linux TCP."""
        scrap = bytearray(min(n_bytes, MAX_CHUNK_BYTES))
        while n_bytes:
            n = self.sock.recv_into(scrap, min(n_bytes, len(scrap)), socket.MSG_WAITALL | socket.MSG_TRUNC)
            if n == 0:
                return
            n_bytes -= n

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
