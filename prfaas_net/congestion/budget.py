"""A link's pacing budget, as its verdicts make it: down at once by a factor, up again step by step."""

from __future__ import annotations

from prfaas_net.congestion.verdict import LinkState, Verdict

__all__ = ["BudgetFollower"]

# Where the path does not carry what we pace, the budget goes down by this factor, once a round trip, to what arrives.
# (CUBIC's beta, RFC 9438.)
CUT = 0.7
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
FORGET_S = 10.0
FLOOR_SHARE = 0.05


class BudgetFollower:
    """Verdicts in, a budget in bits a second out, never above what is configured.

    Args:
        configured_bps: the operator's egress budget for the link.
    """

    def __init__(self, configured_bps: int) -> None:
        self.configured_bps = configured_bps
        self.budget_bps = configured_bps
        self._cut_at_s: float | None = None
        self._eased_at_s: float | None = None
        self._eased = 0
        self._stepped_at_s: float | None = None
        self._trouble_at_s: float | None = None

    def follow(self, verdict: Verdict, *, now: float) -> int:
        """The budget from now on."""
        rtt_s = max(ROUND_LEAST_S, verdict.base_rtt_s + verdict.queueing_delay_s)
        if verdict.state in (LinkState.CONGESTED, LinkState.BUILDING, LinkState.DOWN):
            self._trouble_at_s = now
        if verdict.state in (LinkState.CONGESTED, LinkState.BUILDING):
            self._cut(verdict, rtt_s, now)
        elif self.budget_bps < self.configured_bps and self._may_grow(verdict, now):
            self._eased = 0
            self._grow(max(STEP_LEAST_S, STEP_RTTS * rtt_s), now)
        return self.budget_bps

    def _cut(self, verdict: Verdict, rtt_s: float, now: float) -> None:
        if self._cut_at_s is not None and now - self._cut_at_s < rtt_s:
            return  # the last cut cannot have shown yet
        if verdict.state is LinkState.CONGESTED and verdict.goodput_bps < CARRIED_SHARE * self.budget_bps:
            wanted = max(CUT * self.budget_bps, verdict.goodput_bps)
        elif self._eased < CUTS_QUEUED and (self._eased_at_s is None or now - self._eased_at_s >= CUT_QUEUED_EVERY_S):
            wanted = CUT_QUEUED * self.budget_bps
            self._eased_at_s = now
            self._eased += 1
        else:
            return
        self._cut_at_s = now
        self.budget_bps = max(int(FLOOR_SHARE * self.configured_bps), int(wanted))

    def _may_grow(self, verdict: Verdict, now: float) -> bool:
        calm_s = FORGET_S if self._trouble_at_s is None else now - self._trouble_at_s
        if verdict.state is LinkState.CLEAR:
            return calm_s >= CALM_S and verdict.goodput_bps >= CARRIED_SHARE * CUT * self.budget_bps
        return verdict.state is not LinkState.BUILDING and verdict.state is not LinkState.DOWN and calm_s >= FORGET_S

    def _grow(self, every_s: float, now: float) -> None:
        if self._stepped_at_s is None or now - self._stepped_at_s >= every_s:
            self._stepped_at_s = now
            step_bps = int(STEP_SHARE * self.configured_bps) + 1
            self.budget_bps = min(self.configured_bps, self.budget_bps + step_bps)
