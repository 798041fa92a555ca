"""The shell around one session: its control connection, its timer, its lock.

Everything but bulk runs on the event loop. Threads (lanes, an engine that declares chunks ready) take the lock,
call the session and, when there is something for the loop to do, :meth:`SessionDriver.wake` it.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable

from prfaas_net.clock import Clock
from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.transport.streams import Stream
from prfaas_net.units import MiB
from prfaas_net.wire import Event, Session

__all__ = ["SessionDriver"]

# What may wait for a peer that does not read. An honest one reads at once, and the largest acknowledgement is 128 KiB.
MAX_UNSENT_BYTES = 16 * MiB
# How long the last words of a session may take to be read.
PARTING_S = 1.0


class _Control(asyncio.Protocol):
    def __init__(self, driver: SessionDriver) -> None:
        self._driver = driver

    def data_received(self, data: bytes) -> None:
        self._driver._control_bytes(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._driver._control_lost(exc)


class SessionDriver:
    """Drives a session until it is over.

    Args:
        lock: guards the session; several sessions may share one.
        on_event: called on the loop, outside the lock, for each event of the session.
        on_pump: called on the loop, inside the lock, whenever the session may have changed.
    """

    def __init__(
        self,
        session: Session,
        *,
        clock: Clock,
        lock: threading.Lock,
        on_event: Callable[[Event], None],
        on_pump: Callable[[], None] | None = None,
    ) -> None:
        self.session = session
        self.lock = lock
        self._clock = clock
        self._on_event = on_event
        self._on_pump = on_pump
        self.loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._closed = asyncio.Event()

    async def attach(self, stream: Stream) -> None:
        """Take over the control connection."""
        self._stream = stream
        transport, _ = await self.loop.create_connection(lambda: _Control(self), sock=stream.sock)
        self._transport = transport
        self._control_bytes(b"")  # what TLS holds already: it came with the last record of the handshake

    def wake(self) -> None:
        """Have the loop pump soon; from any thread. Cheap when it was woken already."""
        if self._woken:
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self.pump)
        except RuntimeError:
            pass  # the loop is closed; whoever closed it has ended the session before

    def pump(self) -> None:
        """Write what the session has to say, tell its events, arm its timer. On the loop."""
        self._woken = False
        with self.lock:
            now = self._clock.now()
            # Before the control connection is there, what is said waits for it.
            output = [] if self._transport is None else self.session.take_output(now=now)
            events = self.session.take_events()
            deadline = self.session.next_deadline()
            over = self.session.error is not None
            if self._on_pump is not None:
                self._on_pump()
        if self._transport is not None and self._stream is not None and output:
            self._transport.write(self._stream.encode(b"".join(output)))
            if not over and self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.lost(LinkError("the peer does not read what it is told", found=f"{MAX_UNSENT_BYTES} bytes wait"))
        self._arm(deadline)
        for event in events:
            self._on_event(event)
        if over and self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self.loop.call_later(PARTING_S, self._transport.abort)

    def lost(self, error: PrfaasError) -> None:
        """The connections are gone. On the loop."""
        with self.lock:
            self.session.lost(error, now=self._clock.now())
        self.pump()

    async def close(self, reason: str, *, timeout_s: float) -> None:
        """End the session, telling the peer, and wait until the control connection is closed."""
        with self.lock:
            self.session.fail(LinkError(reason), now=self._clock.now())
        self.pump()
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            self._transport.abort()

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self.loop.call_later(max(0.0, deadline - self._clock.now()), self._timeout)

    def _timeout(self) -> None:
        self._timer = None
        with self.lock:
            self.session.handle_timeout(now=self._clock.now())
        self.pump()

    def _control_bytes(self, data: bytes) -> None:
        assert self._stream is not None
        try:
            plain = self._stream.decode(data)
        except ssl.SSLError as error:
            self.lost(LinkError("the TLS session of the control connection broke", found=str(error)))
            return
        with self.lock:
            self.session.receive(plain, now=self._clock.now())
        self.pump()

    def _control_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self.lost(LinkError("the control connection was closed", found=str(exc) if exc else "end of stream"))
