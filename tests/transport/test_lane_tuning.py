"""What data connections are given to work well: congestion control, little unsent, batches of the right size."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest

from prfaas_net.congestion.tcp_info import TCP_INFO, TCP_INFO_BYTES, TcpInfo
from prfaas_net.transport import KvListener, LinkOptions, SenderLink, congestion_choice
from prfaas_net.transport.congestion_choice import choose_congestion_control
from prfaas_net.transport.lanes import batch_bytes
from prfaas_net.transport.options import TCP_NOTSENT_LOWAT
from prfaas_net.transport.streams import Stream
from prfaas_net.units import KiB, MiB
from tests.transport.conftest import Connect
from tests.transport.test_gate import both


def control(sock: socket.socket) -> bytes:
    """A socket's congestion control."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0]


def controls(streams: Iterable[Stream]) -> set[bytes]:
    """Of the sockets."""
    return {control(stream.sock) for stream in streams}


def test_a_batch_holds_a_connection_for_two_milliseconds() -> None:
    """1 Gbps: 250 KB, which a chunk of a megabyte exceeds by itself; 40 Gbps: bounded; the first send: one chunk."""
    assert batch_bytes(None, 0) == 0
    assert batch_bytes(125e6, 4 * MiB) == pytest.approx(250e3)
    assert batch_bytes(5e9, 4 * MiB) == 4 * MiB
    # An empty socket buffer takes the first chunk at memory speed: nothing is concluded from that in one step.
    assert batch_bytes(5e9, 50_000) == 100_000


async def test_within_a_host_nothing_is_paced_unless_it_is_asked_for(listener: KvListener, connect: Connect) -> None:
    """BBR's timers cost half of what loopback carries; an operator's word stands."""
    chosen: SenderLink = await connect()
    assert controls(chosen.streams) == {b"reno"}
    with socket.socket() as plain:
        default = control(plain)
    named: SenderLink = await connect(congestion_control=default.decode())
    assert controls(named.streams) == {default}


def test_a_path_emulated_on_loopback_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a millisecond and more to answer a connect may lose and queue: BBR, where the host allows it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        before = control(sock)
        info = TcpInfo.parse(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES))._replace(rtt_us=20_000)
        monkeypatch.setattr(congestion_choice, "read_tcp_info", lambda _: info)
        choose_congestion_control(sock)
        after = control(sock)
        assert after in (b"bbr", before)
        assert after != b"reno" or before == b"reno"


async def test_data_connections_that_were_accepted_are_tuned_like_dialled_ones() -> None:
    """Where receivers dial, an urgent chunk must not wait behind megabytes in the kernel either."""
    async with both(LinkOptions(connections=2, notsent_lowat_bytes=128 * KiB)) as (gate, receiver):
        await receiver.dial_sender(gate.address)
        link = await gate.wait_for(receiver.identity.boot_id, within_s=2)
        assert controls(link.streams) == {b"reno"}
        for stream in link.streams:
            assert stream.sock.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 128 * KiB
