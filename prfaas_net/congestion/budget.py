"""A link's pacing budget, as its verdicts make it: down at once by a factor, up again step by step and by probes."""

from __future__ import annotations

from collections import deque

from prfaas_net.congestion.probe import BandwidthProbe
from prfaas_net.congestion.verdict import LinkState, Verdict

__all__ = ["BudgetFollower"]

# Where the path does not carry what we pace, the budget goes down by this factor, once a round trip, to what arrives.
# (CUBIC's beta, RFC 9438.)
CUT = 0.7
# What arrives is the median of the last 0.8 s or ten round trips (BBR's window), as far as they lie in the congestion:
# a retransmission timeout is a pause of 200 ms, and says nothing of what the path carries. Before half of that has
# been seen, it is cut twice at most.
ARRIVES_S, ARRIVES_RTTS, CUTS_UNSEEN = 0.8, 10.0, 2
# Where it does carry it, but others queue, we give way a little, once a second and three times in all: who only queues
# more, as CUBIC does, would be left everything.
CUT_QUEUED, CUT_QUEUED_EVERY_S, CUTS_QUEUED = 0.85, 1.0, 3
ROUND_LEAST_S = 0.05
# What arrives is that much of the budget, or the path carries less than it.
CARRIED_SHARE = 0.9
# Up by a share of what is configured, every two round trips or tenth of a second, once it has been calm for a while.
STEP_SHARE, STEP_RTTS, STEP_LEAST_S = 0.02, 2.0, 0.1
CALM_S = 0.5
# A link that says nothing of its path (idle, or limited by a host) is given its budget back after so long.
FORGET_S = 3.0
# Whatever happens: too little to see that the path is back would be kept for ever.
FLOOR_SHARE = 0.05
_TROUBLED = (LinkState.CONGESTED, LinkState.BUILDING)


class BudgetFollower:
    """Verdicts in, a pace in bits a second out, never above what is configured.

    Args:
        configured_bps: the operator's egress budget for the link.

    Attributes:
        budget_bps: what the link is held to; the pace is more or less than it while a probe lasts.
    """

    def __init__(self, configured_bps: int) -> None:
        self.configured_bps = configured_bps
        self.budget_bps = configured_bps
        self.probe = BandwidthProbe()
        self._arrived: deque[tuple[float, float]] = deque()
        self._unseen_bps = 0.0
        self._cut_at_s: float | None = None
        self._eased_at_s: float | None = None
        self._eased = 0
        self._stepped_at_s: float | None = None
        self._trouble_at_s: float | None = None

    def follow(self, verdict: Verdict, *, now: float) -> int:
        """What to pace to from now on."""
        rtt_s = max(ROUND_LEAST_S, verdict.base_rtt_s + verdict.queueing_delay_s)
        troubled = verdict.state in _TROUBLED
        if verdict.state is LinkState.CONGESTED:
            self._note(verdict, rtt_s, now)
        if troubled or verdict.state is LinkState.DOWN:
            self._trouble_at_s = now
        if troubled and not (self.probe.active and verdict.state is LinkState.BUILDING):
            self.probe.stop(now=now)
            self._cut(verdict, rtt_s, now)
        elif verdict.state is LinkState.DOWN:
            self.probe.stop(now=now)
        elif self.probe.active or self.budget_bps < self.configured_bps:
            self._rise(verdict, rtt_s, now)
        return min(self.configured_bps, int(self.probe.gain * self.budget_bps))

    def _note(self, verdict: Verdict, rtt_s: float, now: float) -> None:
        """What arrives while the path is congested; what is not of the last second is another congestion's."""
        arrived, window_s = self._arrived, max(ARRIVES_S, ARRIVES_RTTS * rtt_s)
        arrived.append((now, verdict.goodput_bps))
        while arrived[0][0] < now - window_s:
            arrived.popleft()
        if len(arrived) == 1:
            self._unseen_bps = CUT**CUTS_UNSEEN * self.budget_bps
        elif now - arrived[0][0] >= window_s / 2:
            self._unseen_bps = 0.0

    @property
    def _arrives_bps(self) -> float:
        rates = sorted(rate_bps for _, rate_bps in self._arrived)
        return max(rates[len(rates) // 2], self._unseen_bps) if rates else 0.0

    def _cut(self, verdict: Verdict, rtt_s: float, now: float) -> None:
        if self._cut_at_s is not None and now - self._cut_at_s < rtt_s:
            return  # the last cut cannot have shown yet
        arrives_bps = max(verdict.goodput_bps, self._arrives_bps)
        if verdict.state is LinkState.CONGESTED and arrives_bps < CARRIED_SHARE * self.budget_bps:
            wanted = max(CUT * self.budget_bps, arrives_bps)
            self._eased = 0  # they do not only queue
        elif self._eased < CUTS_QUEUED and (self._eased_at_s is None or now - self._eased_at_s >= CUT_QUEUED_EVERY_S):
            wanted = CUT_QUEUED * self.budget_bps
            self._eased_at_s = now
            self._eased += 1
        else:
            return
        self._cut_at_s = now
        self.budget_bps = max(int(FLOOR_SHARE * self.configured_bps), int(wanted))

    def _rise(self, verdict: Verdict, rtt_s: float, now: float) -> None:
        found = None
        if self.probe.active or self._calm(now, CALM_S):
            found = self.probe.step(verdict, self.budget_bps, self.configured_bps, now=now)
        if found is not None and found.carried:
            self.budget_bps = min(self.configured_bps, max(self.budget_bps, int(found.rate_bps)))
        if not self.probe.active and self.budget_bps < self.configured_bps and self._may_step(verdict, now):
            self._eased = 0
            self._step(max(STEP_LEAST_S, STEP_RTTS * rtt_s), now)

    def _calm(self, now: float, for_s: float) -> bool:
        return self._trouble_at_s is None or now - self._trouble_at_s >= for_s

    def _may_step(self, verdict: Verdict, now: float) -> bool:
        if verdict.state is LinkState.CLEAR:
            return self._calm(now, CALM_S) and verdict.goodput_bps >= CARRIED_SHARE * CUT * self.budget_bps
        return verdict.state not in _TROUBLED and self._calm(now, FORGET_S)

    def _step(self, every_s: float, now: float) -> None:
        if self._stepped_at_s is None or now - self._stepped_at_s >= every_s:
            self._stepped_at_s = now
            step_bps = int(STEP_SHARE * self.configured_bps) + 1
            self.budget_bps = min(self.configured_bps, self.budget_bps + step_bps)
