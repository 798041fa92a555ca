"""Checks of everything that is not TCP."""

from __future__ import annotations

import math

from prfaas_net.doctor.facts import HostFacts
from prfaas_net.doctor.findings import Finding, Level, LinkNeeds

__all__ = ["clock", "cpus", "huge_pages", "mtu", "open_files", "ports"]

GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
USUAL_MTU, JUMBO_MTU = 1500, 9000
FAST_BPS = 10 * 10**9
# A gateway's clients, a link's connections and a port full of half-open ones; the first is what a small fleet needs.
FEW_FILES, ENOUGH_FILES = 1024, 8192
ENOUGH_PORTS = 10_000
# xxh3, copy and kernel cost about 0.4 CPU seconds a GiB, both ends together, half of it here.
CPU_S_PER_GIB = 0.25


def huge_pages(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """The landing arena asks for them."""
    why = "landing in 4 KiB pages costs the receiver about 1.5 times the CPU"
    expected = "transparent huge pages: madvise or always"
    if facts.huge_pages in ("madvise", "always"):
        return Finding("huge pages", Level.OK, facts.huge_pages, expected, why)
    fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", Level.WARN, facts.huge_pages or "unknown", expected, why, fix)


def mtu(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """A small MTU means a tunnel, and tunnels lose what does not fit."""
    found = ", ".join(f"{each.name} {each.mtu_bytes}" for each in facts.interfaces) or "no interface"
    why = "where a packet is too large for a hop that does not say so, control gets through and data never does"
    small = [each for each in facts.interfaces if each.mtu_bytes < USUAL_MTU]
    if small and not facts.mtu_probing:
        expected = f"MTU of {USUAL_MTU} or more, or net.ipv4.tcp_mtu_probing = 1"
        return Finding("MTU", Level.WARN, found, expected, why, "sysctl -w net.ipv4.tcp_mtu_probing=1")
    fast = [e for e in facts.interfaces if (e.speed_bps or 0) >= FAST_BPS and e.mtu_bytes < JUMBO_MTU]
    hint = f"; {fast[0].name} is fast: {JUMBO_MTU} saves CPU if the whole path has it" if fast else ""
    return Finding("MTU", Level.OK, found + hint, f"{USUAL_MTU} or more, the same on the whole path", why)


def clock(facts: HostFacts, needs: LinkNeeds) -> list[Finding]:
    """Fast to read, and right."""
    findings = []
    why = "every chunk reads the clock; a slow source takes microseconds instead of nanoseconds"
    expected = f"one of {', '.join(GOOD_CLOCKS)}"
    if facts.clock_source in GOOD_CLOCKS:
        findings.append(Finding("clock source", Level.OK, facts.clock_source, expected, why))
    else:
        fix = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"
        findings.append(Finding("clock source", Level.WARN, facts.clock_source or "unknown", expected, why, fix))
    why = "certificates have dates, and logs of two sites are read side by side (deadlines do not depend on it)"
    found = {True: "synchronized", False: "not synchronized", None: "unknown"}[facts.clock_synchronized]
    level = Level.OK if facts.clock_synchronized else Level.WARN
    fix = "" if level is Level.OK else "systemctl enable --now chronyd (or systemd-timesyncd)"
    return [*findings, Finding("time", level, found, "kept by NTP or PTP", why, fix)]


def cpus(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """Bulk needs CPU time, and the event loop must not wait for it."""
    gib_per_s = needs.rate_bps / 8 / (1 << 30)
    wanted = max(2, math.ceil(gib_per_s * CPU_S_PER_GIB) + 1)
    why = (
        f"a connection is a thread; this rate takes about {gib_per_s * CPU_S_PER_GIB:.1f} cores, beside the event loop"
    )
    level = Level.OK if facts.cpus >= wanted else Level.WARN
    fix = "" if level is Level.OK else "give the process more CPUs (cgroup, taskset), or plan for a lower rate"
    return Finding("CPUs", level, f"{facts.cpus} usable", f"{wanted} or more", why, fix)


def open_files(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """Descriptors."""
    found = f"soft {facts.open_files_soft}, hard {facts.open_files_hard}"
    why = "every connection is a descriptor; when they run out nobody can connect any more"
    expected = f"{ENOUGH_FILES} or more"
    fix = "LimitNOFILE=65536 in the systemd unit, or ulimit -n 65536"
    if facts.open_files_soft is None or facts.open_files_soft >= ENOUGH_FILES:
        return Finding("open files", Level.OK, found, expected, why)
    level = Level.WARN if facts.open_files_soft >= FEW_FILES else Level.FAIL
    return Finding("open files", level, found, expected, why, fix)


def ports(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """Local ports for outgoing connections."""
    why = "every outgoing connection takes one, and a closed one stays taken for a minute"
    expected = f"{ENOUGH_PORTS} or more"
    if facts.first_port is None or facts.last_port is None:
        return Finding("local ports", Level.OK, "unknown", expected, why)
    n = facts.last_port - facts.first_port + 1
    level = Level.OK if n >= ENOUGH_PORTS else Level.WARN
    fix = "" if level is Level.OK else 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
    return Finding("local ports", level, f"{facts.first_port} to {facts.last_port}: {n}", expected, why, fix)
