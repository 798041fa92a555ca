"""What broke other transfer stacks in the field: death, hangs and time (the rows of docs/field.md, part 1)."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import BusyError, DeadlineError, LinkError, PeerError, PrfaasError, RefusedError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Arena, Identity, KvListener, LinkOptions, LinkPool, Security, SenderLink
from prfaas_net.units import MiB
from prfaas_net.wire import Dialer, Hello, Timers
from tests.faults.ends import Ends, start_transfer
from tests.faults.processes import child
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS, Connect, reserve
from tests.waiting import until
from tests.wire.pair import cut, random_bytes

TABLE = ChunkTable.split(4_000_000, 100_000)
SMALL = ChunkTable.split(20_000, 5_000)
RESUMES = pytest.mark.parametrize("window_s", [3.0], ids=["resuming"])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.e2e
@pytest.mark.parametrize("landed", [0, 10, 20, 39], ids=["0%", "25%", "50%", "99%"])
async def test_field_01_a_sender_killed_at_any_point_frees_the_receiver(
    listener: KvListener, connect: Connect, landed: int
) -> None:
    """kill -9 of the prefill side: a typed error at once, everything returned, the next transfer works."""
    incoming, _ = reserve(listener, TABLE)
    spec: dict[str, Any] = {"ticket": incoming.ticket.to_json(), "chunk_bytes": 100_000, "seed": 0}
    async with child("sender_process", {**spec, "hold_after": landed}) as sender:
        assert await sender.line() == f"landed {landed}"
        await sender.kill()
        async with asyncio.timeout(1):
            with pytest.raises(LinkError):
                await incoming.landed()
    await incoming.abort()
    assert listener.reservations == 0
    ends = start_transfer(listener, await connect(), SMALL)
    ends.seal()
    await ends.delivered(within_s=3)


@pytest.mark.parametrize("stage", ["dialling", "opening", "waiting for the engine", "transferring", "sealing"])
async def test_field_02_one_deadline_bounds_every_stage(listener: KvListener, connect: Connect, stage: str) -> None:
    """Whatever stage hangs, both ends have an error when the ticket's time is up, not after the sum of timeouts."""
    lifetime_s = 0.6
    async with fault_proxy(listener.address) as proxy:
        started = asyncio.get_running_loop().time()
        if stage == "dialling":
            incoming, _ = reserve(listener, TABLE, lifetime_s=lifetime_s)
            proxy.freeze()
            dialling = asyncio.ensure_future(connect(address=proxy.address))
            with pytest.raises(DeadlineError):
                await incoming.landed()
            await incoming.abort()
            assert asyncio.get_running_loop().time() - started < lifetime_s + 1
            with pytest.raises(LinkError):
                await dialling
            return
        link = await connect(address=proxy.address)
        if stage == "opening":
            proxy.freeze()
        started = asyncio.get_running_loop().time()
        ends = start_transfer(listener, link, TABLE, lifetime_s=lifetime_s)
        if stage == "transferring":
            ends.seal()
            proxy.rate_bytes_per_s = 1_000_000
            await until(lambda: ends.landed)
            proxy.freeze()
        elif stage == "sealing":
            ends.outgoing.ready_all()
        error = await ends.finish(within_s=lifetime_s + 1)
        assert isinstance(error, DeadlineError)
        # The memory is free at most a second later: connections that are stuck in the middle of a chunk are shut down.
        assert asyncio.get_running_loop().time() - started < lifetime_s + 2


async def test_field_03_a_senders_failure_reaches_the_receiver_with_its_reason(
    listener: KvListener, connect: Connect
) -> None:
    """The engine fails on the prefill side: the decode side has the reason within a round trip, not after 300 s."""
    ends = start_transfer(listener, await connect(), TABLE)
    ends.outgoing.ready(0)
    await until(lambda: ends.landed)
    ends.outgoing.abort(PeerError("the engine ran out of memory", request="r1"))
    async with asyncio.timeout(0.5):
        with pytest.raises(PeerError, match=r"ran out of memory \(request r1\)"):
            await ends.incoming.landed()
    assert await ends.finish(within_s=1) is not None


@pytest.mark.parametrize("k", [1, 20, 39])
async def test_field_04_a_piece_that_cannot_be_sent_fails_the_whole(
    listener: KvListener, connect: Connect, k: int
) -> None:
    """After k of n pieces: an abort of the transfer, never a delivery of fewer."""
    ends = start_transfer(listener, await connect(), TABLE)
    for chunk in range(k):
        ends.outgoing.ready(chunk)
    await until(lambda: ends.landed == k)
    ends.outgoing.abort(PeerError("piece k could not be posted"))
    assert await ends.finish(within_s=1) is not None
    assert ends.incoming.transfer.landed.count == k
    assert ends.incoming.transfer.error is not None


