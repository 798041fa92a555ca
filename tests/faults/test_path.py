"""What a path and its middle-boxes do to a transfer: it is delivered and identical, or failed on both sides."""

from __future__ import annotations

import asyncio
import random

import pytest

from prfaas_net.errors import LinkError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import KvListener
from tests.faults.ends import start_transfer
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS, Connect
from tests.waiting import until

TABLE = ChunkTable.split(8_000_000, 200_000)
RESUMES = pytest.mark.parametrize("window_s", [3.0], ids=["resuming"])


@pytest.mark.parametrize("window_s", [0.0, 3.0], ids=["no-window", "resuming"])
@pytest.mark.parametrize("seed", range(3))
async def test_resets_at_any_time_end_well(listener: KvListener, connect: Connect, window_s: float, seed: int) -> None:
    """RST on everything at a random moment: with a window it is delivered, without one both sides fail at once."""
    draw = random.Random(seed)
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 8_000_000
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await asyncio.sleep(draw.uniform(0.0, 0.4))
        proxy.reset()
        proxy.rate_bytes_per_s = None
        error = await ends.finish(within_s=4, last_word_may_be_lost=not window_s)
    assert (error is None) == bool(window_s) or ends.landed == len(TABLE)


@RESUMES
async def test_one_connection_is_reset_again_and_again(listener: KvListener, connect: Connect) -> None:
    """Each time another data connection dies in the middle of a chunk, and each time it is replaced."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 4_000_000
        link = await connect(3, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        for _ in range(4):
            await asyncio.sleep(0.06)
            if proxy.data_wires():
                proxy.data_wires()[0].reset()
        await ends.delivered(within_s=8)
        assert link.alive


async def test_a_path_that_blinks_delivers(listener: KvListener, connect: Connect) -> None:
    """0.5 s on, 0.2 s off: shorter than any timer, so the transfer is delivered, only later."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 2_500_000
        link = await connect(2, address=proxy.address)
        async with proxy.blinking(on_s=0.5, off_s=0.2):
            ends = start_transfer(listener, link, TABLE)
            ends.seal()
            await ends.delivered(within_s=8)
    assert ends.outgoing.transfer.stats.resent_chunks == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@RESUMES
async def test_a_path_that_is_on_for_5_s_and_off_for_2_s_delivers(listener: KvListener, connect: Connect) -> None:
    """The blackhole case of the QUIC interop runner at its own scale: 10 MB at 10 Mbit/s, 5 s on, 2 s off."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        proxy.rate_bytes_per_s = 625_000
        async with proxy.blinking(on_s=5.0, off_s=2.0):
            ends = start_transfer(listener, link, ChunkTable.split(10_000_000, 100_000), lifetime_s=60)
            ends.seal()
            await ends.delivered(within_s=60)


@pytest.mark.parametrize("window_s", [0.0, 1.0], ids=["no-window", "resuming"])
async def test_a_black_hole_in_mid_transfer_ends_within_the_timers(
    listener: KvListener, connect: Connect, window_s: float
) -> None:
    """Frozen for good, with and without a window: typed errors on both sides, never a hang."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 8_000_000
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await until(lambda: ends.landed > 2)
        proxy.freeze()
        error = await ends.finish(within_s=TIMERS.dead_after_s + window_s + 3)
        assert isinstance(error, LinkError)


async def test_a_slow_close_changes_nothing(listener: KvListener, connect: Connect) -> None:
    """A middle-box that passes the end of a connection on late: the transfer is whole, and closing is bounded."""
    async with fault_proxy(listener.address) as proxy:
        proxy.close_after_s = 0.5
        link = await connect(3, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=5)
        async with asyncio.timeout(3):
            await link.close()
        await until(lambda: not listener.connections)


async def test_one_byte_at_a_time_is_the_same_stream(listener: KvListener, connect: Connect) -> None:
    """Handshakes, control frames and chunks sliced into single bytes: delivered and identical."""
    async with fault_proxy(listener.address) as proxy:
        proxy.piece_bytes = 1
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, ChunkTable.split(12_000, 1_000))
        ends.seal()
        await ends.delivered(within_s=10)


async def test_a_collapse_of_bandwidth_is_not_a_failure(listener: KvListener, connect: Connect) -> None:
    """From everything to 2 MB/s in the middle: slow is not dead, as long as chunks are acknowledged."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        proxy.rate_bytes_per_s = 2_000_000
        ends.seal()
        await until(lambda: ends.landed > 3)
        proxy.rate_bytes_per_s = 600_000
        await asyncio.sleep(0.5)
        proxy.rate_bytes_per_s = 8_000_000
        await ends.delivered(within_s=8)
        assert link.alive


async def test_one_of_four_connections_stalled_costs_only_its_share(listener: KvListener, connect: Connect) -> None:
    """A black hole on one data connection: what it carried goes again on the others, nothing else does."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 4_000_000
        link = await connect(4, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await until(lambda: ends.landed > 4)
        victim = proxy.data_wires()[1]
        victim.stall()
        held_before = victim.upstream_bytes
        await ends.delivered(within_s=8)
        # Its share is what lies between the two sockets of the stalled connection: kernel buffers, and one chunk.
        stats = ends.outgoing.transfer.stats
        assert stats.resent_chunks * 200_000 < victim.upstream_bytes - held_before + 6_000_000
        assert stats.resent_chunks < len(TABLE)
        assert link.alive


async def test_a_corrupted_payload_is_sent_again(listener: KvListener, connect: Connect) -> None:
    """A bit flipped under TCP's checksum: noticed, counted, mended; the user never sees it."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(1, address=proxy.address)
        (wire,) = proxy.data_wires()
        wire.flip_at = wire.upstream_bytes + 100_000
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=5)
    assert ends.incoming.transfer.corrupt_chunks == 1
    assert ends.outgoing.transfer.stats.resent_chunks == 1


@pytest.mark.parametrize("place", [3, 20, 60], ids=["magic", "length", "checksum"])
async def test_a_corrupted_header_costs_its_connection_only(listener: KvListener, connect: Connect, place: int) -> None:
    """Nobody knows where the frame after a damaged header begins: that connection is replaced, the transfer whole."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(1, address=proxy.address)
        (wire,) = proxy.data_wires()
        wire.flip_at = wire.upstream_bytes + place
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=5)
        assert proxy.accepted == 3


@pytest.mark.parametrize("cut_at", [0, 1, 63, 64, 65, 100_000, 200_063])
async def test_a_data_connection_cut_at_any_byte_is_replaced(
    listener: KvListener, connect: Connect, cut_at: int
) -> None:
    """At a frame's boundary, inside its header, inside its payload: the chunk goes again, the transfer is whole."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        wire = proxy.data_wires()[0]
        wire.cut_at = wire.upstream_bytes + cut_at
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=5)


@RESUMES
@pytest.mark.parametrize("cut_at", [1, 64, 400])
async def test_a_control_connection_cut_at_any_byte_is_come_back_from(
    listener: KvListener, connect: Connect, cut_at: int
) -> None:
    """The session dies with half a control frame said; the next one goes on with the same ticket."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(2, address=proxy.address)
        control = proxy.wires[0]
        control.cut_at = control.upstream_bytes + cut_at
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=6)
