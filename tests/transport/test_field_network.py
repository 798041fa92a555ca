"""What broke other transfer stacks in the field: addresses, cards, ports, throughput (docs/field.md, part 4)."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
from pathlib import Path

import pytest

from prfaas_net.errors import CancelledByPeer, LinkError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, SenderLink
from prfaas_net.transport.options import tune
from prfaas_net.transport.relay import Relay, Shape
from prfaas_net.units import MiB
from tests.faults.ends import start_transfer
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS, Connect
from tests.waiting import until

SMALL = ChunkTable.split(20_000, 5_000)


async def test_field_46_data_connections_that_do_not_get_through_are_an_error_in_time(listener: KvListener) -> None:
    """Control answers and data is swallowed: a typed error within connect_timeout_s, at dialling, never a hang."""
    async with fault_proxy(listener.address) as proxy:
        options = LinkOptions(connections=2, connect_timeout_s=0.4)

        async def swallow() -> None:
            await until(lambda: proxy.accepted == 1)
            proxy.stall_new = True

        swallowing = asyncio.create_task(swallow())
        async with asyncio.timeout(1.5):
            with pytest.raises(LinkError, match="does not answer"):
                await SenderLink.connect([proxy.address], identity=Identity("p0"), options=options, timers=TIMERS)
        await swallowing
        await until(lambda: listener.connections == 0)


async def test_field_46_control_and_data_share_one_port(listener: KvListener, connect: Connect) -> None:
    """There is no second, dynamic port that a firewall could close."""
    link = await connect(3)
    peers = {lane.stream.sock.getpeername() for lane in link._now.lanes.values()}
    assert peers == {listener.address}


async def test_field_48_one_bad_address_of_many_does_not_fail_the_peer(listener: KvListener) -> None:
    """Refused, not ours, and mute addresses before the good one: tried in order, the good one serves."""

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100)
        writer.close()

    web = await asyncio.start_server(http, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as gone:
        refused = gone.getsockname()
        gone.close()
        endpoints = [refused, web.sockets[0].getsockname(), mute.getsockname(), ("no.such.host.invalid", 1)]
        link = await SenderLink.connect(
            [*endpoints, listener.address],
            identity=Identity("p0"),
            options=LinkOptions(connections=2, connect_timeout_s=0.3),
            timers=TIMERS,
        )
    ends = start_transfer(listener, link, SMALL)
    ends.seal()
    await ends.delivered(within_s=2)
    await link.close()
    web.close()


async def test_field_48_what_is_advertised_may_differ_from_what_is_bound(
    listener: KvListener, connect: Connect
) -> None:
    """Behind NAT: the ticket names the outer address, and that is what is dialled."""
    async with fault_proxy(listener.address) as nat:
        incoming = listener.reserve(SMALL, [memoryview(bytearray(5_000)) for _ in range(4)], lifetime_s=5,
                                    endpoints=[nat.address])  # fmt: skip
        assert incoming.ticket.endpoints == (nat.address,)
        link = await connect(2, address=incoming.ticket.endpoints[0])
        assert nat.accepted == 3
        await link.close()
        await incoming.abort()


async def test_field_50_a_long_way_does_not_make_it_stop_and_wait(listener: KvListener, connect: Connect) -> None:
    """64 KiB pieces over 80 ms of round trip at 100 Mbit/s: many in flight, not one a round trip."""
    relay = Relay(listener.address, Shape(100_000_000, 0.04), Shape(None, 0.04))
    await relay.start("127.0.0.1", 0)
    link = await connect(2, address=relay.address)
    table = ChunkTable.split(4_000_000, 65_536)
    ends = start_transfer(listener, link, table)
    loop = asyncio.get_running_loop()
    started = loop.time()
    ends.seal()
    await ends.outgoing.wait()
    took_s = loop.time() - started
    await link.close()
    await relay.close()
    # The path's own time is 0.32 s and two round trips; one piece a round trip on two connections would take 2.5 s.
    assert took_s < 1.5


async def test_field_51_connections_leave_from_every_configured_address(listener: KvListener, connect: Connect) -> None:
    """Several network cards: the data connections take the local addresses in turn, and any carries any chunk."""
    link = await connect(4, local_addresses=("127.0.0.2", "127.0.0.3"))
    local = sorted(lane.stream.sock.getsockname()[0] for lane in link._now.lanes.values())
    assert local == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    ends = start_transfer(listener, link, ChunkTable.split(2_000_000, 50_000))
    ends.seal()
    await ends.delivered(within_s=3)


async def test_field_51_a_path_that_slows_down_costs_only_its_share(listener: KvListener, connect: Connect) -> None:
    """One of two paths drops to a tenth: free connections pull the next chunk, so the fast one carries most."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 4_000_000
        link = await connect(2, address=proxy.address)
        slow = proxy.data_wires()[0]
        slow.rate_bytes_per_s = 400_000
        ends = start_transfer(listener, link, ChunkTable.split(4_000_000, 50_000))
        ends.seal()
        await ends.delivered(within_s=8)
        fast = proxy.data_wires()[1]
        assert fast.upstream_bytes > 2.5 * slow.upstream_bytes


async def test_field_57_hours_of_cancelling_and_closing_leave_nothing_behind(listener: KvListener) -> None:
    """A soak of seconds: random cancels, resets and closes; descriptors and memory end where they began."""
    draw = random.Random(57)
    table = ChunkTable.split(1_000_000, 50_000)
    options = LinkOptions(connections=2, connect_timeout_s=1.0, resume_window_s=0.0)

    async def round_trip(seed: int) -> None:
        link = await SenderLink.connect([listener.address], identity=Identity("p0"), options=options, timers=TIMERS)
        several = [start_transfer(listener, link, table, seed=seed) for _ in range(3)]
        for ends in several:
            ends.seal()
        await asyncio.sleep(draw.uniform(0, 0.02))
        match draw.randrange(4):
            case 0:
                several[0].outgoing.abort(CancelledByPeer("changed my mind"))
            case 1:
                await several[1].incoming.abort()
            case 2:
                await link.close()
            case _:
                next(iter(link._now.lanes.values())).shutdown()
        for ends in several:
            await ends.finish(within_s=4, last_word_may_be_lost=True)
        await link.close()

    def held() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()

    for seed in range(10):
        await round_trip(seed)
    await until(lambda: listener.connections == 0)
    files, memory = held()
    for seed in range(60):
        await round_trip(seed)
    await until(lambda: listener.connections == 0)
    await until(lambda: held()[0] <= files)
    assert held()[1] - memory < 24 * MiB
    assert listener.reservations == 0


def test_an_idle_connection_is_probed_by_the_kernel() -> None:
    """A NAT that forgets quiet connections after minutes is reminded of them, and a dead one is found out."""
    with socket.socket() as sock:
        tune(sock, LinkOptions(), data=True)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
