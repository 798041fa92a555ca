"""A link that dies and comes back: only what had not landed goes again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import KvListener
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import Connect, open_transfer, reserve
from tests.waiting import until
from tests.wire.pair import random_bytes

TABLE = ChunkTable.split(20_000_000, 250_000)
SOURCE = random_bytes(TABLE.total_bytes)


@pytest.fixture
def window_s() -> float:
    return 3.0


@pytest.mark.parametrize("resets", [1, 3])
async def test_a_transfer_goes_on_after_every_connection_was_reset(
    listener: KvListener, connect: Connect, resets: int
) -> None:
    """RST on everything, several times, while chunks are still being made: lands whole, nothing is sent twice."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(3, address=proxy.address)
        incoming, memory = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        parts = np.array_split(np.arange(len(TABLE)), resets + 1)
        for part in parts[:-1]:
            for chunk in part.tolist():
                outgoing.ready(chunk)
            wanted = int(part[-1]) + 1
            await until(lambda wanted=wanted: outgoing.transfer.acked.count >= wanted)  # type: ignore[misc]
            old = link._now
            proxy.reset()
            await until(lambda old=old: old.session.error)  # type: ignore[misc]
        for chunk in parts[-1].tolist():
            outgoing.ready(chunk)
        outgoing.seal({"first_token": 5})
        assert await incoming.sealed() == {"first_token": 5}
        await incoming.landed()
        stats = await outgoing.wait()
    assert np.array_equal(memory, SOURCE)
    # Everything that was sent had been acknowledged before each reset.
    assert stats.resent_chunks == 0
    assert link.connections == 3


async def test_a_short_black_hole_is_survived(listener: KvListener, connect: Connect) -> None:
    """Longer than dead_after_s without a byte, then the path is back: the transfer completes."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        incoming, memory = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        outgoing.ready(0)
        await until(lambda: incoming.transfer.landed.count)
        proxy.freeze()
        await until(lambda: not link.alive)
        proxy.reset()
        proxy.thaw()
        for chunk in range(1, len(TABLE)):
            outgoing.ready(chunk)
        outgoing.seal({})
        await incoming.landed()
        await outgoing.wait()
    assert np.array_equal(memory, SOURCE)


async def test_a_lost_data_connection_is_replaced(listener: KvListener, connect: Connect) -> None:
    """One of three is cut: the transfer does not notice, and soon there are three again."""
    link = await connect(3)
    next(iter(link._now.lanes.values())).shutdown()
    await until(lambda: link.connections == 2)
    await until(lambda: link.connections == 3)
    incoming, memory = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    outgoing.ready_all()
    outgoing.seal({})
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)


async def test_a_receiver_that_is_gone_is_not_dialled_for_ever(listener: KvListener, connect: Connect) -> None:
    """After the window both sides have a LinkError that says what happened, and the reservation is gone."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        incoming, _ = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        outgoing.ready(0)
        await until(lambda: incoming.transfer.landed.count)
    async with asyncio.timeout(5):
        with pytest.raises(LinkError, match="cannot reach"):
            await outgoing.wait()
        with pytest.raises(LinkError, match="did not come back"):
            await incoming.landed()
    await incoming.abort()
    assert listener.reservations == 0


async def test_a_receiver_that_closes_is_final(listener: KvListener, connect: Connect) -> None:
    """close() tells the sender, which does not try again."""
    link = await connect(2)
    incoming, _ = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    await asyncio.sleep(0.05)
    await listener.close()
    async with asyncio.timeout(1):
        with pytest.raises(LinkError, match="shutting down"):
            await outgoing.wait()
    with pytest.raises(PrfaasError):
        await incoming.landed()


async def test_abort_while_the_link_is_away_ends_the_transfer(listener: KvListener, connect: Connect) -> None:
    """The user gets the answer at once; the receiver when it hears, or after the grace."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        incoming, _ = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        await until(lambda: incoming._opened.done())
    await until(lambda: not link.alive)
    outgoing.abort(LinkError("no patience"))
    async with asyncio.timeout(1):
        with pytest.raises(LinkError, match="no patience"):
            await outgoing.wait()
    await incoming.abort()
