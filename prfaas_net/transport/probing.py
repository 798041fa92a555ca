"""Measuring the way to a KV port: can it be reached, does it know us, how far is it, how much does it carry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from prfaas_net.errors import PrfaasError
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.link import SenderLink
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.security import Security
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.units import MiB
from prfaas_net.wire import Timers

__all__ = ["Finding", "Goodput", "ProbeReport", "probe"]

# The first probe of a kind is small; the second is as large as the path carries in this long.
PROBE_S = 1.0
FIRST_BYTES = 2 * MiB
MAX_BYTES = 256 * MiB
# Ping fast: the round trip is what we are here for.
TIMERS = Timers(ping_interval_s=0.05, dead_after_s=10.0)
PINGS = 10


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: ``ok``, ``warn`` or ``fail``, what was found, and what to do."""

    check: str
    status: str
    found: str
    fix: str | None = None


@dataclass(frozen=True)
class Goodput:
    """What a number of connections with one congestion control carried."""

    connections: int
    congestion_control: str
    goodput_bps: float
    retransmitted_share: float


@dataclass
class ProbeReport:
    """Everything that was found, in the order in which it was looked at."""

    endpoint: tuple[str, int]
    rtt_s: float | None = None
    mss_bytes: int | None = None
    goodput: list[Goodput] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(finding.status == "fail" for finding in self.findings)


async def probe(
    endpoint: tuple[str, int],
    *,
    security: Security,
    options: LinkOptions,
    connections: Sequence[int] = (1, 2, 4),
    congestion_controls: Sequence[str] = (),
    on_step: Callable[[str], None] = lambda step: None,
) -> ProbeReport:
    """Look at everything, stopping where the path ends. Never raises for what the path or the peer does.

    Args:
        congestion_controls: to compare, over the largest number of connections; the host's default if empty.
    """
    report = ProbeReport(endpoint)
    try:
        on_step("connecting")
        link = await _connect(endpoint, security, replace(options, connections=1))
        report.findings.append(Finding("reach and authenticate", "ok", f"answered by {link.peer_name}"))
        try:
            await _distance(report, link)
        finally:
            await link.close("the probe is over")
        for control in congestion_controls or ("",):
            for n in connections if control == (congestion_controls or ("",))[0] else connections[-1:]:
                on_step(f"{n} connection{'s' * (n > 1)} {control}".strip())
                wanted = replace(options, connections=n, congestion_control=control or options.congestion_control)
                report.goodput.append(await _carries(endpoint, security, wanted))
        report.findings.append(_judge(report))
    except PrfaasError as error:
        report.findings.append(Finding(type(error).__name__, "fail", error.line(), error.do))
    return report


async def _connect(endpoint: tuple[str, int], security: Security, options: LinkOptions) -> SenderLink:
    return await SenderLink.connect(
        [endpoint], identity=Identity("probe"), security=security, options=options, timers=TIMERS
    )


async def _distance(report: ProbeReport, link: SenderLink) -> None:
    best = None
    for _ in range(PINGS):
        await asyncio.sleep(TIMERS.ping_interval_s * 1.5)
        if link.rtt_s is not None:
            best = link.rtt_s if best is None else min(best, link.rtt_s)
    report.rtt_s = best
    if best is None:
        report.findings.append(Finding("round trip", "warn", "no ping came back in time", "look for a saturated path"))
    else:
        report.findings.append(Finding("round trip", "ok", f"{best * 1e3:.2f} ms, application to application"))
    info = link.tcp_info()
    if info is None:
        return
    report.mss_bytes = info.mss_bytes
    small = info.mss_bytes < 1200
    report.findings.append(
        Finding(
            "segment size",
            "warn" if small else "ok",
            f"{info.mss_bytes} bytes",
            "a tunnel or a wrong MTU on the way; every segment costs the same" if small else None,
        )
    )


async def _carries(endpoint: tuple[str, int], security: Security, options: LinkOptions) -> Goodput:
    link = await _connect(endpoint, security, options)
    try:
        n_bytes = FIRST_BYTES
        while True:
            started = time.perf_counter()
            await link.probe(n_bytes, chunk_bytes=min(MiB, n_bytes // (2 * options.connections))).wait()
            took_s = time.perf_counter() - started
            if took_s >= PROBE_S / 2 or n_bytes >= MAX_BYTES:
                break
            n_bytes = min(MAX_BYTES, max(2 * n_bytes, int(n_bytes * PROBE_S / took_s)))
        infos = [info for stream in link.streams if (info := read_tcp_info(stream.sock)) is not None]
        sent, again = sum(i.bytes_sent for i in infos), sum(i.bytes_retrans for i in infos)
        control = options.congestion_control or "default"
        return Goodput(options.connections, control, 8 * n_bytes / took_s, again / sent if sent else 0.0)
    finally:
        await link.close("the probe is over")


def _judge(report: ProbeReport) -> Finding:
    """What the figures say."""
    best = max(report.goodput, key=lambda row: row.goodput_bps)
    one = next(row for row in report.goodput if row.connections == min(r.connections for r in report.goodput))
    found = f"{best.goodput_bps / 1e6:.0f} Mbps with {best.connections} connections ({best.congestion_control})"
    if best.retransmitted_share > 0.02:
        return Finding("goodput", "warn", f"{found}, {best.retransmitted_share:.1%} retransmitted", "set kv.budget")
    if best.goodput_bps > 1.5 * one.goodput_bps:
        return Finding("goodput", "ok", f"{found}; one alone carries {one.goodput_bps / 1e6:.0f} Mbps")
    return Finding("goodput", "ok", found)
