"""A gateway that is gone without a word is noticed, and what it held is given back."""

from __future__ import annotations

import socket

from prfaas_net.nodes.callers import CALLER_GONE_S
from tests.nodes.conftest import Nodes


async def test_a_callers_host_that_no_longer_answers_is_noticed_by_the_kernel(nodes: Nodes) -> None:
    """Every connection that a call came over is watched, whether something is sent on it or not."""
    async with nodes() as hand, hand.decode(100) as decode:
        assert (await decode.next())["event"] == "reserved"
        runner = hand.decode_node.control._runner
        assert runner is not None and runner.server is not None
        (connection,) = runner.server.connections
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == CALLER_GONE_S * 1000
        idle, every, times = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + every * times <= CALLER_GONE_S
