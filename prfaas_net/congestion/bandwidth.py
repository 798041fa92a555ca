"""What a link could carry now, from what it carried while it was asked for more."""

from __future__ import annotations

__all__ = ["BandwidthEstimator"]

# What a link carried so long ago says nothing of now.
FORGET_S = 30.0


class BandwidthEstimator:
    """Delivery rates in, an estimate and its error out.

    Only rates that were the link's own limit may be added: not cut short by the application, the receiver or the
    send buffer. A link that is paced shows its pace until it carries less, so while it is clear the estimate is a
    lower bound.
    """

    def __init__(self) -> None:
        self.rate_bps: float | None = None
        self.error = 0.0
        self._at_s = 0.0

    def add(self, rate_bps: float, *, round_s: float, now: float) -> None:
        """Take a rate measured over the last ``round_s``, as often as one likes: it counts by time.

        After one more round most of what the estimate said before is forgotten; slower ones were further off.
        """
        if rate_bps <= 0:
            return
        if self.rate_bps is None:
            self.rate_bps, self._at_s = rate_bps, now
            return
        weight = min(1.0, max(0.0, now - self._at_s) / max(round_s, 1e-3))
        self._at_s = now
        off = abs(rate_bps - self.rate_bps) / max(rate_bps, self.rate_bps)
        self.error += weight * (off - self.error)
        self.rate_bps += weight * (rate_bps - self.rate_bps)

    def carried(self, rate_bps: float, *, now: float) -> None:
        """It has carried this much, and something else was the limit: it could carry no less.

        That alone makes no estimate, and one that is old is none any more.
        """
        if self.rate_bps is None:
            return
        if now - self._at_s > FORGET_S:
            self.rate_bps, self.error = None, 0.0
        elif rate_bps > self.rate_bps:
            self.rate_bps = rate_bps
