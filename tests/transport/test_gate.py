"""Data against the direction of the dialling: the receiver dials the sender's gate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from prfaas_net.errors import IncompatibleError, LinkError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, Incoming, KvListener, LinkOptions, LinkPool, Security, SenderGate, SenderLink
from tests.faults.proxy import fault_proxy
from tests.transport.conftest import TIMERS
from tests.waiting import until
from tests.wire.pair import cut, random_bytes

TABLE = ChunkTable.split(4_000_000, 200_000)
SOURCE = random_bytes(TABLE.total_bytes)
OPTIONS = LinkOptions(connections=2, connect_timeout_s=2.0, resume_window_s=3.0)
SECURITY = Security(b"a shared key of ours")


@contextlib.asynccontextmanager
async def both(options: LinkOptions = OPTIONS) -> AsyncIterator[tuple[SenderGate, KvListener]]:
    gate = SenderGate(identity=Identity("p0"), security=SECURITY, options=options, timers=TIMERS)
    receiver = KvListener(identity=Identity("d0"), security=SECURITY, options=options, timers=TIMERS, link_grace_s=3.0)
    await gate.start("127.0.0.1", 0)
    await receiver.start("127.0.0.1", 0)
    yield gate, receiver
    await receiver.close()
    await gate.close()
    assert receiver.reservations == 0
    assert receiver.connections == 0


def reserve(receiver: KvListener) -> tuple[Incoming, np.ndarray]:
    memory = np.zeros(TABLE.total_bytes, dtype=np.uint8)
    return receiver.reserve(TABLE, cut(memory, TABLE), lifetime_s=20, endpoints=()), memory


async def test_a_receiver_that_dialled_gets_its_transfers() -> None:
    """The pool finds the link by the ticket's boot id; bytes land as ever."""
    async with both() as (gate, receiver):
        pool = LinkPool(identity=Identity("p0"), security=SECURITY, options=OPTIONS, gate=gate)
        await receiver.dial_sender(gate.address)
        incoming, memory = reserve(receiver)
        link = await pool.get(incoming.ticket)
        outgoing = link.open(incoming.ticket, TABLE, cut(SOURCE, TABLE))
        outgoing.ready_all()
        outgoing.seal({"first_token": 2})
        assert await incoming.sealed() == {"first_token": 2}
        await incoming.landed()
        await outgoing.wait()
        assert np.array_equal(memory, SOURCE)


async def test_the_receiver_comes_back_with_the_transfer() -> None:
    """RST on every connection in the middle: it dials again, and only the rest is sent."""
    async with both() as (gate, receiver), fault_proxy(gate.address) as proxy:
        await receiver.dial_sender(proxy.address)
        incoming, memory = reserve(receiver)
        link = await gate.wait_for(receiver.identity.boot_id, within_s=2)
        outgoing = link.open(incoming.ticket, TABLE, cut(SOURCE, TABLE))
        for chunk in range(10):
            outgoing.ready(chunk)
        await until(lambda: outgoing.transfer.acked.count == 10)
        proxy.reset()
        for chunk in range(10, len(TABLE)):
            outgoing.ready(chunk)
        outgoing.seal({})
        await incoming.landed()
        await outgoing.wait()
        assert np.array_equal(memory, SOURCE)


async def test_a_receiver_that_stays_away_fails_the_transfer() -> None:
    """When the window has passed both sides know, with what happened."""
    async with both() as (gate, receiver):
        async with fault_proxy(gate.address) as proxy:
            await receiver.dial_sender(proxy.address)
            incoming, _ = reserve(receiver)
            link = await gate.wait_for(receiver.identity.boot_id, within_s=2)
            outgoing = link.open(incoming.ticket, TABLE, cut(SOURCE, TABLE))
            outgoing.ready(0)
            await until(lambda: outgoing.transfer.acked.count)
        for end in (outgoing.wait(), incoming.landed()):
            with pytest.raises(LinkError):
                await end
        await incoming.abort()


async def test_roles_are_not_mixed_up() -> None:
    """A sender at a gate, a receiver at a listener, a receiver that never dials: each is told."""
    async with both() as (gate, receiver):
        with pytest.raises(IncompatibleError, match="this port is for receivers"):
            await SenderLink.connect([gate.address], identity=Identity("p1"), security=SECURITY, options=OPTIONS)
        with pytest.raises(IncompatibleError, match="this port is for senders"):
            await receiver.dial_sender(receiver.address)
        with pytest.raises(LinkError, match="has not dialled"):
            await gate.wait_for("somebody else", within_s=0.1)


async def test_a_receiver_that_comes_back_late_is_served_again() -> None:
    """Away for longer than the window: what was under way has failed, the next transfer finds the link."""
    options = replace(OPTIONS, resume_window_s=0.2)
    async with both(options) as (gate, receiver), fault_proxy(gate.address) as proxy:
        await receiver.dial_sender(proxy.address)
        link = await gate.wait_for(receiver.identity.boot_id, within_s=2)
        proxy.freeze()
        await until(lambda: not link.alive)
        await asyncio.sleep(1.0)
        proxy.reset()
        proxy.thaw()
        incoming, memory = reserve(receiver)
        again = await gate.wait_for(receiver.identity.boot_id, within_s=5)
        outgoing = again.open(incoming.ticket, TABLE, cut(SOURCE, TABLE))
        outgoing.ready_all()
        outgoing.seal({})
        await incoming.landed()
        await outgoing.wait()
        assert np.array_equal(memory, SOURCE)
