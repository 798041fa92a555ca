"""What broke other transfer stacks in the field: torn data, stale reads, use after free (docs/field.md, part 2)."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from prfaas_net.errors import AuthError, CancelledByPeer, DeadlineError, PrfaasError, UsageError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener
from tests.faults.ends import Ends, start_transfer
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS, Connect, open_transfer, reserve
from tests.waiting import until
from tests.wire.pair import cut, random_bytes

TABLE = ChunkTable.split(6_000_000, 200_000)
SMALL = ChunkTable.split(20_000, 5_000)


async def test_field_20_what_is_reported_sent_is_in_its_place(listener: KvListener, connect: Connect) -> None:
    """The moment wait() returns the destination is compared: two hundred random sizes, none torn."""
    draw = random.Random(20)
    link = await connect(2)
    for seed in range(200):
        table = ChunkTable([draw.randint(1, 40_000) for _ in range(draw.randint(1, 8))])
        ends = start_transfer(listener, link, table, seed=seed)
        ends.seal()
        await ends.outgoing.wait()
        assert np.array_equal(ends.memory, ends.source)


async def test_field_20_a_rejection_at_the_receiver_reaches_the_sender(listener: KvListener, connect: Connect) -> None:
    """A ticket whose reservation is gone is an error of the transfer that presents it, never a silent success."""
    link = await connect()
    incoming, memory = reserve(listener, SMALL)
    ticket = incoming.ticket
    await incoming.abort()
    source = random_bytes(SMALL.total_bytes)
    outgoing = link.open(ticket, SMALL, cut(source, SMALL))
    outgoing.ready_all()
    outgoing.seal({})
    with pytest.raises(PrfaasError):
        await outgoing.wait()
    assert not memory.any()
    assert link.alive


@pytest.mark.parametrize("kind", ["used", "expired", "aborted", "of another boot"])
async def test_field_21_a_stale_reference_never_returns_data(listener: KvListener, connect: Connect, kind: str) -> None:
    """Each stale ticket is an error at its sender, and not a byte of memory changes."""
    link = await connect()
    incoming, memory = reserve(listener, SMALL, lifetime_s=0.1 if kind == "expired" else 5.0)
    ticket = incoming.ticket
    if kind == "used":
        first = open_transfer(link, incoming, random_bytes(SMALL.total_bytes, 1))
        first.ready_all()
        first.seal({})
        await incoming.landed()
    elif kind == "expired":
        with pytest.raises(DeadlineError):
            await incoming.landed()
    if kind != "used":
        await incoming.abort()
    if kind == "of another boot":
        other = KvListener(identity=Identity("d1"), timers=TIMERS, link_grace_s=0.0)
        await other.start("127.0.0.1", 0)
        foreign, memory = reserve(other, SMALL)
        ticket = foreign.ticket
        await other.close()
    memory[:] = 0xAB
    again = link.open(ticket, SMALL, cut(random_bytes(SMALL.total_bytes, 2), SMALL))
    again.ready_all()
    again.seal({})
    async with asyncio.timeout(2):
        with pytest.raises(PrfaasError) as caught:
            await again.wait()
    if kind in ("used", "of another boot"):
        assert isinstance(caught.value, AuthError)
    assert (memory == 0xAB).all()


@pytest.mark.parametrize("by", ["sender", "receiver"])
@pytest.mark.parametrize("stage", ["reserved", "opened", "in the middle", "all but the seal"])
async def test_field_24_an_abort_at_any_stage_frees_both_sides(
    listener: KvListener, connect: Connect, stage: str, by: str
) -> None:
    """Neither side holds anything afterwards, and the link serves the next transfer."""
    link = await connect()
    if stage == "reserved":
        incoming, _ = reserve(listener, TABLE)
        await incoming.abort(CancelledByPeer("the user left"))
        assert listener.reservations == 0
        return
    ends = start_transfer(listener, link, TABLE)
    if stage == "opened":
        await until(lambda: ends.incoming._opened.done())
    elif stage == "in the middle":
        ends.outgoing.ready_all()
        await until(lambda: ends.landed > 3)
    else:
        ends.outgoing.ready_all()
        await until(lambda: ends.landed == len(TABLE))
    error = CancelledByPeer("the user left")
    if by == "sender":
        ends.outgoing.abort(error)
    else:
        await ends.incoming.abort(error)
    found = await ends.finish(within_s=2)
    assert isinstance(found, CancelledByPeer)
    assert not link._now.session.transfers
    again = start_transfer(listener, link, SMALL)
    again.seal()
    await again.delivered(within_s=2)


async def test_field_25_what_comes_late_for_an_aborted_transfer_is_consumed(
    listener: KvListener, connect: Connect
) -> None:
    """Chunks under way when the receiver gave up are read and dropped; nothing waits for them, nothing leaks."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 20_000_000
        link = await connect(2, address=proxy.address)
        for _ in range(3):
            ends = start_transfer(listener, link, TABLE)
            ends.seal()
            await until(lambda ends=ends: ends.landed > 1)  # type: ignore[misc]
            await ends.incoming.abort()
            assert await ends.finish(within_s=2) is not None
        proxy.rate_bytes_per_s = None
        again = start_transfer(listener, link, SMALL)
        again.seal()
        await again.delivered(within_s=4)
        assert link.alive
        assert listener.reservations == 0


