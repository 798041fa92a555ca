"""Ends that are killed or stopped: the other one knows, within its timers, and goes on where it can."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import LinkError
from prfaas_net.kv import ChunkTable, checksum
from prfaas_net.transport import Identity, KvListener, LinkOptions, Outgoing, SenderLink
from prfaas_net.wire import Ticket, Timers
from tests.faults.processes import Child, child
from tests.transport.conftest import reserve
from tests.waiting import until
from tests.wire.pair import cut, random_bytes

pytestmark = pytest.mark.e2e

TABLE = ChunkTable.split(4_000_000, 100_000)
SOURCE = random_bytes(TABLE.total_bytes)
TIMERS = {"ping_interval_s": 0.1, "dead_after_s": 1.0, "lane_stall_s": 1.0, "stall_after_s": 3.0}
RECEIVER = {"total_bytes": TABLE.total_bytes, "chunk_bytes": 100_000, "timers": TIMERS}


async def send_to(receiver: Child, *, window_s: float = 0.0, ready: int = len(TABLE)) -> tuple[SenderLink, Outgoing]:
    """A link to a receiver process, and a transfer on it of which ``ready`` chunks are."""
    ticket = Ticket.from_json(json.loads(await receiver.line()))
    link = await SenderLink.connect(
        ticket.endpoints,
        identity=Identity("p0"),
        options=LinkOptions(connections=2, connect_timeout_s=1.0, resume_window_s=window_s),
        timers=Timers(**TIMERS),
    )
    outgoing = link.open(ticket, TABLE, cut(SOURCE, TABLE))
    for chunk in range(ready):
        outgoing.ready(chunk)
    return link, outgoing


async def test_two_processes_deliver(listener: KvListener) -> None:
    """The ground of this file: a receiver and a sender in processes of their own, bytes equal."""
    async with child("receiver_process", RECEIVER) as receiver:
        ticket = json.loads(await receiver.line())
        async with child("sender_process", {"ticket": ticket, "chunk_bytes": 100_000, "seed": 0}) as sender:
            assert await sender.line() == f"delivered {len(TABLE)}"
            assert await receiver.line() == f"landed {checksum(SOURCE.tobytes()):016x}"


@pytest.mark.parametrize("ready", [0, 20], ids=["idle", "mid-transfer"])
async def test_field_05_a_paused_receiver_is_noticed_within_the_timers(ready: int) -> None:
    """SIGSTOP: its kernel still acknowledges, its sockets stay open; the sender has a typed error all the same."""
    async with child("receiver_process", RECEIVER) as receiver:
        link, outgoing = await send_to(receiver, ready=ready)
        await until(lambda: outgoing.transfer.acked.count >= ready)
        receiver.pause()
        for chunk in range(ready, len(TABLE)):
            outgoing.ready(chunk)
        async with asyncio.timeout(TIMERS["dead_after_s"] + 1):
            with pytest.raises(LinkError, match="nothing came from the peer for 1 s"):
                await outgoing.wait()
        async with asyncio.timeout(3):
            await link.close()


@pytest.mark.parametrize("window_s", [0.0, 1.0], ids=["no-window", "resuming"])
async def test_field_06_a_killed_receiver_fails_the_sender_in_time(window_s: float) -> None:
    """kill -9 in mid-transfer: LinkError within 2 s, or within the window where the sender may try to come back."""
    async with child("receiver_process", RECEIVER) as receiver:
        link, outgoing = await send_to(receiver, window_s=window_s, ready=20)
        await until(lambda: outgoing.transfer.acked.count >= 20)
        await receiver.kill()
        started = time.monotonic()
        async with asyncio.timeout(2 + window_s):
            with pytest.raises(LinkError):
                await outgoing.wait()
        assert time.monotonic() - started >= window_s * 0.9
        await link.close()


async def test_field_07_a_receiver_that_restarts_voids_its_tickets() -> None:
    """Killed and started anew on the same port: the sender finds another boot id there, and says so."""
    async with child("receiver_process", RECEIVER) as receiver:
        link, outgoing = await send_to(receiver, window_s=8.0, ready=20)
        await until(lambda: outgoing.transfer.acked.count >= 20)
        await receiver.kill()
        port = link.endpoints[0][1]
        async with child("receiver_process", {**RECEIVER, "port": port}) as again:
            json.loads(await again.line())
            async with asyncio.timeout(8):
                with pytest.raises(LinkError, match="restarted"):
                    await outgoing.wait()
        await link.close()


@pytest.mark.parametrize("window_s", [15.0])
async def test_a_sender_killed_and_restarted_sends_only_the_rest(listener: KvListener, window_s: float) -> None:
    """kill -9 in mid-transfer, a new process with the same ticket: whole, and nothing that had landed goes again."""
    incoming, memory = reserve(listener, TABLE)
    spec: dict[str, Any] = {"ticket": incoming.ticket.to_json(), "chunk_bytes": 100_000, "seed": 0}
    async with child("sender_process", {**spec, "hold_after": 25}) as first:
        assert await first.line() == "landed 25"
        await first.kill()
    assert incoming.transfer.landed.count == 25
    async with child("sender_process", spec) as second:
        assert await second.line() == f"delivered {len(TABLE) - 25}"
    async with asyncio.timeout(2):
        assert await incoming.sealed() == {"first_token": 9}
        await incoming.landed()
    assert np.array_equal(memory, SOURCE)
    assert incoming.transfer.discarded_chunks == 0


@pytest.mark.parametrize("window_s", [0.0, 0.5], ids=["no-grace", "grace"])
async def test_a_sender_killed_for_good_fails_the_receiver_in_time(listener: KvListener, window_s: float) -> None:
    """kill -9 and nobody comes back: LinkError at once, or after the grace; the reservation is gone."""
    incoming, _ = reserve(listener, TABLE)
    spec = {"ticket": incoming.ticket.to_json(), "chunk_bytes": 100_000, "seed": 0, "hold_after": 5}
    async with child("sender_process", spec) as sender:
        assert await sender.line() == "landed 5"
        await sender.kill()
        async with asyncio.timeout(1 + window_s):
            with pytest.raises(LinkError):
                await incoming.landed()
    await incoming.abort()
    assert listener.reservations == 0


async def test_a_paused_sender_is_noticed_within_the_timers(listener: KvListener) -> None:
    """SIGSTOP of the sender: the receiver's memory is not held for the ticket's whole life."""
    incoming, _ = reserve(listener, TABLE)
    spec = {"ticket": incoming.ticket.to_json(), "chunk_bytes": 100_000, "seed": 0, "hold_after": 5}
    async with child("sender_process", spec) as sender:
        assert await sender.line() == "landed 5"
        sender.pause()
        async with asyncio.timeout(4):
            with pytest.raises(LinkError, match="nothing came from the peer"):
                await incoming.landed()
    await incoming.abort()
