"""All checks, in the order in which somebody would look."""

from __future__ import annotations

from prfaas_net.doctor import host, tcp
from prfaas_net.doctor.facts import HostFacts
from prfaas_net.doctor.findings import Finding, Level, LinkNeeds

__all__ = ["examine", "worst"]

_SEVERITY = [Level.OK, Level.WARN, Level.FAIL]


def examine(facts: HostFacts, needs: LinkNeeds) -> list[Finding]:
    """What the facts mean for this link."""
    return [
        tcp.congestion_control(facts, needs),
        *tcp.buffers(facts, needs),
        tcp.idle_restart(facts, needs),
        tcp.notsent_lowat(facts, needs),
        tcp.tcp_features(facts, needs),
        host.mtu(facts, needs),
        host.huge_pages(facts, needs),
        host.cpus(facts, needs),
        *host.clock(facts, needs),
        host.open_files(facts, needs),
        host.ports(facts, needs),
    ]


def worst(findings: list[Finding]) -> Level:
    """The level of the whole."""
    return max((finding.level for finding in findings), key=_SEVERITY.index, default=Level.OK)
