"""What one way of a link does to what passes it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from prfaas_net.errors import ConfigError
from prfaas_net.units import KiB

__all__ = ["WAYS", "Counters", "Way", "change"]

# From namespace a to namespace b, and back.
WAYS = ("ab", "ba")
# A queue below this could not take one super-packet of TCP segments, which a real path never sees as one.
MIN_QUEUE_BYTES = 128 * KiB


@dataclass(frozen=True)
class Way:
    """One way of a link. Packets are delayed first, then wait for the bottleneck.

    Attributes:
        rate_bps: of the bottleneck, in bits of IP packets per second; None: there is none.
        delay_ms: one way; the round trip is the sum of both ways.
        jitter_ms: a packet takes up to so much less or more, evenly spread; order is kept.
        loss: share of packets, 0 to 1; 1 is a black hole.
        queue_bytes: what may wait for the bottleneck, more is dropped; None: one product of rate and ``2 * delay_ms``,
            at least 128 KiB.
        mark_bytes: mark packets instead (ECN) while more than this waits; None: never.
    """

    rate_bps: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_bytes: int | None = None
    mark_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss <= 1.0:
            raise ConfigError("not a loss", expected="a share between 0 and 1", found=self.loss)
        for name in ("rate_bps", "queue_bytes", "mark_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0", found=value, do="use None for a link without it")
        for name in ("delay_ms", "jitter_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} cannot be negative", found=getattr(self, name))
        if self.mark_bytes is not None and (self.rate_bps is None or self.mark_bytes >= self.limit_bytes):
            raise ConfigError(
                "marks need a bottleneck and a queue that is longer than where they begin",
                expected="rate_bps, and mark_bytes below queue_bytes",
                found=f"rate_bps {self.rate_bps}, mark_bytes {self.mark_bytes}, queue of {self.limit_bytes} bytes",
            )

    @property
    def limit_bytes(self) -> int:
        """The queue that is in force."""
        if self.queue_bytes is not None:
            return int(self.queue_bytes)
        return max(MIN_QUEUE_BYTES, int((self.rate_bps or 0.0) / 8 * 2 * self.delay_ms / 1e3))


def change(ways: dict[str, Way], way: str | None, changes: dict[str, Any]) -> dict[str, Way]:
    """The settings after a change of one way, or of both.

    Raises:
        ConfigError: there is no such way or setting, or its value cannot be.
    """
    names = WAYS if way is None else (way,)
    known = [field.name for field in fields(Way)]
    for name in names:
        if name not in WAYS:
            raise ConfigError("no such way", expected="ab or ba", found=repr(name))
    for name in changes:
        if name not in known:
            raise ConfigError("no such setting of a link", expected=f"one of {', '.join(known)}", found=repr(name))
    return {name: replace(before, **changes) if name in names else before for name, before in ways.items()}


@dataclass(frozen=True)
class Counters:
    """Of one way, since the link stands.

    Attributes:
        packets, bytes: that passed (netem) or came in (tun), by segment.
        lost: at random; netem counts a super-packet of TCP segments as one.
        dropped: the queue was full; counted alike.
        marked: with a congestion mark; counted alike.
    """

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    dropped: int = 0
    marked: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counters)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counters)))
