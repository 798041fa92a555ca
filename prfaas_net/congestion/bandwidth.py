"""What a link could carry now, from what it carried while it was asked for more."""

from __future__ import annotations

import math

__all__ = ["BandwidthEstimator"]

# What a link carried so long ago says nothing of now.
FORGET_S = 30.0
# Until then it goes back to what the link is paced to, by so much a second, and is believed half as much each time.
RETURN_S, HALF_LIFE_S = 10.0, 10.0
# The mean that a backlog is reckoned by: a retransmission timeout is a pause of 200 ms, not a link of nothing.
STEADY_S = 1.0


class BandwidthEstimator:
    """Delivery rates in, an estimate and its error out.

    Only rates that were the link's own limit may be added: not cut short by the application, the receiver or the
    send buffer. A link that is paced shows its pace until it carries less, so while it is clear the estimate is a
    lower bound.

    Attributes:
        rate_bps: the estimate; None while there is none.
        error: how far its measurements lie apart, as a share of it; grows while there is none.
        steady_bps: what arrived on the mean over the last second, while there was something to send.
    """

    def __init__(self) -> None:
        self.rate_bps: float | None = None
        self.error = 0.0
        self.steady_bps = 0.0
        self._at_s: float | None = None
        self._aged_at_s = 0.0
        self._sent_at_s: float | None = None

    def add(self, rate_bps: float, *, round_s: float, now: float) -> None:
        """Take a rate measured over the last ``round_s``, as often as one likes: it counts by time.

        After one more round most of what the estimate said before is forgotten; slower ones were further off.
        """
        if rate_bps <= 0:
            return
        if self.rate_bps is None or self._at_s is None:
            self.rate_bps, self._at_s = rate_bps, now
            return
        weight = min(1.0, max(0.0, now - self._at_s) / max(round_s, 1e-3))
        self._at_s = now
        off = abs(rate_bps - self.rate_bps) / max(rate_bps, self.rate_bps)
        self.error += weight * (off - self.error)
        self.rate_bps += weight * (rate_bps - self.rate_bps)

    def sending(self, rate_bps: float, *, now: float) -> None:
        """So much arrives, and there is more to send, whatever the limit is."""
        last_s, self._sent_at_s = self._sent_at_s, now
        if last_s is None or now - last_s > STEADY_S:
            self.steady_bps = rate_bps
        elif now > last_s:
            self.steady_bps += (1 - math.exp((last_s - now) / STEADY_S)) * (rate_bps - self.steady_bps)

    def carried(self, rate_bps: float, *, paced_bps: float | None, now: float) -> None:
        """It has carried this much, and something else was the limit: it could carry no less.

        That alone makes no estimate, and one that is old goes back to what the link is paced to, if it was less, until
        it is none any more: transfers will show.
        """
        if self.rate_bps is None or self._at_s is None:
            return
        passed_s = max(0.0, now - max(self._aged_at_s, self._at_s))
        self._aged_at_s = now
        if now - self._at_s > FORGET_S:
            self.rate_bps, self.error, self._at_s = None, 0.0, None
            return
        share = 1 - math.exp(-passed_s / RETURN_S)
        self.error += share * (1 - self.error)
        hoped_bps = max(rate_bps, paced_bps or 0.0)
        if rate_bps > self.rate_bps:
            self.rate_bps = rate_bps
        elif hoped_bps > self.rate_bps:
            self.rate_bps += share * (hoped_bps - self.rate_bps)

    def trust(self, now: float) -> float:
        """0 to 1: how much of what was measured still holds; 0 without an estimate."""
        return 0.0 if self._at_s is None else 0.5 ** (max(0.0, now - self._at_s) / HALF_LIFE_S)
