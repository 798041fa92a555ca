"""Findings: what was found, what is expected, why it matters, and the exact fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from prfaas_net.errors import ConfigError
from prfaas_net.units import parse_duration, parse_rate

__all__ = ["Finding", "Level", "LinkNeeds", "parse_needs"]


class Level(Enum):
    """How bad it is: OK, slower than it could be (WARN), or not good enough to run the link (FAIL)."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One check's result. ``fix``: what to type, empty when nothing needs fixing."""

    check: str
    level: Level
    found: str
    expected: str
    why: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "level": self.level.value}


@dataclass(frozen=True)
class LinkNeeds:
    """The link that the host is to carry."""

    rate_bps: int = 10 * 10**9
    rtt_s: float = 0.02
    connections: int = 4

    @property
    def bdp_bytes(self) -> int:
        """Bandwidth-delay product: what is under way when the link is full."""
        return int(self.rate_bps / 8 * self.rtt_s)


def parse_needs(text: str) -> LinkNeeds:
    """``"10Gbps,20ms"``.

    Raises:
        ConfigError: it is something else.
    """
    parts = text.split(",")
    if len(parts) != 2:
        raise ConfigError("not a link", expected="RATE,RTT such as 10Gbps,20ms", found=repr(text))
    needs = LinkNeeds(parse_rate(parts[0]), parse_duration(parts[1]))
    if needs.rate_bps <= 0:
        raise ConfigError("a link needs a rate", expected="RATE,RTT such as 10Gbps,20ms", found=repr(text))
    return needs
