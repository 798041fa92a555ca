"""What it costs to look at many connections, and to judge what was seen."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import Any

from prfaas_net.congestion.detectors import make_detector
from prfaas_net.congestion.looking import LOOK_MANY_S, LOOK_S
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.transport.stats import read_tcp_info

__all__ = ["telemetry_cost"]

CONNECTIONS, LINKS = 64, 16
ROUNDS = 300


def telemetry_cost(rounds: int = ROUNDS) -> dict[str, Any]:
    """Of 64 connections, on 16 links and on one, looked at as often as busy links are.

    The sockets are idle ones on loopback, which the kernel describes as slowly as busy ones; the detectors are fed with
    changing counters, so that they do what they do for a link that is busy.
    """
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS))
        socks = [stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(CONNECTIONS)]
        began_s = time.process_time()
        for _ in range(rounds):
            infos = [read_tcp_info(sock) for sock in socks]
        poll_s = (time.process_time() - began_s) / rounds
    base = next(info for info in infos if info is not None)
    judge_s, judge_one_s = (_judge_s(base, n, rounds) for n in (CONNECTIONS // LINKS, CONNECTIONS))
    looks_per_s, looks_many_per_s = 2 / sum(LOOK_S), 2 / sum(LOOK_MANY_S)
    return {
        "connections": CONNECTIONS,
        "links": LINKS,
        "looks_per_s": round(looks_per_s, 1),
        "poll_us_per_connection": round(1e6 * poll_s / CONNECTIONS, 2),
        "verdict_us_per_look": round(1e6 * judge_s, 1),
        "poll_core_share": round(poll_s * looks_per_s, 5),
        "core_share": round((poll_s + LINKS * judge_s) * looks_per_s, 5),
        "one_link_core_share": round((poll_s + judge_one_s) * looks_many_per_s, 5),
    }


def _judge_s(base: TcpInfo, connections: int, rounds: int) -> float:
    """Seconds for a verdict on a link of so many connections."""
    samples = [
        LinkSample(number * 0.02, True, 1 << 20, tuple(
            (lane, base._replace(bytes_acked=number * 90_000, bytes_sent=number * 90_000, delivered=number * 60,
                                 rtt_us=40_000 + number % 7 * 100, unacked=60, notsent_bytes=200_000))
            for lane in range(connections)
        ))
        for number in range(rounds)
    ]  # fmt: skip
    detector = make_detector("prfaas", "cubic")
    began_s = time.process_time()
    for sample in samples:
        detector.observe(sample)
    return (time.process_time() - began_s) / rounds
