"""A TCP proxy that misbehaves when told to: the faults of a path and of the middle-boxes on it.

Connections are numbered in the order in which they came: with one link, 0 is the control connection and the rest
are its data connections (until one is replaced). "Upstream" is from whoever dialled towards the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

__all__ = ["FaultProxy", "Wire", "fault_proxy"]


class Wire:
    """One connection through the proxy.

    Attributes:
        upstream_bytes: what has come from the dialler, and has been forwarded or is held back.
        seen: the first upstream bytes as they stood on the wire.
    """

    def __init__(self, number: int, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.number = number
        self.near = near
        self.far = far
        self.upstream_bytes = 0
        self.seen = bytearray()
        self.flows = asyncio.Event()
        self.flows.set()
        # Its own bandwidth, instead of the proxy's.
        self.rate_bytes_per_s: int | None = None
        # Upstream byte to flip, counted from the start of the connection.
        self.flip_at: int | None = None
        # Upstream byte after which the connection is cut.
        self.cut_at: int | None = None

    def stall(self) -> None:
        """This connection alone becomes a black hole."""
        self.flows.clear()

    def reset(self) -> None:
        """Both ends get RST."""
        for writer in (self.near, self.far):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def pass_upstream(self, data: bytes) -> tuple[bytes, bool]:
        """What is left of these bytes, and whether the connection goes on."""
        start, self.upstream_bytes = self.upstream_bytes, self.upstream_bytes + len(data)
        if self.flip_at is not None and start <= self.flip_at < self.upstream_bytes:
            place = self.flip_at - start
            data = data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
        if self.cut_at is not None and self.upstream_bytes >= self.cut_at:
            return data[: max(0, self.cut_at - start)], False
        return data, True


class FaultProxy:
    """Forwards every connection to the target until told otherwise.

    Attributes:
        piece_bytes: forward in pieces of so many bytes, each its own segment; None leaves them as they come.
        rate_bytes_per_s: bandwidth of each direction of each connection; None is unlimited.
        close_after_s: how long after one side's end the other is told.
        stall_new: connections that come from now on are black holes.
        record_bytes: how many upstream bytes of each connection to keep in ``Wire.seen``.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.address: tuple[str, int] = ("", 0)
        self.wires: list[Wire] = []
        self.piece_bytes: int | None = None
        self.rate_bytes_per_s: int | None = None
        self.close_after_s = 0.0
        self.stall_new = False
        self.record_bytes = 0
        self.accepted = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- faults -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """A black hole: sockets stay open, no byte gets through."""
        self._flows.clear()

    def thaw(self) -> None:
        """The path is back; what was held goes on."""
        self._flows.set()

    def reset(self) -> None:
        """Every connection ends with RST."""
        for wire in tuple(self.wires):
            wire.reset()

    def data_wires(self) -> list[Wire]:
        """Open connections but the first: the data connections of a single link."""
        return [wire for wire in self.wires if wire.number]

    @contextlib.asynccontextmanager
    async def blinking(self, *, on_s: float, off_s: float) -> AsyncIterator[None]:
        """For the time of the block the path carries for ``on_s``, then is dead for ``off_s``, again and again."""

        async def blink() -> None:
            while True:
                await asyncio.sleep(on_s)
                self.freeze()
                await asyncio.sleep(off_s)
                self.thaw()

        task = asyncio.create_task(blink())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.thaw()

    # -- forwarding ---------------------------------------------------------------------------------------------

    async def _pair(self, sock: socket.socket) -> None:
        reader, near = await asyncio.open_connection(sock=sock)
        try:
            far_reader, far = await asyncio.open_connection(*self.target)
        except BaseException as error:
            near.transport.abort()
            if not isinstance(error, OSError):
                raise
            return
        for writer in (near, far):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(self.accepted, near, far)
        if self.stall_new:
            wire.stall()
        self.accepted += 1
        self.wires.append(wire)
        try:
            await asyncio.gather(
                self._copy(wire, reader, far, upstream=True), self._copy(wire, far_reader, near, upstream=False)
            )
        finally:
            self.wires.remove(wire)
            near.transport.abort()
            far.transport.abort()

    async def _copy(
        self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upstream: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(self._read_bytes(wire)):
                await self._flows.wait()
                await wire.flows.wait()
                goes_on = True
                if upstream:
                    wire.seen += data[: max(0, self.record_bytes - len(wire.seen))]
                    data, goes_on = wire.pass_upstream(data)
                await self._forward(data, writer, wire.rate_bytes_per_s or self.rate_bytes_per_s)
                if not goes_on:
                    wire.near.transport.abort()
                    wire.far.transport.abort()
                    return
            await asyncio.sleep(self.close_after_s)
            writer.write_eof()

    def _read_bytes(self, wire: Wire) -> int:
        """At a low rate, no more at a time than a twentieth of a second carries."""
        rate = wire.rate_bytes_per_s or self.rate_bytes_per_s
        return 65536 if rate is None else max(1, min(65536, rate // 20))

    async def _forward(self, data: bytes, writer: asyncio.StreamWriter, rate: int | None) -> None:
        size = self.piece_bytes or len(data) or 1
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        if rate is not None:
            await asyncio.sleep(len(data) / rate)

    # -- life ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        # Neither asyncio.start_server nor sock_accept: both can lose a socket when they are stopped at that moment.
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        task = asyncio.create_task(self._pair(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step has no other way to give the socket back.
        task.add_done_callback(lambda _: sock.close())

    async def start(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        # Shallow, so that a slow path is felt at once and does not hide behind megabytes of buffers.
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
        self._listening.setblocking(False)
        self.address = self._listening.getsockname()
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Refuse new connections and cut the open ones."""
        if self._listening.fileno() >= 0:  # not closed before
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def fault_proxy(target: tuple[str, int]) -> AsyncIterator[FaultProxy]:
    """A proxy in front of ``target`` for the time of the block."""
    proxy = FaultProxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
