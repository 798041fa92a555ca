"""What the laboratory itself costs and how true it is, by backend."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from typing import Any

from tools.netlab.flows import Load
from tools.netlab.link import Link, link
from tools.netlab.settings import Way

__all__ = ["measure"]

DELAYS_MS = (0, 10, 40)
RATES_BPS = (50e6, 200e6, 1e9)
LOSSES = (0.001, 0.01, 0.05)
# A rate that no backend reaches, and one way's delay beside it.
UNREACHED_BPS, PATH_MS = 20e9, 5
_PINGS, _PACKETS, _STEADY_S = 300, 20_000, 2.0


def measure(backend: str) -> dict[str, Any]:
    """One backend.

    Returns:
        ``start_s``, ``stop_s``; ``rtt``: by delay one way, how much later than twice that a datagram's answer comes;
        ``rates``: by rate, goodput of a cubic flow over it; ``losses``: by loss, share of datagrams that were lost;
        ``highest_bps``: goodput of four flows with a bottleneck that is never reached.
    """
    began_s = time.monotonic()
    with link(backend=backend) as made:
        report: dict[str, Any] = {"backend": backend, "start_s": time.monotonic() - began_s}
        report["rtt"] = {delay_ms: _late_ms(made, delay_ms) for delay_ms in DELAYS_MS}
        report["rates"] = {f"{rate_bps:g}": _goodput(made, rate_bps) / rate_bps for rate_bps in RATES_BPS}
        report["losses"] = {loss: _lost(made, loss) for loss in LOSSES}
        report["highest_bps"] = _goodput(made, UNREACHED_BPS, flows=4)
        ended_s = time.monotonic()
    report["stop_s"] = time.monotonic() - ended_s
    return report


def _sockets(made: Link) -> tuple[socket.socket, socket.socket]:
    with made.inside("a"):
        here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with made.inside("b"):
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    there.bind((made.b.address, 0))
    here.connect(there.getsockname())
    there.settimeout(1.0)
    here.settimeout(1.0)
    return here, there


def _late_ms(made: Link, delay_ms: float) -> dict[str, float]:
    made.reset(ab={"delay_ms": delay_ms}, ba={"delay_ms": delay_ms})
    here, there = _sockets(made)

    def answer() -> None:
        for _ in range(_PINGS):
            data, address = there.recvfrom(64)
            there.sendto(data, address)

    with here, there:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        took_ms = []
        for _ in range(_PINGS):
            began_s = time.perf_counter()
            here.send(b"ping")
            here.recv(64)
            took_ms.append((time.perf_counter() - began_s) * 1e3 - 2 * delay_ms)
        thread.join()
    return {"p50_ms": statistics.median(took_ms), "p99_ms": sorted(took_ms)[int(0.99 * _PINGS)], "min_ms": min(took_ms)}


def _goodput(made: Link, rate_bps: float, flows: int = 1) -> float:
    queue_bytes = 2 * Way(rate_bps=rate_bps, delay_ms=PATH_MS).limit_bytes
    made.reset(ab={"rate_bps": rate_bps, "delay_ms": PATH_MS, "queue_bytes": queue_bytes}, ba={"delay_ms": PATH_MS})
    with made.traffic("ab", Load(cc="cubic"), flows=flows) as traffic:
        time.sleep(_STEADY_S)
        began_s, before = traffic.received()
        time.sleep(_STEADY_S)
        ended_s, after = traffic.received()
    return (after - before) * 8 / (ended_s - began_s)


def _lost(made: Link, loss: float) -> float:
    made.reset(ab={"loss": loss})
    before = made.counters()["ab"]
    here, there = _sockets(made)
    with here, there:
        for number in range(_PACKETS):
            here.send(b"x" * 100)
            if number % 20 == 0:
                time.sleep(0.002)
        time.sleep(0.2)
    return (made.counters()["ab"] - before).lost / _PACKETS
