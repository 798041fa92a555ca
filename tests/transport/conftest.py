"""Real sockets on loopback: a listener, links to it, memory on both sides."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, Incoming, KvListener, LinkOptions, Outgoing, Security, SenderLink
from prfaas_net.wire import Timers
from tests.wire.pair import cut

TIMERS = Timers(ping_interval_s=0.2, dead_after_s=2.0, lane_stall_s=1.0, stall_after_s=6.0)
Connect = Callable[..., Awaitable[SenderLink]]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, its lanes have ended when it has."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("kv-lane"):
            thread.join(2.0)
            assert not thread.is_alive(), f"{thread.name} is still running"


@pytest.fixture
def security() -> Security:
    """Of both sides; tests of other kinds override it."""
    return Security()


@pytest.fixture
def window_s() -> float:
    """How long both sides wait for a link to come back; none, unless a test is about that."""
    return 0.0


@pytest.fixture
async def listener(security: Security, window_s: float) -> AsyncIterator[KvListener]:
    server = KvListener(identity=Identity("d0"), security=security, timers=TIMERS, link_grace_s=window_s)
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()
    assert server.reservations == 0
    assert server.connections == 0


@pytest.fixture
async def connect(listener: KvListener, security: Security, window_s: float) -> AsyncIterator[Connect]:
    """Links to the listener, or to the address given; closed at the end."""
    links: list[SenderLink] = []

    async def make(connections: int = 2, address: tuple[str, int] | None = None, **options: Any) -> SenderLink:
        link = await SenderLink.connect(
            [address or listener.address],
            identity=Identity("p0"),
            security=security,
            options=LinkOptions(connections=connections, connect_timeout_s=2.0, resume_window_s=window_s, **options),
            timers=TIMERS,
        )
        links.append(link)
        return link

    yield make
    for link in links:
        await link.close()


def reserve(listener: KvListener, table: ChunkTable, *, lifetime_s: float = 20.0) -> tuple[Incoming, np.ndarray]:
    """A reservation over fresh memory."""
    memory = np.zeros(table.total_bytes, dtype=np.uint8)
    incoming = listener.reserve(table, cut(memory, table), lifetime_s=lifetime_s, endpoints=[listener.address])
    return incoming, memory


def open_transfer(link: SenderLink, incoming: Incoming, source: np.ndarray) -> Outgoing:
    table = incoming.transfer.table
    return link.open(incoming.ticket, table, cut(source, table))
