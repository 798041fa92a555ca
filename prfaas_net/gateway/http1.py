"""HTTP/1.1 to nodes and engines: connections that stay open, and answers that are read as they come.

A gateway makes two calls for each request, and what a general client does for one (sessions, cookies, redirects,
tracing, tasks) costs more than everything else that the gateway does. This one knows what is needed here: one request
on a connection at a time, bodies of bytes, no redirects.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

__all__ = ["Http1Answer", "Http1Pool", "ResponseParser"]

# As aiohttp's client: a server that closes idle connections does so later than this.
IDLE_S = 15.0
MAX_IDLE = 1024
MAX_HEAD_BYTES = 64 << 10
# Size line of a chunk, with its extensions.
MAX_SIZE_LINE_BYTES = 4096
# The end of an answer comes a moment after what was of interest in it; a connection waits for it so long.
DRAIN_S = 1.0
# Of a body that nobody has read yet; then the other side has to wait.
HIGH_WATER_BYTES = 1 << 20
_NO_BODY = (204, 304)
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")


class ResponseParser:
    """Cuts what a server sends into one head and the bytes of its body, however it arrives.

    Attributes:
        begun: something has come.
        status: 0 until the head is complete.
        ended: the body is complete.
        keep_alive: whether the server takes another request on the connection after that.
    """

    def __init__(self) -> None:
        self.begun = False
        self.status = 0
        self.ended = False
        self.keep_alive = True
        self._held = b""
        # Of the body, or of the chunk, still to come; None: the body ends with the connection.
        self._left: int | None = 0
        self._chunked = False
        self._in_trailer = False

    def feed(self, data: bytes) -> list[bytes]:
        """The parts of the body in ``data``.

        Raises:
            ConnectionError: this is not HTTP.
        """
        self.begun = True
        if self._held:
            data, self._held = self._held + data, b""
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise ConnectionError("the head of an answer is too long")
                self._held = data
                return []
            self._read_head(data[:end])
            data = data[end + 4 :]
            if not self.status:  # 1xx: the real one follows
                return self.feed(data) if data else []
        if self._chunked:
            return self._chunks(data)
        return self._plain(data)

    def feed_eof(self) -> None:
        """The connection has ended.

        Raises:
            ConnectionError: in the middle of an answer.
        """
        if self.status and self._left is None:
            self.ended = True
        elif not self.ended:
            raise ConnectionResetError("the connection ended early")

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        code = rest[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or len(code) < 3:
            raise ConnectionError(f"this is not HTTP: {first[:60]!r}")
        length: int | None = None
        self.keep_alive = version == b"HTTP/1.1"
        for line in lines:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    if not value.strip().isdigit():
                        raise ConnectionError(f"a length that is none: {value[:60]!r}")
                    length = int(value)
                case b"transfer-encoding":
                    if value.strip().lower() != b"chunked":
                        raise ConnectionError(f"a transfer encoding that is not known: {value[:60]!r}")
                    self._chunked = True
                case b"connection":
                    self.keep_alive = b"close" not in value.lower() and self.keep_alive
        status = int(code)
        if status < 200:
            return
        self.status = status
        if status in _NO_BODY:
            self._chunked, length = False, 0
        self._left = 0 if self._chunked else length
        self.ended = not self._chunked and length == 0
        self.keep_alive = self.keep_alive and (self._chunked or length is not None)

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is not None:
            if len(data) > self._left:
                raise ConnectionError("an answer is longer than it says")
            self._left -= len(data)
            self.ended = not self._left
        return [data] if data else []

    def _chunks(self, data: bytes) -> list[bytes]:
        parts, at, size = [], 0, len(data)
        while at < size:
            if self.ended:
                raise ConnectionError("bytes follow the end of an answer")
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._left = None  # the line end behind the chunk
                continue
            end = data.find(b"\r\n", at)
            if end < 0 or (self._left is None and end != at):
                if end >= 0 or size - at > MAX_SIZE_LINE_BYTES or (self._left is None and size - at > 1):
                    raise ConnectionError("a chunk does not end where it should")
                self._held = data[at:]
                break
            self._line(data[at:end])
            at = end + 2
        return parts

    def _line(self, line: bytes) -> None:
        """The end of a chunk, the size of the next one, or a line of the trailer."""
        if self._in_trailer:
            self.ended = not line
        elif self._left is None:
            self._left = 0
        else:
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise ConnectionError(f"a chunk's size is none: {line[:60]!r}")
            self._left = int(size[1], 16)
            self._in_trailer = self._left == 0


class _Connection(asyncio.Protocol):
    """One connection; at most one request on it at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.parser = ResponseParser()
        self.parts: deque[bytes] = deque()
        self.n_bytes = 0
        self.idle_since_s = 0.0
        self.error: Exception | None = None
        self.gone = asyncio.get_running_loop().create_future()
        self._drained: Callable[[], None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self.transport is not None and self.error is None and not self.transport.is_closing()

    def send(self, request: bytes) -> None:
        """Begin a request; what follows belongs to its answer."""
        assert self.transport is not None
        self.parser = ResponseParser()
        self.transport.write(request)

    async def wait(self) -> None:
        """Until something has come, or the connection has ended."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """All of the body that has come."""
        data = self.parts.popleft() if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self.n_bytes = 0
        if self._paused and self.usable and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return data

    def drain(self, then: Callable[[], None]) -> None:
        """Drop what is left of the answer and call ``then`` at its end, or soon, if that does not come."""
        self._drained = then
        self._drain()
        if self._drained is not None:
            self._giving_up = asyncio.get_running_loop().call_later(DRAIN_S, self._end_drain)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _drain(self) -> None:
        if self.parts:
            self.take()
        if self.parser.ended or self.error is not None:
            self._end_drain()

    def _end_drain(self) -> None:
        then, self._drained = self._drained, None
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if then is not None:
            then()

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            parts = self.parser.feed(data)
        except ConnectionError as error:
            self.error = error
            self.abort()
        else:
            self.parts.extend(parts)
            self.n_bytes += sum(map(len, parts))
            if self.n_bytes > HIGH_WATER_BYTES and not self._paused and self.transport is not None:
                self._paused = True
                self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        try:
            self.parser.feed_eof()
        except ConnectionError as early:
            self.error = self.error or error or early
        self.transport = None
        self._wake()
        if not self.gone.done():
            self.gone.set_result(None)

    def _wake(self) -> None:
        if self._drained is not None:
            self._drain()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Http1Answer:
    """A status, and a body that is read as it comes. To be released or closed.

    Args:
        silence_s: reading gives up when nothing comes for so long.
    """

    def __init__(self, connection: _Connection, origin: _Origin, silence_s: float | None) -> None:
        self._connection = connection
        self._origin = origin
        self._silence_s = silence_s
        self._over = False

    @property
    def status(self) -> int:
        return self._connection.parser.status

    @property
    def at_eof(self) -> bool:
        """Whether the whole body has come and was read."""
        return self._connection.parser.ended and not self._connection.parts

    async def readany(self) -> bytes:
        """What has come of the body, at least one byte; nothing when all of it was read.

        Raises:
            OSError: the connection broke, or was silent for too long.
        """
        connection = self._connection
        while not connection.parts:
            if connection.parser.ended:
                return b""
            if connection.error is not None:
                raise connection.error
            if self._silence_s is None:
                await connection.wait()
            else:
                async with asyncio.timeout(self._silence_s):
                    await connection.wait()
        return connection.take()

    async def read(self, limit_bytes: int) -> bytes:
        """The body to its end, or its first so many bytes.

        Raises:
            OSError: the connection broke, or was silent for too long.
        """
        parts, size = [], 0
        while size < limit_bytes and (part := await self.readany()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)[:limit_bytes]

    def release(self) -> None:
        """Nothing that is still to come matters: the connection is used again as soon as the answer has ended."""
        if not self._over:
            self._over = True
            self._connection.drain(lambda: self._origin.give_back(self._connection))

    def close(self) -> None:
        """Break the connection: the other side sees that nobody listens."""
        if not self._over:
            self._over = True
            self._connection.abort()
            self._origin.busy.discard(self._connection)


@dataclass(eq=False)
class _Origin:
    """One server: where it is, and the connections to it."""

    host: str
    port: int
    host_header: str
    prefix: str
    tls: ssl.SSLContext | None
    idle: deque[_Connection] = field(default_factory=deque)
    busy: set[_Connection] = field(default_factory=set)

    def take_idle(self) -> _Connection | None:
        """The connection that was used last, if it is fresh enough."""
        while self.idle:
            connection = self.idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, timeout_s: float) -> _Connection:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self.host, self.port, ssl=self.tls
            )
        return connection

    def give_back(self, connection: _Connection) -> None:
        self.busy.discard(connection)
        parser = connection.parser
        if connection.usable and parser.ended and parser.keep_alive and len(self.idle) < MAX_IDLE:
            connection.idle_since_s = time.monotonic()
            self.idle.append(connection)
        else:
            connection.abort()


class Http1Pool:
    """Connections to any number of servers.

    Args:
        tls: for addresses that begin with ``https``; True: by the authorities that this host trusts.
    """

    def __init__(self, tls: ssl.SSLContext | bool = True) -> None:
        self._tls = tls
        self._origins: dict[str, _Origin] = {}

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        connect_timeout_s: float,
        silence_s: float | None = None,
    ) -> Http1Answer:
        """Send a request; the answer when its head has come.

        A connection that was idle and ends before anything has come is replaced by a new one, once: it had been closed
        by the server before the request got there.

        Raises:
            OSError: the server cannot be reached, or what it says is not HTTP.
        """
        origin = self._origins.get(base_url)
        if origin is None:
            origin = self._origins[base_url] = self._origin(base_url)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {origin.prefix}{path} HTTP/1.1\r\nHost: {origin.host_header}\r\n{lines}"
        if body is not None:
            head += f"Content-Length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + (body or b"")
        idle = origin.take_idle()
        if idle is not None and (answer := await self._ask(origin, idle, message, silence_s)) is not None:
            return answer
        answer = await self._ask(origin, await origin.connect(connect_timeout_s), message, silence_s, fresh=True)
        assert answer is not None
        return answer

    async def close(self) -> None:
        """Break every connection."""
        connections = [each for origin in self._origins.values() for each in (*origin.idle, *origin.busy)]
        self._origins.clear()
        for connection in connections:
            connection.abort()
        if connections:
            await asyncio.wait([connection.gone for connection in connections], timeout=1.0)

    @staticmethod
    async def _ask(
        origin: _Origin, connection: _Connection, message: bytes, silence_s: float | None, *, fresh: bool = False
    ) -> Http1Answer | None:
        """The answer; None if the connection turned out to be one that had ended."""
        origin.busy.add(connection)
        answer = Http1Answer(connection, origin, silence_s)
        try:
            connection.send(message)
            while not answer.status:
                if connection.error is not None:
                    if not fresh and not connection.parser.begun:
                        answer.close()
                        return None
                    raise connection.error
                if silence_s is None:
                    await connection.wait()
                else:
                    async with asyncio.timeout(silence_s):
                        await connection.wait()
        except BaseException:
            answer.close()
            raise
        return answer

    def _origin(self, base_url: str) -> _Origin:
        parts = urlsplit(base_url)
        secure = parts.scheme == "https"
        known = self._tls if isinstance(self._tls, ssl.SSLContext) else None
        tls = (known or ssl.create_default_context()) if secure else None
        port = parts.port or (443 if secure else 80)
        return _Origin(parts.hostname or "", port, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), tls)
