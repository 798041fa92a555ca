"""TCP_INFO: real sockets, short structs, nonsense."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.congestion.tcp_info import TCP_INFO, TCP_INFO_BYTES, TcpInfo


def test_a_real_connection_counts_its_bytes() -> None:
    """Bytes sent over loopback appear, acknowledged, with a round trip."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            client.sendall(b"x" * 100_000)
            received = 0
            while received < 100_000:
                received += len(peer.recv(65536))
            info = TcpInfo.parse(client.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES))
    assert info.bytes_sent == 100_000
    assert info.bytes_acked >= 50_000
    assert 0 < info.rtt_s < 1
    assert info.mss_bytes > 500
    assert info.bytes_retrans == 0


@given(st.binary(max_size=600))
def test_any_bytes_of_any_length_are_read(data: bytes) -> None:
    """An older or newer kernel's struct never raises; what is not there is 0."""
    info = TcpInfo.parse(data)
    assert info.rtt_s >= 0
    if len(data) < 216:
        assert info.bytes_retrans == 0
