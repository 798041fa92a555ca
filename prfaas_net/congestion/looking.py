"""When to look at a link, and which of its verdicts are news."""

from __future__ import annotations

from prfaas_net.congestion.verdict import UNKNOWN, LinkState, Verdict

__all__ = ["LOOK_IDLE_S", "LOOK_MANY_S", "LOOK_S", "VerdictNews", "look_within_s"]

# Seconds from one look to the next, uniform between two bounds, so that no look keeps step with what the path does
# (Poisson in ndt7, for the same reason). A link with many connections is looked at a little less often.
LOOK_S, LOOK_MANY_S, MANY_CONNECTIONS = (0.010, 0.030), (0.030, 0.050), 8
LOOK_IDLE_S = (0.200, 0.300)
# Besides every change of state: when what is available has changed by so much, at most so often.
NEWS_SHARE, NEWS_EVERY_S = 0.1, 0.1


def look_within_s(state: LinkState, *, in_use: bool, connections: int) -> tuple[float, float]:
    """Bounds of the seconds until the next look.

    Args:
        in_use: a transfer has not ended.
    """
    if state is LinkState.IDLE and not in_use:
        return LOOK_IDLE_S
    return LOOK_S if connections <= MANY_CONNECTIONS else LOOK_MANY_S


class VerdictNews:
    """Verdicts in; whether somebody should be told."""

    def __init__(self) -> None:
        self._told = UNKNOWN

    def is_news(self, verdict: Verdict) -> bool:
        """Whether it differs enough from the last one that was told; then it counts as told."""
        if not self._differs(verdict):
            return False
        self._told = verdict
        return True

    def _differs(self, verdict: Verdict) -> bool:
        told = self._told
        if verdict.state is not told.state or verdict.cause is not told.cause:
            return True
        if verdict.at_s - told.at_s < NEWS_EVERY_S:
            return False
        new, old = verdict.available_bps or 0.0, told.available_bps or 0.0
        return abs(new - old) > NEWS_SHARE * max(new, old)