async def test_field_04_a_source_that_is_gone_fails_the_transfer_at_once(
    listener: KvListener, connect: Connect
) -> None:
    """A view that was released under the sender is a typed error on both sides, and the link goes on."""
    link = await connect()
    ends = start_transfer(listener, link, TABLE)
    ends.outgoing.views[7].release()
    ends.seal()
    async with asyncio.timeout(2):
        with pytest.raises(PrfaasError, match="chunk 7"):
            await ends.outgoing.wait()
        with pytest.raises(PrfaasError):
            await ends.incoming.landed()
    await ends.incoming.abort()
    again = start_transfer(listener, link, SMALL)
    again.seal()
    await again.delivered(within_s=2)


async def test_field_05_data_that_does_not_move_is_noticed_while_control_does(listener: KvListener) -> None:
    """Pings get through and chunks do not: the watchdog looks at acknowledged bytes, not at TCP."""
    timers = Timers(ping_interval_s=0.1, dead_after_s=5.0, lane_stall_s=0.3, stall_after_s=1.0)
    options = LinkOptions(connections=2, connect_timeout_s=0.3, resume_window_s=0.0)
    async with fault_proxy(listener.address) as proxy:
        link = await SenderLink.connect([proxy.address], identity=Identity("p0"), options=options, timers=timers)
        ends = start_transfer(listener, link, TABLE)
        proxy.stall_new = True
        for wire in proxy.data_wires():
            wire.stall()
        ends.seal()
        error = await ends.finish(within_s=3)
        assert isinstance(error, LinkError)
        await link.close()


@pytest.mark.parametrize("change", ["cut", "flip"])
async def test_field_08_a_damaged_handshake_is_refused_cleanly(
    listener: KvListener, connect: Connect, change: str
) -> None:
    """Cut or flipped anywhere: the connection is closed, the listener serves on."""
    hello = Dialer(Hello("1" * 32, 0, "p9", "boot", "2" * 32), None).begin()
    places = range(0, len(hello), 9)
    for place in places:
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(
            hello[:place] if change == "cut" else hello[:place] + bytes([hello[place] ^ 0x10]) + hello[place + 1 :]
        )
        writer.write_eof()
        async with asyncio.timeout(2):
            try:
                await reader.read()
            except ConnectionError:
                pass
        writer.close()
    await until(lambda: listener.refused_connections == len(places))
    ends = start_transfer(listener, await connect(), SMALL)
    ends.seal()
    await ends.delivered(within_s=2)


@RESUMES
async def test_field_09_connections_killed_all_the_time_leave_nothing_behind(
    listener: KvListener, window_s: float
) -> None:
    """A reset every 50 ms during a hundred transfers: each is delivered; connections and descriptors stay as many."""
    options = LinkOptions(connections=2, connect_timeout_s=1.0, resume_window_s=window_s)
    async with fault_proxy(listener.address) as proxy:
        pool = LinkPool(identity=Identity("p0"), security=Security(), options=options, timers=TIMERS)

        async def transfer(seed: int) -> None:
            """Until one could be begun: an idle link that dies is dialled again by whoever needs it next."""
            source = random_bytes(SMALL.total_bytes, seed)
            memory = np.zeros(SMALL.total_bytes, dtype=np.uint8)
            async with asyncio.timeout(8):
                while True:
                    incoming = listener.reserve(SMALL, cut(memory, SMALL), lifetime_s=20, endpoints=[proxy.address])
                    try:
                        link = await pool.get(incoming.ticket)
                        outgoing = link.open(incoming.ticket, SMALL, cut(source, SMALL))
                        break
                    except PrfaasError:
                        await incoming.abort()
            ends = Ends(listener, incoming, outgoing, memory, source)
            ends.seal()
            await ends.delivered(within_s=8)

        async def kill() -> None:
            number = 0
            while True:
                await asyncio.sleep(0.05)
                if not proxy.data_wires():
                    continue  # a slow machine may not get through a handshake in 50 ms: let it
                number += 1
                if number % 4 == 0:
                    proxy.reset()
                else:
                    proxy.data_wires()[-1].reset()

        await transfer(0)
        before = open_files()
        killing = asyncio.create_task(kill())
        for seed in range(100):
            await transfer(seed)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await transfer(0)
        await until(lambda: listener.connections == 3 and len(pool.links) == 1, within_s=5)
        await until(lambda: open_files() <= before + 2, within_s=5)
        await pool.close()


async def test_field_10_many_that_find_the_peer_dead_reconnect_once(listener: KvListener) -> None:
    """Sixteen tasks at once: one dial, all proceed."""
    async with fault_proxy(listener.address) as proxy:
        options = LinkOptions(connections=1, resume_window_s=0.0)
        pool = LinkPool(identity=Identity("p0"), security=Security(), options=options, timers=TIMERS)
        incoming = listener.reserve(SMALL, _views(SMALL), lifetime_s=5, endpoints=[proxy.address])
        first = await pool.get(incoming.ticket)
        proxy.reset()
        await until(lambda: not first.alive)
        before = proxy.accepted
        links = await asyncio.gather(*(pool.get(incoming.ticket) for _ in range(16)))
        assert len(set(map(id, links))) == 1
        assert proxy.accepted == before + 2
        await pool.close()
        await incoming.abort()


