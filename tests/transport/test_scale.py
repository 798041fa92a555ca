"""Large, many and long: one piece beyond 4 GiB, a thousand transfers at once, a day of uptime."""

from __future__ import annotations

import asyncio
import mmap
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import CancelledByPeer
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import KvListener
from prfaas_net.units import MiB
from prfaas_net.wire.states import Rx, Tx
from tests.transport.conftest import Connect, open_transfer, reserve
from tests.wire.pair import Pair, random_bytes

GiB = 1024 * MiB


async def _send_large(listener: KvListener, connect: Connect, total_bytes: int, chunk_bytes: int) -> None:
    """Every chunk is read from one place and lands in one place: the size is the wire's, not this machine's."""
    table = ChunkTable.split(total_bytes, chunk_bytes)
    source = memoryview(mmap.mmap(-1, chunk_bytes))
    source[:] = random_bytes(chunk_bytes).tobytes()
    landing = memoryview(bytearray(chunk_bytes))
    link = await connect(1)  # one connection: two would write into the one place at the same time
    incoming = listener.reserve(table, [landing[:length] for length in table.lengths], lifetime_s=50)
    outgoing = link.open(incoming.ticket, table, [source[:length] for length in table.lengths], lifetime_s=50)
    outgoing.ready_all()
    outgoing.seal({})
    await incoming.landed()
    stats = await outgoing.wait()
    assert stats.acked_bytes == total_bytes
    assert incoming.transfer.landed_bytes == total_bytes
    last = table.lengths[-1]
    assert landing[:last] == source[:last]


async def test_more_than_4_gib_in_one_piece(listener: KvListener, connect: Connect) -> None:
    """Offsets beyond 32 bits, on the wire and in both tables: delivered, every chunk verified."""
    asyncio.get_running_loop().set_debug(False)
    await _send_large(listener, connect, 4 * GiB + 12_345, 16 * MiB)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_more_than_16_gib_in_one_piece(listener: KvListener, connect: Connect) -> None:
    """The same with sixteen thousand chunks of a mebibyte."""
    asyncio.get_running_loop().set_debug(False)
    await _send_large(listener, connect, 16 * GiB + 1, MiB)


async def test_a_thousand_small_transfers_at_once(listener: KvListener, connect: Connect) -> None:
    """All opened before any is ready, all over one link: each lands whole, in its own memory."""
    link = await connect(3)
    table = ChunkTable([700, 300, 500])
    sources = [random_bytes(table.total_bytes, seed) for seed in range(1000)]
    pairs = [reserve(listener, table) for _ in sources]
    opened = [open_transfer(link, incoming, source) for source, (incoming, _) in zip(sources, pairs, strict=True)]
    assert listener.reservations == 1000
    for outgoing in opened:
        outgoing.ready_all()
        outgoing.seal({})
    async with asyncio.timeout(20):
        await asyncio.gather(*(incoming.landed() for incoming, _ in pairs))
        await asyncio.gather(*(outgoing.wait() for outgoing in opened))
    assert all(np.array_equal(memory, source) for source, (_, memory) in zip(sources, pairs, strict=True))
    assert listener.reservations == 0
    assert not link._outgoing
    assert not listener._inbox._incoming


def _sizes(thing: Any, name: str = "", depth: int = 0) -> dict[str, int]:
    """The length of every container that an object of ours holds, by path."""
    found: dict[str, int] = {}
    members = {**getattr(thing, "__dict__", {})}
    for cls in type(thing).__mro__:
        members |= {slot: getattr(thing, slot) for slot in getattr(cls, "__slots__", ()) if hasattr(thing, slot)}
    for key, value in members.items():
        if isinstance(value, (dict, list, set, bytearray)) or type(value).__name__ == "deque":
            found[f"{name}.{key}"] = len(value)
        elif depth < 3 and type(value).__module__.startswith("prfaas_net"):
            found |= _sizes(value, f"{name}.{key}", depth + 1)
    return found


@pytest.mark.parametrize("aborts", [False, True], ids=["delivered", "some-aborted"])
def test_a_day_of_uptime_holds_no_more_than_an_hour(aborts: bool) -> None:
    """Two sessions under virtual time, a transfer every half minute, idle pings between them, now and then a lane
    lost: after 24 hours no container of either end is longer than it was after one."""
    pair = Pair()
    table = ChunkTable([100, 1, 300])
    source = random_bytes(table.total_bytes)
    after_an_hour: dict[str, int] = {}
    for minute in range(24 * 60):
        for half in range(2):
            incoming, memory = pair.reserve(table, lifetime_s=20)
            outgoing = pair.open(incoming, source, lifetime_s=20)
            pair.make_ready(outgoing)
            pair.exchange_control()
            if aborts and minute % 3 == 0 and half:
                pair.receiver.abort(incoming, CancelledByPeer("the user left"))
                pair.exchange_control()
            else:
                lane = minute + 2  # a lane that is replaced gets a number never used before
                if minute % 5 == 0 and (order := pair.pull(lane)) is not None:
                    pair.sender.lane_lost(lane)
                    assert order.transfer is outgoing
                pair.sender.seal(outgoing, {}, now=pair.now)
                pair.run()
                assert (incoming.state, outgoing.state) == (Rx.COMPLETE, Tx.DONE)
                assert np.array_equal(memory, source)
            pair.sources.clear()
            pair.sender_events.clear()
            pair.receiver_events.clear()
            pair.advance(30.0)
            pair.reservations.expire(now=pair.now)
        if minute == 59:
            after_an_hour = _both(pair)
    assert pair.sender.error is None
    assert pair.receiver.error is None
    grown = {name: size for name, size in _both(pair).items() if size > after_an_hour.get(name, 0)}
    assert not grown


def _both(pair: Pair) -> dict[str, int]:
    return _sizes(pair.sender, "sender") | _sizes(pair.receiver, "receiver") | _sizes(pair.reservations, "reservations")
