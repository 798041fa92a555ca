"""Checks of the kernel's TCP. Each takes facts and the link, and says one thing."""

from __future__ import annotations

from prfaas_net.doctor.facts import HostFacts
from prfaas_net.doctor.findings import Finding, Level, LinkNeeds
from prfaas_net.units import KiB, MiB, format_bytes, format_duration, format_rate

__all__ = ["buffers", "congestion_control", "idle_restart", "notsent_lowat", "tcp_features"]

WANTED = "bbr"
# A 4 MiB send buffer carried 2.6 MiB a round trip on a clean path and 1.6 MiB at 0.1 % loss (1 Gbps, 80 ms, measured):
# what was lost stays in it for another round trip. Of a receive buffer the kernel offers half as window.
SEND_SHARE, RECEIVE_SHARE = 0.4, 0.5
# As many connections as a link opens at most.
MAX_CONNECTIONS = 16
# The kernel takes no more than an int; beyond a GiB more connections are the better answer.
MAX_BUFFER_BYTES = 1 << 30


def congestion_control(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """bbr, since loss does not slow it down."""
    found = f"default {facts.congestion_default}, available {' '.join(facts.congestion_available) or 'unknown'}"
    why = "cubic at 1 % loss and 80 ms carries 2 Mbps where bbr fills the path; a link asks for bbr where it may"
    if WANTED not in facts.congestion_available:
        fix = f"modprobe tcp_{WANTED} && echo tcp_{WANTED} > /etc/modules-load.d/{WANTED}.conf"
        return Finding("congestion control", Level.WARN, found, f"{WANTED} available", why, fix)
    allowed = facts.privileged or WANTED in (*facts.congestion_allowed, facts.congestion_default)
    if not allowed:
        names = " ".join(dict.fromkeys((*facts.congestion_allowed, WANTED)))
        fix = f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{names}"'
        found = f"{WANTED} is there, but only for root; allowed: {' '.join(facts.congestion_allowed)}"
        return Finding("congestion control", Level.WARN, found, f"{WANTED} allowed", why, fix)
    return Finding("congestion control", Level.OK, found, f"{WANTED} allowed", why)


def _recommended(needs: LinkNeeds) -> int:
    """Four bandwidth-delay products, as a power of two."""
    wanted = min(MAX_BUFFER_BYTES, max(4 * MiB, 4 * needs.bdp_bytes))
    return 1 << (wanted - 1).bit_length()


def _buffer(facts: HostFacts, needs: LinkNeeds, *, name: str, size: int | None, share: float, other: str) -> Finding:
    check, sysctl = f"{name} buffer", f"net.ipv4.tcp_{'wmem' if name == 'send' else 'rmem'}"
    expected = f"enough for {format_rate(needs.rate_bps)} at {format_duration(needs.rtt_s)}"
    why = f"a connection has at most {share:.0%} of its {name} buffer under way in a round trip, whatever the link"
    fix = f'sysctl -w {sysctl}="4096 {other} {_recommended(needs)}"'
    if size is None:
        return Finding(check, Level.WARN, "unknown", expected, why, fix)
    one_bps = size * share * 8 / needs.rtt_s if needs.rtt_s else float("inf")
    enough = max(1, -(-needs.rate_bps // max(1, int(min(one_bps, needs.rate_bps)))))
    found = f"maximum {format_bytes(size)}: {format_rate(min(one_bps, needs.rate_bps))} a connection"
    if enough <= needs.connections:
        return Finding(check, Level.OK, f"{found}, {enough} needed", expected, why)
    level = Level.WARN if enough <= MAX_CONNECTIONS else Level.FAIL
    return Finding(check, level, f"{found}, {enough} would be needed", expected, why, fix)


def buffers(facts: HostFacts, needs: LinkNeeds) -> list[Finding]:
    """Both directions: any host may send or receive."""
    return [
        _buffer(facts, needs, name="send", size=facts.tcp_wmem_max_bytes, share=SEND_SHARE, other="65536"),
        _buffer(facts, needs, name="receive", size=facts.tcp_rmem_max_bytes, share=RECEIVE_SHARE, other="131072"),
    ]


def notsent_lowat(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """The link sets it on its own connections; it only has to exist."""
    why = "an urgent chunk must not wait behind megabytes that the kernel has accepted and not sent"
    expected = "supported; a link sets 256 KiB on each data connection"
    if facts.notsent_lowat_bytes is None:
        return Finding("unsent bytes", Level.WARN, "not supported", expected, why, "use Linux 3.12 or newer")
    found = "no limit" if facts.notsent_lowat_bytes >= 1 << 30 else format_bytes(facts.notsent_lowat_bytes)
    return Finding("unsent bytes", Level.OK, f"supported; this host's default is {found}", expected, why)


def idle_restart(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """A warm link should stay warm."""
    check, expected = "idle restart", "net.ipv4.tcp_slow_start_after_idle = 0"
    why = "otherwise a connection that rested for a moment begins again with ten packets a round trip"
    if not facts.slow_start_after_idle:
        return Finding(check, Level.OK, "off" if facts.slow_start_after_idle is False else "unknown", expected, why)
    # What ten packets carry in their first round trip is all that a short path needs.
    level = Level.WARN if needs.bdp_bytes > 256 * KiB else Level.OK
    fix = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0" if level is Level.WARN else ""
    return Finding(check, level, "on", expected, why, fix)


def tcp_features(facts: HostFacts, needs: LinkNeeds) -> Finding:
    """Window scaling and selective acknowledgements, which somebody may have switched off."""
    check, expected = "TCP features", "window scaling and SACK on"
    why = "without window scaling a connection has at most 64 KiB under way; without SACK one loss costs a window"
    if facts.window_scaling is False:
        fix = "sysctl -w net.ipv4.tcp_window_scaling=1"
        return Finding(check, Level.FAIL, "window scaling is off", expected, why, fix)
    if facts.sack is False:
        return Finding(check, Level.WARN, "SACK is off", expected, why, "sysctl -w net.ipv4.tcp_sack=1")
    return Finding(check, Level.OK, "on", expected, why)
