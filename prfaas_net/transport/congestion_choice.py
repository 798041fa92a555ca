"""Which congestion control a sending connection gets when the operator names none.

Between two hosts BBR, where the host allows it: cubic at 1 % loss and 80 ms carries 2 Mbps where BBR fills the path.
Within one host there is nothing to find out, and what BBR costs there, a timer for every burst that it paces, takes
half of the throughput: reno, which every Linux has and allows, does not pace.
"""

from __future__ import annotations

import socket

from prfaas_net.transport.stats import read_tcp_info

__all__ = ["choose_congestion_control"]

# Loopback answers a connect within 0.1 ms, also on a busy machine; whoever emulates a path on it adds more.
WITHIN_A_HOST_US = 1000


def choose_congestion_control(sock: socket.socket) -> None:
    """For a connected socket; where nothing may be chosen, the host's default stays."""
    info = read_tcp_info(sock)
    near = info is not None and info.rtt_us < WITHIN_A_HOST_US
    within = near and sock.getpeername()[0] == sock.getsockname()[0]
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno" if within else b"bbr")
    except OSError:
        pass  # not allowed, or not there: `prfaas doctor` says so
