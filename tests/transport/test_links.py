"""Transfers over real sockets and threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import (
    AuthError,
    CancelledByPeer,
    ConfigError,
    CorruptionError,
    DeadlineError,
    LinkError,
    PrfaasError,
    ProtocolError,
)
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, LinkPool, Security, SenderLink
from prfaas_net.transport.connections import SendingConnections
from prfaas_net.wire import FrameType, Header
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS, Connect, open_transfer, reserve
from tests.waiting import until
from tests.wire.pair import random_bytes

TABLE = ChunkTable.split(5_000_000, 300_000)
SOURCE = random_bytes(TABLE.total_bytes)


@pytest.mark.parametrize("connections", [1, 2, 4])
async def test_bytes_land_in_place(listener: KvListener, connect: Connect, connections: int) -> None:
    """With any number of connections the memory is equal when landed() returns, and the sender knows."""
    link = await connect(connections)
    incoming, memory = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    outgoing.ready_all()
    outgoing.seal({"first_token": 3})
    assert await incoming.sealed() == {"first_token": 3}
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)
    stats = await outgoing.wait()
    assert stats.acked_bytes == TABLE.total_bytes
    assert stats.lanes <= set(range(1, connections + 1))


async def test_chunks_leave_as_they_become_ready_from_any_thread(listener: KvListener, connect: Connect) -> None:
    """Layer-wise streaming: a chunk lands while later ones do not exist yet."""
    link = await connect()
    incoming, memory = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    await asyncio.to_thread(outgoing.ready, 0)
    await until(lambda: incoming.transfer.landed.count >= 1)
    assert np.array_equal(memory[:300_000], SOURCE[:300_000])
    assert not memory[300_000:].any()

    def rest() -> None:
        for chunk in range(1, len(TABLE)):
            outgoing.ready(chunk)
        outgoing.seal({})

    await asyncio.to_thread(rest)
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)


async def test_a_link_that_is_given_up_in_its_last_step_leaves_no_connection(
    listener: KvListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection has been dialled and its threads run when the caller leaves: all of them are closed."""
    made: list[SendingConnections] = []
    sockets: list[socket.socket] = []

    async def attach(connections: SendingConnections, control: Any) -> None:
        sockets.extend([control.sock, *(lane.stream.sock for lane in connections.lanes.values())])
        made.append(connections)
        await asyncio.Event().wait()

    monkeypatch.setattr(SendingConnections, "attach", attach)
    dialling = asyncio.create_task(
        SenderLink.connect([listener.address], identity=Identity("s"), options=LinkOptions(connections=3))
    )
    await until(lambda: made)
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    assert len(sockets) == 4
    await until(lambda: all(sock.fileno() == -1 for sock in sockets))


async def test_many_transfers_share_a_link(listener: KvListener, connect: Connect) -> None:
    """Fifty at once, each whole, each in its own memory."""
    link = await connect(3)
    table = ChunkTable.split(50_000, 7_000)
    sources = [random_bytes(table.total_bytes, seed) for seed in range(50)]
    pairs = [reserve(listener, table) for _ in sources]
    for source, (incoming, _) in zip(sources, pairs, strict=True):
        outgoing = open_transfer(link, incoming, source)
        outgoing.ready_all()
        outgoing.seal({})
    await asyncio.gather(*(incoming.landed() for incoming, _ in pairs))
    assert all(np.array_equal(memory, source) for source, (_, memory) in zip(sources, pairs, strict=True))


async def test_the_sender_cancels(listener: KvListener, connect: Connect) -> None:
    """The receiver learns the reason; abort() then leaves the memory alone."""
    link = await connect()
    incoming, memory = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    outgoing.ready(0)
    outgoing.abort(CancelledByPeer("the engine failed"))
    with pytest.raises(CancelledByPeer, match="the engine failed"):
        await incoming.landed()
    with pytest.raises(CancelledByPeer):
        await outgoing.wait()
    await incoming.abort()
    before = memory.copy()
    await asyncio.sleep(0.05)
    assert np.array_equal(memory, before)
    assert listener.reservations == 0
    assert link.alive


async def test_the_receiver_cancels_in_the_middle(listener: KvListener, connect: Connect) -> None:
    """After abort() nothing is written into the memory any more, and the link serves the next transfer."""
    link = await connect()
    table = ChunkTable.split(60_000_000, 1_000_000)
    source = random_bytes(table.total_bytes)
    incoming, memory = reserve(listener, table)
    outgoing = open_transfer(link, incoming, source)
    outgoing.ready_all()
    await until(lambda: incoming.transfer.landed.count >= 2)
    await incoming.abort(CancelledByPeer("the user left"))
    memory[:] = 0xAB
    with pytest.raises(CancelledByPeer, match="the user left"):
        await outgoing.wait()
    again, fresh = reserve(listener, TABLE)
    second = open_transfer(link, again, SOURCE)
    second.ready_all()
    second.seal({})
    await again.landed()
    assert np.array_equal(fresh, SOURCE)
    assert (memory == 0xAB).all()