async def test_field_11_transfers_do_not_cost_connections(listener: KvListener, connect: Connect) -> None:
    """A hundred and fifty transfers, one after the other, over one link's three connections: no port is used up."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        for seed in range(150):
            ends = start_transfer(listener, link, ChunkTable([500, 500]), seed=seed)
            ends.seal()
            await ends.outgoing.wait()
        assert proxy.accepted == 3
        assert listener.connections == 3


async def test_field_12_a_peer_that_restarts_often_leaves_one_link(listener: KvListener) -> None:
    """Ten restarts of the receiver on the same port: one live link at a time, no stale one is ever handed out."""
    options = LinkOptions(connections=2, connect_timeout_s=1.0, resume_window_s=0.0)
    pool = LinkPool(identity=Identity("p0"), security=Security(), options=options, timers=TIMERS)
    await listener.close()
    files = open_files()
    for boot in range(10):
        again = KvListener(identity=Identity("d0"), timers=TIMERS, link_grace_s=0.0)
        await again.start(*listener.address)
        incoming, _ = reserve(again, SMALL)
        link = await pool.get(incoming.ticket)
        assert link.peer_boot_id == again.identity.boot_id
        assert len(pool.links) == 1
        await incoming.abort()
        await again.close()
        await until(lambda link=link: not link.alive)  # type: ignore[misc]
        assert open_files() <= files + 10, boot
    await pool.close()


async def test_field_16_reservations_expire_on_a_timer_without_any_traffic(listener: KvListener) -> None:
    """Memory that nobody came for returns although nothing else ever happens on the listener."""
    waiting = [listener.reserve(SMALL, _views(SMALL), lifetime_s=0.2) for _ in range(50)]
    assert listener.reservations == 50
    await until(lambda: listener.reservations == 0, within_s=1)
    for incoming in waiting:
        with pytest.raises(DeadlineError):
            await incoming.landed()
        await incoming.abort()


async def test_field_17_nothing_blocks_the_event_loop(listener: KvListener, connect: Connect) -> None:
    """A task that wants to run every millisecond does so while a transfer is frozen, aborted and closed."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []

    async def tick() -> None:
        last = loop.time()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(loop.time() - last)
            last = loop.time()

    ticking = asyncio.create_task(tick())
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        proxy.freeze()
        ends.seal()
        await asyncio.sleep(0.5)
        await ends.incoming.abort()
        ends.outgoing.abort(PeerError("enough"))
        await link.close()
    ticking.cancel()
    # A call that blocks would show as its whole timeout; what is left is this machine's own jitter.
    assert max(gaps) < 0.25
    assert sorted(gaps)[int(len(gaps) * 0.9)] < 0.02


async def test_field_18_a_late_receiver_costs_the_sender_no_memory_and_no_deadlock(
    listener: KvListener, connect: Connect
) -> None:
    """Two nodes that send to each other while both ways are frozen: buffers stay small, both deliver afterwards."""
    other = KvListener(identity=Identity("d1"), timers=TIMERS, link_grace_s=0.0)
    await other.start("127.0.0.1", 0)
    table = ChunkTable.split(30_000_000, 1_000_000)
    async with fault_proxy(listener.address) as there, fault_proxy(other.address) as back:
        both = [
            start_transfer(listener, await connect(2, address=there.address), table, seed=1),
            start_transfer(other, await connect(2, address=back.address), table, seed=2),
        ]
        there.freeze()
        back.freeze()
        before = resident_bytes()
        for ends in both:
            ends.seal()
        await asyncio.sleep(0.8)
        assert resident_bytes() - before < 24 * MiB
        there.thaw()
        back.thaw()
        for ends in both:
            await ends.delivered(within_s=8)
    await other.close()


async def test_field_19_what_does_not_fit_is_refused_at_admission_and_two_that_do_not_fit_together_both_finish(
    listener: KvListener, connect: Connect
) -> None:
    """Memory is promised whole before a byte is sent, so no transfer can wait for another's in the middle."""
    arena = Arena(4 * MiB)
    with pytest.raises(RefusedError):
        arena.reserve(5 * MiB)
    link = await connect()
    table = ChunkTable.split(3 * MiB, 256 * 1024)

    async def one(seed: int) -> None:
        while True:
            try:
                block = arena.reserve(table.total_bytes)
                break
            except BusyError:
                await asyncio.sleep(0.005)
        views = [block.view[o : o + n] for o, n in zip(table.offsets, table.lengths, strict=True)]
        incoming = listener.reserve(table, views, lifetime_s=5)
        source = memoryview(random_bytes(table.total_bytes, seed).tobytes())
        outgoing = link.open(
            incoming.ticket, table, [source[o : o + n] for o, n in zip(table.offsets, table.lengths, strict=True)]
        )
        outgoing.ready_all()
        outgoing.seal({})
        await incoming.landed()
        assert block.view == source
        block.release()

    async with asyncio.timeout(5):
        await asyncio.gather(one(1), one(2), one(3))
    assert arena.used_bytes == 0


def _views(table: ChunkTable) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in table.lengths]