async def test_field_26_memory_that_is_reused_after_an_abort_is_never_written_by_the_old_transfer(
    listener: KvListener, connect: Connect
) -> None:
    """Cancel in the middle, hand the same memory to another transfer at once: only the new bytes are ever seen."""
    link = await connect(3)
    memory = np.zeros(TABLE.total_bytes, dtype=np.uint8)
    for seed in range(8):
        old = listener.reserve(TABLE, cut(memory, TABLE), lifetime_s=5)
        first = open_transfer(link, old, random_bytes(TABLE.total_bytes, 100 + seed))
        first.ready_all()
        await until(lambda old=old: old.transfer.landed.count > 2)  # type: ignore[misc]
        await old.abort()
        source = random_bytes(TABLE.total_bytes, seed)
        new = listener.reserve(TABLE, cut(memory, TABLE), lifetime_s=5)
        second = open_transfer(link, new, source)
        second.ready_all()
        second.seal({})
        await new.landed()
        assert np.array_equal(memory, source)
        await asyncio.sleep(0.01)
        assert np.array_equal(memory, source)


async def test_field_27_a_source_cannot_be_taken_away_while_it_is_being_sent(
    listener: KvListener, connect: Connect
) -> None:
    """Views pin their buffer: resizing it is a BufferError until the transfer has ended."""
    link = await connect()
    buffer = bytearray(random_bytes(SMALL.total_bytes).tobytes())
    incoming, memory = reserve(listener, SMALL)
    flat = memoryview(buffer)
    views = [flat[o : o + n] for o, n in zip(SMALL.offsets, SMALL.lengths, strict=True)]
    outgoing = link.open(incoming.ticket, SMALL, views)
    outgoing.ready_all()
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    outgoing.seal({})
    await outgoing.wait()
    assert memory.tobytes() == bytes(buffer)


async def test_field_28_a_timeout_waits_for_whoever_still_writes(listener: KvListener, connect: Connect) -> None:
    """The deadline passes in the middle of a chunk: abort() returns only when no connection is in the memory."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE, lifetime_s=0.4)
        ends.seal()
        proxy.rate_bytes_per_s = 400_000
        with pytest.raises(PrfaasError):
            await ends.incoming.landed()
        await ends.incoming.abort()
        assert not ends.incoming.transfer.landing
        ends.memory[:] = 0xAB
        proxy.rate_bytes_per_s = None
        await asyncio.sleep(0.2)
        assert (ends.memory == 0xAB).all()
        with pytest.raises(PrfaasError):
            await ends.outgoing.wait()


async def test_field_31_a_transfer_is_known_by_its_ticket_and_nothing_else(
    listener: KvListener, connect: Connect
) -> None:
    """The same request id on both sides, or another one, makes no difference: each ticket has its own random id."""
    link = await connect()
    both: list[Ends] = []
    for seed in (1, 2):
        memory = np.zeros(SMALL.total_bytes, dtype=np.uint8)
        incoming = listener.reserve(SMALL, cut(memory, SMALL), lifetime_s=5, manifest={"request_id": "the same"})
        source = random_bytes(SMALL.total_bytes, seed)
        both.append(Ends(listener, incoming, open_transfer(link, incoming, source), memory, source))
    assert both[0].incoming.transfer.transfer_id != both[1].incoming.transfer.transfer_id
    for ends in both:
        ends.seal()
    for ends in both:
        await ends.outgoing.wait()
        assert np.array_equal(ends.memory, ends.source)


@pytest.mark.parametrize("lengths", [[5_000] * 3, [5_000] * 5, [5_000, 5_000, 4_999, 5_001]])
async def test_field_32_a_sender_with_another_set_of_pieces_is_refused_before_it_sends(
    listener: KvListener, connect: Connect, lengths: list[int]
) -> None:
    """One piece missing, one too many, one of another size: UsageError at open, since the ticket names the table."""
    link = await connect()
    incoming, memory = reserve(listener, SMALL)
    table = ChunkTable(lengths)
    with pytest.raises(UsageError, match="another chunk table"):
        link.open(incoming.ticket, table, cut(random_bytes(table.total_bytes), table))
    await incoming.abort()
    assert not memory.any()
