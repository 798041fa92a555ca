"""The round trip of the empty path, which every queueing delay is measured from."""

from __future__ import annotations

from prfaas_net.congestion.windows import WindowedMax

__all__ = ["BaseRtt"]

# The kernel keeps its minimum for 300 s, so that it lags a change of route by minutes; BBR and Copa forget after 10 s.
WINDOW_S = 30.0
# A smoothed round trip lies above the least one even on an empty path: bursts, delayed acknowledgements.
OVER_MINIMUM_S, OVER_MINIMUM_SHARE = 2e-3, 1 / 16
# A longer route is as flat as the shorter one was; a queue that others make is not, for so long.
FLAT_S, FLAT_RTTS = 1.5, 15
FLAT_RANGE_S, FLAT_RANGE_SHARE = 1.5e-3, 0.06


class BaseRtt:
    """Smoothed round trips in; the least of the last half minute out.

    While the link is in trouble nothing is forgotten: a queue that stands for minutes is still a queue. A step to a
    round trip that then does not move, with nothing lost and nothing missing, is a longer route.
    """

    def __init__(self) -> None:
        self.value_s: float | None = None
        self._negated = WindowedMax()
        self._high, self._low = WindowedMax(), WindowedMax()
        self._whole_since_s: float | None = None
        self._kernel_floor_s = 0.0
        self._troubled_since_s: float | None = None

    def add(self, srtt_s: float, min_rtt_s: float | None, *, troubled: bool, missing: bool, now: float) -> None:
        """Take a round trip.

        Args:
            min_rtt_s: the kernel's minimum.
            troubled: the link is not clear.
            missing: something was lost, or the path carries less than it did.
        """
        if not troubled:
            self._troubled_since_s = None
        elif self._troubled_since_s is None:
            self._troubled_since_s = now
        kept_s = 0.0 if self._troubled_since_s is None else now - self._troubled_since_s
        self._negated.add(now, -srtt_s, window_s=WINDOW_S + kept_s)
        least_s = -(self._negated.value or 0.0)
        if min_rtt_s is not None and min_rtt_s > self._kernel_floor_s:
            least_s = min(least_s, min_rtt_s + max(OVER_MINIMUM_S, OVER_MINIMUM_SHARE * min_rtt_s))
        self.value_s = least_s
        self._look_for_a_longer_route(srtt_s, min_rtt_s, missing, now)

    def _look_for_a_longer_route(self, srtt_s: float, min_rtt_s: float | None, missing: bool, now: float) -> None:
        window_s = max(FLAT_S, FLAT_RTTS * srtt_s)
        self._high.add(now, srtt_s, window_s=window_s)
        self._low.add(now, -srtt_s, window_s=window_s)
        high_s, low_s = self._high.value or srtt_s, -(self._low.value or -srtt_s)
        if missing or self._whole_since_s is None:
            self._whole_since_s = now
        flat = high_s - low_s <= max(FLAT_RANGE_S, FLAT_RANGE_SHARE * low_s)
        assert self.value_s is not None
        if flat and now - self._whole_since_s >= window_s and low_s > self.value_s:
            self.value_s = low_s
            self._negated.clear()
            self._negated.add(now, -low_s, window_s=WINDOW_S)
            self._kernel_floor_s = max(self._kernel_floor_s, min_rtt_s or 0.0)
