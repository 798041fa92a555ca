"""What every link promises, whatever carries its bytes: memory, TCP, TCP inside TLS would all pass here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import AuthError, CancelledByPeer, DeadlineError, LinkError, PrfaasError, UsageError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, Incoming, KvListener, LinkOptions, Outgoing, SenderLink
from prfaas_net.transport.memory import MemoryLink, MemoryListener
from tests.transport.conftest import TIMERS
from tests.wire.pair import cut, random_bytes

TABLE = ChunkTable.split(1_000_003, 100_000)
SOURCE = random_bytes(TABLE.total_bytes)


@dataclass
class Ends:
    """A listener and a link to it, of some kind."""

    listener: Any
    link: Any

    def reserve(self, table: ChunkTable = TABLE, *, lifetime_s: float = 20.0) -> tuple[Incoming, np.ndarray]:
        memory = np.zeros(table.total_bytes, dtype=np.uint8)
        incoming: Incoming = self.listener.reserve(table, cut(memory, table), lifetime_s=lifetime_s)
        return incoming, memory

    def open(self, incoming: Incoming, source: np.ndarray = SOURCE) -> Outgoing:
        table = incoming.transfer.table
        outgoing: Outgoing = self.link.open(incoming.ticket, table, cut(source, table))
        return outgoing


@pytest.fixture(params=["memory", "tcp"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    listener: Any
    link: Any
    if request.param == "memory":
        listener = MemoryListener(identity=Identity("d0"), timers=TIMERS)
        await listener.start()
        link = await MemoryLink.connect(listener, identity=Identity("p0"))
    else:
        listener = KvListener(identity=Identity("d0"), timers=TIMERS, link_grace_s=0.0)
        await listener.start("127.0.0.1", 0)
        options = LinkOptions(connections=2, resume_window_s=0.0)
        link = await SenderLink.connect([listener.address], identity=Identity("p0"), options=options, timers=TIMERS)
    yield Ends(listener, link)
    await link.close()
    await listener.close()
    assert listener.reservations == 0
    assert listener.connections == 0


async def test_bytes_land_whole(ends: Ends) -> None:
    """When landed() returns the memory is equal; the sender learns of it; the seal's body arrives."""
    incoming, memory = ends.reserve()
    outgoing = ends.open(incoming)
    outgoing.ready_all()
    outgoing.seal({"first_token": 3})
    assert await incoming.sealed() == {"first_token": 3}
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)
    stats = await outgoing.wait()
    assert stats.acked_bytes == TABLE.total_bytes
    assert stats.first_sent_s is not None
    assert stats.done_s is not None


async def test_chunks_may_become_ready_late_and_out_of_order(ends: Ends) -> None:
    """From another thread, in any order, before and after the receiver has agreed."""
    incoming, memory = ends.reserve()
    outgoing = ends.open(incoming)

    def produce() -> None:
        for chunk in reversed(range(len(TABLE))):
            outgoing.ready(chunk)
        outgoing.seal({})

    await asyncio.to_thread(produce)
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)


async def test_transfers_are_independent(ends: Ends) -> None:
    """Twenty at once, one of them cancelled: nineteen land."""
    table = ChunkTable.split(30_000, 4_000)
    sources = [random_bytes(table.total_bytes, seed) for seed in range(20)]
    pairs = [ends.reserve(table) for _ in sources]
    for index, (source, (incoming, _)) in enumerate(zip(sources, pairs, strict=True)):
        outgoing = ends.open(incoming, source)
        if index == 7:
            outgoing.abort(CancelledByPeer("not this one"))
            continue
        outgoing.ready_all()
        outgoing.seal({})
    results = await asyncio.gather(*(incoming.landed() for incoming, _ in pairs), return_exceptions=True)
    assert [index for index, result in enumerate(results) if result is not None] == [7]
    for index, (source, (_, memory)) in enumerate(zip(sources, pairs, strict=True)):
        assert np.array_equal(memory, source) is (index != 7)
    await pairs[7][0].abort()


async def test_either_side_may_cancel(ends: Ends) -> None:
    """The other learns the reason; abort() twice, or after the end, is harmless."""
    for by_sender in (True, False):
        incoming, _ = ends.reserve()
        outgoing = ends.open(incoming)
        outgoing.ready(0)
        why = CancelledByPeer(f"sender {by_sender}")
        if by_sender:
            outgoing.abort(why)
        else:
            await incoming.abort(why)
        for end in (incoming.landed(), outgoing.wait()):
            with pytest.raises(CancelledByPeer, match=f"sender {by_sender}"):
                await end
        outgoing.abort(why)
        await incoming.abort()
        await incoming.abort()
    assert ends.link.alive


async def test_nothing_is_written_after_abort(ends: Ends) -> None:
    """The memory is the receiver's own again when abort() returns."""
    incoming, memory = ends.reserve()
    outgoing = ends.open(incoming)
    outgoing.ready_all()
    await incoming.abort()
    memory[:] = 0xAB
    with pytest.raises(PrfaasError):
        await outgoing.wait()
    assert (memory == 0xAB).all()


async def test_a_lifetime_ends_a_transfer_on_both_sides(ends: Ends) -> None:
    """Whether or not anybody came with the ticket."""
    lonely, _ = ends.reserve(lifetime_s=0.1)
    incoming, _ = ends.reserve(lifetime_s=0.2)
    outgoing = ends.open(incoming)
    outgoing.ready(0)
    for end in (lonely.sealed(), incoming.landed(), outgoing.wait()):
        with pytest.raises(DeadlineError):
            await end
    for transfer in (lonely, incoming):
        await transfer.abort()


async def test_a_ticket_of_somebody_else_is_refused(ends: Ends) -> None:
    """AuthError, and the link lives."""
    other = MemoryListener(identity=Identity("other"))
    foreign = Ends(other, ends.link).reserve()[0]
    refused = ends.open(foreign)
    with pytest.raises(AuthError):
        await refused.wait()
    assert ends.link.alive


async def test_misuse_is_told(ends: Ends) -> None:
    """Sealing early, readying twice: UsageError, and nothing is lost by it."""
    incoming, memory = ends.reserve()
    outgoing = ends.open(incoming)
    with pytest.raises(UsageError):
        outgoing.seal({})
    outgoing.ready(0)
    with pytest.raises(UsageError):
        outgoing.ready(0)
    for chunk in range(1, len(TABLE)):
        outgoing.ready(chunk)
    outgoing.seal({})
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)


async def test_closing_either_end_fails_what_is_under_way_and_refuses_what_comes(ends: Ends) -> None:
    """With a reason, at once."""
    incoming, _ = ends.reserve()
    outgoing = ends.open(incoming)
    outgoing.ready(0)
    await asyncio.sleep(0.02)
    await ends.link.close("enough")
    for end in (outgoing.wait(), incoming.landed()):
        with pytest.raises(LinkError, match="enough"):
            await end
    await incoming.abort()
    late, _ = ends.reserve()
    with pytest.raises(LinkError):
        ends.open(late)
    await late.abort()
