"""What a link could carry beyond its pace, found out by short probes inside its own transfers.

As BBR does (linux/net/ipv4/tcp_bbr.c, bbr_pacing_gain: 5/4, 3/4, then cruising), but only where it can tell anything:
the link is held below what is configured, all of that arrives, and there is enough to send to fill the probe. What is
sent meanwhile is the transfers' own bytes, sooner; there is no padding. A probe that finds nothing is followed by a
moment of less, so that the queue that it made is gone, and the next one comes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prfaas_net.congestion.verdict import LinkState, Verdict

__all__ = ["BandwidthProbe", "ProbeResult"]

# BBR drains with 0.75; here that would look like a rate that is missing something.
GAIN, DRAIN = 1.25, 0.85
# Up for two round trips, which is what goodput is measured over; its echo arrives within one and a half more.
UP_RTTS, ECHO_RTTS, DRAIN_RTTS, LEAST_S = 2.0, 1.5, 1.0, 0.1
# From one probe to the next; twice as long after each that found nothing.
REST_RTTS, REST_LEAST_S, REST_MOST_S = 4.0, 0.2, 15.0
# Of what was paced, so much must have arrived.
CARRIED_SHARE = 0.9
# A queue that has grown by more than this is the probe's own (HyStart++'s least threshold, RFC 9406).
QUEUE_SHARE, QUEUE_LEAST_S = 1 / 8, 4e-3


class _Phase(Enum):
    REST = "rest"
    UP = "up"
    ECHO = "echo"
    DRAIN = "drain"


@dataclass(frozen=True)
class ProbeResult:
    """What a probe has found.

    Attributes:
        rate_bps: the most that arrived, of payload; where ``carried`` the link could carry no less.
        error: how far that lies below what was paced, as a share of it.
        carried: it arrived, and no queue grew.
    """

    at_s: float
    rate_bps: float
    error: float
    carried: bool


class BandwidthProbe:
    """Verdicts in, a gain for the pace out."""

    def __init__(self) -> None:
        self.last: ProbeResult | None = None
        self._phase = _Phase.REST
        self._until_s: float | None = None
        self._failed = 0
        self._paced_bps = 0.0
        self._most_bps = 0.0
        self._queue_s = 0.0

    @property
    def gain(self) -> float:
        """What the budget is to be multiplied by now."""
        return {_Phase.UP: GAIN, _Phase.DRAIN: DRAIN}.get(self._phase, 1.0)

    @property
    def active(self) -> bool:
        """From the probe's first byte until its queue is gone."""
        return self._phase is not _Phase.REST

    def stop(self, *, now: float) -> None:
        """The path is in trouble: there is nothing more to be had, and what was found does not hold."""
        if self.active or self._until_s is None:
            self._rest(now, rtt_s=0.0)

    def step(self, verdict: Verdict, budget_bps: float, room_bps: float, *, now: float) -> ProbeResult | None:
        """Take a verdict of a link that is clear; what a probe that ends now has found.

        Args:
            budget_bps: that the link is held to.
            room_bps: what it may be paced to at most.
        """
        rtt_s = verdict.base_rtt_s + verdict.queueing_delay_s
        if self._phase is _Phase.REST:
            self._begin(verdict, budget_bps, room_bps, rtt_s, now)
            return None
        if self._phase is not _Phase.DRAIN:
            self._most_bps = max(self._most_bps, verdict.goodput_bps)
        if self._until_s is not None and now < self._until_s:
            return None
        if self._phase is _Phase.UP:
            self._enter(_Phase.ECHO, ECHO_RTTS * rtt_s, now)
        elif self._phase is _Phase.ECHO:
            return self._judge(verdict, rtt_s, now)
        else:
            self._rest(now, rtt_s=rtt_s)
        return None

    def _begin(self, verdict: Verdict, budget_bps: float, room_bps: float, rtt_s: float, now: float) -> None:
        if self._until_s is None:
            self._rest(now, rtt_s=rtt_s)
        assert self._until_s is not None
        paced_bps, lasts_s = min(room_bps, GAIN * budget_bps), max(LEAST_S, UP_RTTS * rtt_s)
        enough = 8 * verdict.backlog_bytes >= paced_bps * lasts_s
        if (
            now >= self._until_s
            and verdict.state is LinkState.CLEAR
            and enough
            and paced_bps > budget_bps
            and verdict.goodput_bps >= CARRIED_SHARE * budget_bps
        ):
            self._paced_bps, self._most_bps, self._queue_s = paced_bps, 0.0, verdict.queueing_delay_s
            self._enter(_Phase.UP, lasts_s, now)

    def _judge(self, verdict: Verdict, rtt_s: float, now: float) -> ProbeResult:
        grown_s = verdict.queueing_delay_s - self._queue_s
        whole = grown_s < max(QUEUE_LEAST_S, QUEUE_SHARE * verdict.base_rtt_s)
        carried = whole and self._most_bps >= CARRIED_SHARE * self._paced_bps
        off = abs(self._paced_bps - self._most_bps) / max(self._paced_bps, self._most_bps)
        self.last = ProbeResult(now, self._most_bps, off, carried)
        self._failed = 0 if carried else self._failed + 1
        if carried:
            self._rest(now, rtt_s=rtt_s)
        else:
            self._enter(_Phase.DRAIN, DRAIN_RTTS * rtt_s, now)
        return self.last

    def _enter(self, phase: _Phase, lasts_s: float, now: float) -> None:
        self._phase, self._until_s = phase, now + max(LEAST_S, lasts_s)

    def _rest(self, now: float, *, rtt_s: float) -> None:
        rest_s = max(REST_LEAST_S, REST_RTTS * rtt_s) * 2.0 ** min(self._failed, 10)
        self._phase, self._until_s = _Phase.REST, now + min(REST_MOST_S, rest_s)
