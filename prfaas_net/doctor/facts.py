"""What is known of a host, as plain data: collected, recorded, or made up by a test."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HostFacts", "Interface"]


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and not loopback.

    Attributes:
        speed_bps: None where the driver does not say.
    """

    name: str
    mtu_bytes: int
    speed_bps: int | None = None


@dataclass(frozen=True)
class HostFacts:
    """One host. None: it could not be found out.

    Attributes:
        tcp_wmem_max_bytes: what autotuning may give a sending connection; ``tcp_rmem_max_bytes`` a receiving one.
        privileged: may use a congestion control that is not allowed to everybody.
        huge_pages: mode of transparent huge pages: always, madvise or never.
        clock_synchronized: whether the kernel's clock is kept by NTP or PTP.
    """

    kernel: str = ""
    cpus: int = 1
    privileged: bool = False
    congestion_available: tuple[str, ...] = ()
    congestion_allowed: tuple[str, ...] = ()
    congestion_default: str | None = None
    tcp_wmem_max_bytes: int | None = None
    tcp_rmem_max_bytes: int | None = None
    notsent_lowat_bytes: int | None = None
    slow_start_after_idle: bool | None = None
    window_scaling: bool | None = None
    sack: bool | None = None
    mtu_probing: int | None = None
    huge_pages: str | None = None
    interfaces: tuple[Interface, ...] = ()
    clock_source: str | None = None
    clock_synchronized: bool | None = None
    open_files_soft: int | None = None
    open_files_hard: int | None = None
    first_port: int | None = None
    last_port: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For a report, or a recording."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> HostFacts:
        """A recording."""
        values: dict[str, Any] = dict(body)
        for name in ("congestion_available", "congestion_allowed"):
            values[name] = tuple(body.get(name, ()))
        values["interfaces"] = tuple(Interface(**each) for each in body.get("interfaces", ()))
        return cls(**values)
