"""A link shaper: a TCP relay in user space that adds delay and a rate limit.

It stands between two clusters on one machine, so that what crosses can be seen to cross something. All connections
of a direction share one bottleneck: a first-in first-out queue that drains at ``rate_bps``, followed by the
propagation delay. What exceeds the queue stays in the sender's socket, as with a real link.

It shapes bytes above TCP, so it makes no loss and no retransmissions; the netem laboratory is for those.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from dataclasses import dataclass

from prfaas_net.errors import ConfigError
from prfaas_net.units import KiB

__all__ = ["Relay", "Shape"]

# Pieces that a connection puts into the queue at a time: small, so that connections share the rate evenly.
PIECE_BYTES = 32 * KiB
RECEIVE_BYTES = 64 * KiB


@dataclass(frozen=True)
class Shape:
    """One direction of the link.

    Attributes:
        rate_bps: None is unlimited.
        delay_s: one-way propagation delay.
        queue_bytes: how much may wait for the bottleneck.
    """

    rate_bps: int | None = None
    delay_s: float = 0.0
    queue_bytes: int = 256 * KiB


class _Bottleneck:
    """One direction: when may the next bytes have passed?"""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.n_bytes = 0
        self._free_at = 0.0

    def pass_at(self, n_bytes: int, *, now: float) -> tuple[float, float]:
        """(when the bytes have left the queue, when they arrive at the other end)."""
        self.n_bytes += n_bytes
        start = max(now, self._free_at)
        rate = self.shape.rate_bps
        self._free_at = start if rate is None else start + n_bytes * 8 / rate
        return self._free_at, self._free_at + self.shape.delay_s

    def backlog_bytes(self, *, now: float) -> float:
        rate = self.shape.rate_bps
        return 0.0 if rate is None else max(0.0, self._free_at - now) * rate / 8


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: _Bottleneck) -> None:
    """Pieces in order through the bottleneck; deliver each when its time has come."""
    loop = asyncio.get_running_loop()
    under_way: deque[tuple[float, bytes]] = deque()
    arrived = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not under_way:
                arrived.clear()
                await arrived.wait()
            due, piece = under_way.popleft()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    try:
        piece = b"-"
        while piece and not delivering.done():
            try:
                piece = await reader.read(PIECE_BYTES)
            except ConnectionError:
                piece = b""
            _, due = line.pass_at(len(piece), now=loop.time())
            under_way.append((due, piece))
            arrived.set()
            excess = line.backlog_bytes(now=loop.time()) - line.shape.queue_bytes
            if excess > 0 and line.shape.rate_bps:
                await asyncio.sleep(excess * 8 / line.shape.rate_bps)
        await delivering
    except OSError:
        pass  # the far side is gone; the pair is closed by whoever runs it
    finally:
        delivering.cancel()


class Relay:
    """Listens and forwards each connection to the target through the shaped link.

    Args:
        target: where to forward.
        forward: from whoever connects to the target; ``backward``: the other way.
    """

    def __init__(self, target: tuple[str, int], forward: Shape, backward: Shape) -> None:
        self.target = target
        self.address: tuple[str, int] = ("", 0)
        self._forward = _Bottleneck(forward)
        self._backward = _Bottleneck(backward)
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()

    @property
    def forwarded_bytes(self) -> int:
        """Bytes that have gone towards the target."""
        return self._forward.n_bytes

    async def start(self, host: str, port: int) -> None:
        """
        Raises:
            ConfigError: the address is taken or not ours.
        """
        try:
            sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            # Accepted connections inherit it. The kernel would take in megabytes that a real link leaves at the sender.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            self._server = await asyncio.start_server(self._connected, sock=sock, limit=2 * PIECE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"port in use: cannot listen on {host}:{port}", found=error.strerror, do="choose another port"
            ) from error
        self.address = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for pair in self._pairs:
            pair.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = asyncio.create_task(self._pair(reader, writer))
        self._pairs.add(pair)
        pair.add_done_callback(self._pairs.discard)

    async def _pair(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5.0):
                far_reader, far_writer = await asyncio.open_connection(*self.target, limit=2 * PIECE_BYTES)
        except (OSError, TimeoutError):
            writer.transport.abort()  # what a client sees of a target that refuses
            return
        try:
            both = (_forward(reader, far_writer, self._forward), _forward(far_reader, writer, self._backward))
            await asyncio.gather(*both)
        finally:
            writer.transport.abort()
            far_writer.transport.abort()
