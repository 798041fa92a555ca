"""prfaas probe: what it says of a way that works, and of ways that do not."""

from __future__ import annotations

import socket

import pytest

from prfaas_net.transport import Identity, KvListener, LinkOptions, Security
from prfaas_net.transport.probing import probe
from prfaas_net.transport.relay import Relay, Shape
from tests.transport.conftest import TIMERS


@pytest.fixture
def security() -> Security:
    return Security(b"a shared key of ours")


async def test_a_way_that_works_is_measured(listener: KvListener, security: Security) -> None:
    """Round trip and goodput of a shaped path are found, within what the path can do; nothing stays behind."""
    relay = Relay(listener.address, Shape(80_000_000, 0.01), Shape(None, 0.01))
    await relay.start("127.0.0.1", 0)
    try:
        report = await probe(relay.address, security=security, options=LinkOptions(), connections=(1, 2))
    finally:
        await relay.close()
    assert not report.failed
    assert report.rtt_s is not None
    assert 0.02 <= report.rtt_s < 0.2
    assert [row.connections for row in report.goodput] == [1, 2]
    assert all(20e6 < row.goodput_bps < 90e6 for row in report.goodput)
    assert listener.reservations == 0


async def test_ways_that_do_not_work_are_explained(listener: KvListener) -> None:
    """Closed port, wrong key, another protocol: one finding each, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()
    options = LinkOptions(connect_timeout_s=1.0)
    refused = await probe(closed, security=Security(), options=options)
    assert refused.failed
    assert "cannot reach" in refused.findings[-1].found
    wrong = await probe(listener.address, security=Security(b"not the shared key"), options=options)
    assert wrong.failed
    assert "kv.shared_key" in (wrong.findings[-1].fix or "")


async def test_a_probe_does_not_disturb_the_receiver() -> None:
    """Nothing is reserved for it, and a listener that closes meanwhile ends it with a finding, not an exception."""
    server = KvListener(identity=Identity("d0"), timers=TIMERS)
    await server.start("127.0.0.1", 0)
    report = await probe(server.address, security=Security(), options=LinkOptions(), connections=(1,))
    assert not report.failed
    await server.close()
    assert server.connections == 0