async def test_a_dead_data_connection_costs_only_its_chunks(listener: KvListener, connect: Connect) -> None:
    """One of three lanes is cut in the middle; the transfer completes on the others."""
    link = await connect(3)
    table = ChunkTable.split(100_000_000, 1_000_000)
    source = random_bytes(table.total_bytes)
    incoming, memory = reserve(listener, table)
    outgoing = open_transfer(link, incoming, source)
    outgoing.ready_all()
    outgoing.seal({})
    await until(lambda: incoming.transfer.landed.count >= 3)
    next(iter(link._now.lanes.values())).shutdown()
    await incoming.landed()
    assert np.array_equal(memory, source)
    await outgoing.wait()
    assert link.alive


async def test_a_sender_that_vanishes_fails_the_transfer_at_once(listener: KvListener, connect: Connect) -> None:
    """Every connection cut: a typed error long before any timeout, memory free."""
    link = await connect()
    incoming, _ = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    outgoing.ready(0)
    transport = link._now.driver._transport
    assert transport is not None
    transport.abort()
    async with asyncio.timeout(1):
        with pytest.raises(LinkError):
            await incoming.landed()
        with pytest.raises(LinkError):
            await outgoing.wait()
    await incoming.abort()
    assert listener.reservations == 0


async def test_a_receiver_that_closes_tells_its_senders(listener: KvListener, connect: Connect) -> None:
    """close() on one side is a LinkError with a reason on the other."""
    link = await connect()
    incoming, _ = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    await asyncio.sleep(0.05)
    await listener.close()
    with pytest.raises(LinkError, match="shutting down"):
        await outgoing.wait()
    with pytest.raises(PrfaasError):
        await incoming.landed()
    assert not link.alive


async def test_a_black_hole_is_noticed_on_both_sides(listener: KvListener, connect: Connect) -> None:
    """No byte for dead_after_s ends the session, although every socket is still open."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(address=proxy.address)
        incoming, _ = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        await asyncio.sleep(0.1)
        proxy.freeze()
        for end in (incoming.landed(), outgoing.wait()):
            with pytest.raises(LinkError, match="nothing came from the peer for 2 s"):
                await end
        await incoming.abort()
        assert listener.reservations == 0


async def test_a_reset_fails_both_sides_at_once(listener: KvListener, connect: Connect) -> None:
    """RST on every connection in the middle of a transfer: typed errors within a second, memory free."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(address=proxy.address)
        incoming, _ = reserve(listener, TABLE)
        outgoing = open_transfer(link, incoming, SOURCE)
        outgoing.ready(0)
        await until(lambda: incoming.transfer.landed.count)
        proxy.reset()
        async with asyncio.timeout(1):
            for end in (incoming.landed(), outgoing.wait()):
                with pytest.raises(LinkError):
                    await end
        await incoming.abort()
        assert listener.reservations == 0


async def test_a_ticket_nobody_uses_ends_at_its_lifetime(listener: KvListener) -> None:
    """DeadlineError, and the reservation is gone."""
    incoming, _ = reserve(listener, TABLE, lifetime_s=0.1)
    with pytest.raises(DeadlineError):
        await incoming.sealed()
    await incoming.abort()
    assert listener.reservations == 0


async def test_wrong_keys_are_refused_and_right_ones_serve() -> None:
    """The dialer's error says what to set; nothing but loopback opens without a key."""
    server = KvListener(identity=Identity("d0"), security=Security(b"right key right key"), timers=TIMERS)
    await server.start("127.0.0.1", 0)
    try:
        for key in (None, b"wrong key wrong key"):
            with pytest.raises(AuthError, match=r"kv\.shared_key"):
                await SenderLink.connect(
                    [server.address], identity=Identity("p"), security=Security(key), options=LinkOptions(connections=1)
                )
        link = await SenderLink.connect(
            [server.address],
            identity=Identity("p"),
            security=Security(b"right key right key"),
            options=LinkOptions(connections=1),
        )
        await link.close()
    finally:
        await server.close()
    with pytest.raises(ConfigError, match="without authentication"):
        await KvListener(identity=Identity("d0")).start("0.0.0.0", 0)


