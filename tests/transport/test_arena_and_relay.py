"""Memory that is given out and comes back; a link that is slower than the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time

import pytest

from prfaas_net.errors import BusyError, ConfigError, RefusedError
from prfaas_net.transport import Arena, ArenaBlock
from prfaas_net.transport.relay import Relay, Shape
from prfaas_net.units import MiB


def test_blocks_do_not_overlap_and_all_memory_comes_back() -> None:
    """Random reserving and releasing: no byte twice, everything free at the end, in one piece."""
    arena = Arena(2 * MiB)
    draw = random.Random(1)
    held: list[ArenaBlock] = []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held))).release()
        else:
            try:
                held.append(arena.reserve(draw.randrange(1, 200_000)))
            except BusyError:
                held.pop().release()
        spans = sorted((b.offset, b.offset + b.room_bytes) for b in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert arena.used_bytes == sum(b.room_bytes for b in held)
    for block in held:
        block.release()
        block.release()  # twice is harmless
    assert arena.used_bytes == 0
    arena.reserve(2 * MiB).release()


def test_too_much_is_busy_now_or_refused_for_ever() -> None:
    """Two different answers, for the two different things a caller can do."""
    arena = Arena(2 * MiB)
    block = arena.reserve(MiB + 1)
    with pytest.raises(BusyError):
        arena.reserve(MiB)
    with pytest.raises(RefusedError, match=r"kv\.arena"):
        arena.reserve(2 * MiB + 1)
    block.release()
    with pytest.raises(ConfigError):
        Arena(1 << 60)


async def _sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo the number of bytes received when the sender closes."""
    n = 0
    while data := await reader.read(65536):
        n += len(data)
    writer.write(str(n).encode())
    writer.close()


async def test_the_relay_delays_and_limits_and_loses_nothing() -> None:
    """Ten connections through one bottleneck: every byte arrives, no faster than the rate and the delay allow."""
    server = await asyncio.start_server(_sink, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname(), Shape(16_000_000, 0.02), Shape(None, 0.03))
    await relay.start("127.0.0.1", 0)
    started = time.monotonic()

    async def send(n_bytes: int) -> int:
        reader, writer = await asyncio.open_connection(*relay.address)
        writer.write(bytes(n_bytes))
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return int(answer)

    sizes = [40_000 + i for i in range(10)]
    assert await asyncio.gather(*(send(n) for n in sizes)) == sizes
    took_s = time.monotonic() - started
    assert took_s >= sum(sizes) * 8 / 16_000_000 + 0.05
    assert relay.forwarded_bytes == sum(sizes)
    await relay.close()
    server.close()


async def test_the_relay_drops_a_connection_whose_target_refuses() -> None:
    """What a client sees is what it would see without the relay: the connection ends."""
    relay = Relay(("127.0.0.1", 1), Shape(), Shape())
    await relay.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*relay.address)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await relay.close()
