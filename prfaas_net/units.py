"""Sizes, rates and durations as people write them: ``64MiB``, ``10Gbps``, ``250ms``.

Inside the program every quantity is a plain number whose name ends in its unit (``_bytes``, ``_bps``,
``_s``); this module is the only place where text becomes such a number and back.
"""

from __future__ import annotations

import re

from prfaas_net.errors import ConfigError

__all__ = [
    "GiB",
    "KiB",
    "MiB",
    "format_bytes",
    "format_duration",
    "format_rate",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*$")
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1 << 40, "k": KiB, "m": MiB, "g": GiB,
}  # fmt: skip
_RATES = {"": 1, "bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9, "tbps": 10**12} | {
    "bit/s": 1, "kbit/s": 10**3, "mbit/s": 10**6, "gbit/s": 10**9,
}  # fmt: skip
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0}


def _parse(text: str | int | float, table: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"a {kind} cannot be negative", expected=example, found=text)
        return float(text)
    match = _NUMBER.match(str(text))
    factor = table.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"not a {kind}", expected=f"a number with a unit, such as {example}", found=repr(text))
    return float(match[1]) * factor


def parse_bytes(text: str | int) -> int:
    """``"64MiB"`` to 67108864; a bare number is bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    return int(_parse(text, _BYTES, "size", "64MiB"))


def parse_rate(text: str | int | float) -> int:
    """``"10Gbps"`` to 10_000_000_000 bits per second; a bare number is bits per second.

    Raises:
        ConfigError: the text is not a rate.
    """
    return int(_parse(text, _RATES, "rate", "10Gbps"))


def parse_duration(text: str | int | float) -> float:
    """``"250ms"`` to 0.25 seconds; a bare number is seconds.

    Raises:
        ConfigError: the text is not a duration.
    """
    return _parse(text, _TIMES, "duration", "250ms")


def _scaled(value: float, step: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= step and index < len(names) - 1:
        value /= step
        index += 1
    digits = 0 if index == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {names[index]}"


def format_bytes(n_bytes: float) -> str:
    """1536 to ``1.50 KiB``."""
    return _scaled(float(n_bytes), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_rate(rate_bps: float) -> str:
    """1e9 to ``1.00 Gbps``."""
    return _scaled(float(rate_bps), 1000, ("bps", "kbps", "Mbps", "Gbps", "Tbps"))


def format_duration(duration_s: float) -> str:
    """0.0123 to ``12.3 ms``; 75 to ``75.0 s``."""
    if abs(duration_s) < 1e-3:
        return f"{duration_s * 1e6:.0f} us"
    if abs(duration_s) < 1:
        return f"{duration_s * 1e3:.{1 if abs(duration_s) < 0.1 else 0}f} ms"
    return f"{duration_s:.{2 if abs(duration_s) < 10 else 1}f} s"