async def test_unreachable_and_busy_addresses_are_named(listener: KvListener, connect: Connect) -> None:
    """Connection refused, port in use: one clear error each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LinkError, match=f"cannot reach 127.0.0.1:{port}"):
        await connect(address=("127.0.0.1", port))
    with pytest.raises(ConfigError, match="cannot listen"):
        await KvListener(identity=Identity("d1")).start(*listener.address)


async def test_a_port_that_is_not_a_kv_port_is_named(connect: Connect) -> None:
    """A server that never answers, and one that speaks something else."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)
        await writer.drain()
        writer.close()

    for handler, error in ((mute, LinkError), (http, ProtocolError)):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        try:
            with pytest.raises(error):
                await connect(address=server.sockets[0].getsockname())
        finally:
            server.close()


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\x00" * 200, Header(FrameType.HELLO, 0, 0, 2**63, 0, 0, 0).pack()],
    ids=["http", "zeros", "length-2^63"],
)
async def test_junk_on_the_port_is_refused_and_harms_nobody(
    listener: KvListener, connect: Connect, junk: bytes
) -> None:
    """The connection is closed within a bound and counted; an honest transfer beside it completes."""
    link = await connect()
    reader, writer = await asyncio.open_connection(*listener.address)
    writer.write(junk)
    async with asyncio.timeout(2):
        answer = await reader.read()
        assert b"error" in answer
    writer.close()
    await until(lambda: listener.refused_connections)
    incoming, memory = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, SOURCE)
    outgoing.ready_all()
    outgoing.seal({})
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)


async def test_bytes_that_change_after_hashing_are_not_delivered(listener: KvListener, connect: Connect) -> None:
    """A source that is overwritten under the sender is found out, on both sides, after a few attempts."""
    link = await connect(1)
    source = SOURCE.copy()
    incoming, _ = reserve(listener, TABLE)
    outgoing = open_transfer(link, incoming, source)
    for chunk in range(len(TABLE)):
        outgoing.ready(chunk) if chunk else link.ready(outgoing.transfer, 0, 12345)
    outgoing.seal({})
    for end in (outgoing.wait(), incoming.landed()):
        with pytest.raises(CorruptionError, match="came wrong 4 times"):
            await end
    assert link.alive


async def test_a_pool_dials_once_for_many_and_again_after_a_loss(listener: KvListener) -> None:
    """Single flight; a dead link is replaced; a ticket of another boot is stale."""
    pool = LinkPool(identity=Identity("p0"), security=Security(), options=LinkOptions(connections=1), timers=TIMERS)
    incoming, _ = reserve(listener, TABLE)
    try:
        links = await asyncio.gather(*(pool.get(incoming.ticket) for _ in range(16)))
        assert len(set(map(id, links))) == 1
        assert listener.connections == 2
        await links[0].close()
        again = await pool.get(incoming.ticket)
        assert again is not links[0]
        assert again.alive
        object.__setattr__(incoming.ticket, "boot_id", "another")
        with pytest.raises(LinkError, match="restarted"):
            await pool.get(incoming.ticket)
    finally:
        await pool.close()
        await incoming.abort()


async def test_a_dead_link_that_nobody_closes_leaves_no_task(listener: KvListener, connect: Connect) -> None:
    """A pool forgets links that died; whatever kept them up has to end by itself."""
    link = await connect(2)
    transport = link._now.driver._transport
    assert transport is not None
    transport.abort()
    await until(lambda: all(task.done() for task in link._tasks))
    assert not link.alive


async def test_close_leaves_no_thread_and_no_socket(listener: KvListener, connect: Connect) -> None:
    """Lanes and connections return to none."""

    def lanes() -> int:
        return sum(thread.name.startswith("kv-lane") for thread in threading.enumerate())

    for _ in range(3):
        link = await connect(4)
        assert lanes() >= 4
        await link.close()
    await until(lambda: not listener.connections and not lanes())


async def test_a_listener_waits_for_the_threads_of_peers_that_are_gone(listener: KvListener, connect: Connect) -> None:
    """A peer vanishes, and the thread of its connection is slow to end: closing gives that socket back too."""
    link = await connect(1)
    await until(lambda: listener._lanes)
    (lane,) = listener._lanes
    told = lane._on_end

    def slowly(*args: Any) -> None:
        ended.wait(5.0)
        told(*args)

    ended = threading.Event()
    lane._on_end = slowly
    await link.close()
    await until(lambda: not listener._peers)
    asyncio.get_running_loop().call_later(0.05, ended.set)
    await listener.close()
    assert lane.stream.sock.fileno() == -1
