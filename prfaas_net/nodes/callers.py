"""Noticing that a caller is gone though nothing says so: a gateway whose host lost its power, or its way to us.

A process that dies closes its connections, and its work is given up at once. Where the host itself is gone, only the
silence of its kernel tells.
"""

from __future__ import annotations

import asyncio
import socket

__all__ = ["CALLER_GONE_S", "expect_life"]

# What is sent and not acknowledged for so long, or asked (every 5 s where nothing is sent) and not answered, went to
# nobody. Three lost questions in a row; a path that is gone for less is none of a control connection's business.
CALLER_GONE_S = 20
ASK_EVERY_S = 5


def expect_life(transport: asyncio.BaseTransport | None) -> None:
    """Let the kernel end this connection when its peer's does not answer for ``CALLER_GONE_S``."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, CALLER_GONE_S // ASK_EVERY_S - 1)
    # Also bounds how long a peer may offer no window, and with it the questions about that.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CALLER_GONE_S * 1000)
