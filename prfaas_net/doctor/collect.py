"""Finding out what a host is like, from /proc and /sys. What cannot be read stays unknown."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path

from prfaas_net.doctor.facts import HostFacts, Interface

__all__ = ["collect"]

# linux/timex.h: struct timex begins with modes (int), then longs; status is the sixth field. 208 bytes on 64 bit.
_TIMEX_BYTES, _STATUS_AT, _STA_UNSYNC = 208, 40, 0x0040
_TIME_ERROR = 5
_UNLIMITED = 1 << 40


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in (_text(path) or "").split()]
    except ValueError:
        return []


def _last(path: Path) -> int | None:
    numbers = _numbers(path)
    return numbers[-1] if numbers else None


def _flag(path: Path) -> bool | None:
    number = _last(path)
    return None if number is None else bool(number)


def _huge_pages(root: Path) -> str | None:
    """The word in brackets of ``always [madvise] never``."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text.partition("[")[2].partition("]")[0] or None


def _interfaces(root: Path) -> tuple[Interface, ...]:
    found = []
    for directory in sorted((root / "sys/class/net").glob("*")):
        mtu = _last(directory / "mtu")
        if directory.name == "lo" or mtu is None or _text(directory / "operstate") == "down":
            continue
        speed_mbps = _last(directory / "speed")
        known = speed_mbps is not None and speed_mbps > 0
        found.append(Interface(directory.name, mtu, speed_mbps * 10**6 if known and speed_mbps else None))
    return tuple(found)


def _clock_synchronized() -> bool | None:
    """What the kernel says (adjtimex); None where it cannot be asked."""
    state = ctypes.create_string_buffer(_TIMEX_BYTES)
    result = ctypes.CDLL(None, use_errno=True).adjtimex(state)
    if result < 0:
        return None
    status = int.from_bytes(state.raw[_STATUS_AT : _STATUS_AT + 4], "little")
    return result != _TIME_ERROR and not status & _STA_UNSYNC


def collect(root: Path = Path("/")) -> HostFacts:
    """This host's facts.

    Args:
        root: where /proc and /sys are looked for.
    """
    ipv4 = root / "proc/sys/net/ipv4"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = _numbers(ipv4 / "ip_local_port_range")
    return HostFacts(
        kernel=platform.release(),
        cpus=len(os.sched_getaffinity(0)),
        privileged=os.geteuid() == 0,
        congestion_available=tuple((_text(ipv4 / "tcp_available_congestion_control") or "").split()),
        congestion_allowed=tuple((_text(ipv4 / "tcp_allowed_congestion_control") or "").split()),
        congestion_default=_text(ipv4 / "tcp_congestion_control"),
        tcp_wmem_max_bytes=_last(ipv4 / "tcp_wmem"),
        tcp_rmem_max_bytes=_last(ipv4 / "tcp_rmem"),
        notsent_lowat_bytes=_last(ipv4 / "tcp_notsent_lowat"),
        slow_start_after_idle=_flag(ipv4 / "tcp_slow_start_after_idle"),
        window_scaling=_flag(ipv4 / "tcp_window_scaling"),
        sack=_flag(ipv4 / "tcp_sack"),
        mtu_probing=_last(ipv4 / "tcp_mtu_probing"),
        huge_pages=_huge_pages(root),
        interfaces=_interfaces(root),
        clock_source=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_synchronized=_clock_synchronized(),
        open_files_soft=soft if soft >= 0 else _UNLIMITED,
        open_files_hard=hard if hard >= 0 else _UNLIMITED,
        first_port=ports[0] if len(ports) == 2 else None,
        last_port=ports[1] if len(ports) == 2 else None,
    )
