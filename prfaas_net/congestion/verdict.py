"""What a detector says of a link: plain frozen data that transport, nodes and scheduling may all name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["UNKNOWN", "Cause", "Evidence", "LinkState", "Verdict"]


class LinkState(StrEnum):
    """What a link is doing. Only ``BUILDING``, ``CONGESTED`` and ``DOWN`` speak against giving it more work."""

    IDLE = "idle"  # nothing to send
    CLEAR = "clear"  # carries what we send
    BUILDING = "building"  # a queue is growing that is not ours, or the path carries less than it did
    CONGESTED = "congested"  # others, or the path, have taken what we had
    HOST_LIMITED = "host-limited"  # the receiver or our own buffers are the limit
    APP_LIMITED = "app-limited"  # we offer less than the path carries
    DOWN = "down"  # nothing comes back, or nobody is there


class Cause(StrEnum):
    """Whose traffic fills a saturated link."""

    OURS = "ours"
    OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A signal that speaks for a state.

    Attributes:
        signal: ``queue``, ``shortfall``, ``loss``, ``ecn``, ``host``, ``app``, ``late``, ``stalled`` or ``closed``.
        strength: 1 is just enough for the signal to count.
        since_s: when it began to count, on the clock of the samples.
    """

    signal: str
    strength: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A link at one moment.

    Attributes:
        at_s: of the sample that it rests on; ``since_s``: when the state was entered.
        cause: whose traffic fills the link, where it is full; a clear link may be full of our own.
        available_bps: what the link could carry for us now, of payload; a lower bound while we are paced below it. None
            if that was not measured in the last half minute: a link that was never filled is not known to be thin.
        available_error: how far its measurements lie apart, as a share of it; more and more while there are none.
        steady_bps: what arrived on the mean over the last second in which there was something to send.
        queueing_delay_s: smoothed round trip less ``base_rtt_s``, the round trip of the empty path.
        goodput_bps: of payload that arrived, over the last round trips.
        retransmitted_share: of bytes sent, over the last half second or 4 round trips.
        drain_s: how long the backlog takes at ``available_bps``, or at ``steady_bps`` where that is more: a pause of a
            moment is not what the link carries. None if the former is unknown.
        confidence: 0 to 1; how much was measured, how lately, and how clear it is.
    """

    state: LinkState
    at_s: float
    since_s: float
    cause: Cause | None = None
    evidence: tuple[Evidence, ...] = ()
    available_bps: float | None = None
    available_error: float = 0.0
    steady_bps: float = 0.0
    base_rtt_s: float = 0.0
    queueing_delay_s: float = 0.0
    goodput_bps: float = 0.0
    retransmitted_share: float = 0.0
    backlog_bytes: int = 0
    confidence: float = 0.0

    @property
    def drain_s(self) -> float | None:
        if self.backlog_bytes <= 0:
            return 0.0
        return 8 * self.backlog_bytes / max(self.available_bps, self.steady_bps) if self.available_bps else None

    @property
    def congested(self) -> bool:
        """Whether others have the capacity, or it is gone."""
        return self.state in (LinkState.CONGESTED, LinkState.DOWN)

    def to_json(self) -> dict[str, Any]:
        """For metrics, logs and state streams."""
        return {**asdict(self), "state": self.state.value, "drain_s": self.drain_s}


UNKNOWN = Verdict(LinkState.IDLE, 0.0, 0.0)
