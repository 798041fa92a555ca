"""Signals of a link over its windows: how strong each is now, and since when."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from prfaas_net.congestion.base_rtt import BaseRtt
from prfaas_net.congestion.signals import Step
from prfaas_net.congestion.windows import WindowedMax, WindowedSums

__all__ = ["Reader", "Reading"]

# Loss, marks and limits are shares of the last half second or 4 round trips; rates of two round trips.
LONG_S, LONG_RTTS = 0.5, 4.0
SHORT_S, SHORT_RTTS = 0.1, 2.0
# A queue counts above a share of the empty path's round trip, within bounds (as in HyStart++, RFC 9406, whose upper
# bound is 16 ms), and above what the path does while it is clear.
QUEUE_SHARE, QUEUE_LEAST_S, QUEUE_MOST_S = 1 / 8, 4e-3, 8e-3
QUEUE_DEVIATIONS, DEVIATION_GAIN = 4.0, 1 / 16
# Of one smoothed round trip alone nobody should be afraid.
QUEUE_SAMPLES = 2
# A queue that is still growing has grown by so much over so many looks.
GROWTH_SAMPLES, GROWTH_S = 3, 1e-3
# It fills at much the same rate all the time. A smoothed round trip that follows a longer route gets there ever slower.
STEADY = 0.5
# One that moves has moved by so much, or by such a share of itself.
MOVED_S, MOVED_SHARE = 2e-3, 0.1
# BBRv1 loses 3 to 4 % on a shallow queue that it fills itself; for the others 2 % is what BBRv3 calls too high.
LOSS_SHARE, LOSS_SHARE_BBR = 0.02, 0.08
# So many segments make a loss more than an accident.
LOSS_SEGMENTS = 3
SEGMENT_BYTES = 1000
# A share of half a second would outlive its cause by half a second: what was lost longer ago does not count.
LOSS_FRESH_S, LOSS_FRESH_RTTS = 0.2, 3.0
# A rate that is less than this of what the link had, for two round trips, is missing something.
SHORTFALL_SHARE = 0.8
REFERENCE_S = 30.0
# After an idle or application-limited phase a sender starts slowly; so long nothing is missed.
SETTLE_S, SETTLE_RTTS = 0.25, 8.0
# DCTCP's gain, by the segment in groups of a step. BBRv3 calls half of the segments marked too high.
ECN_GAIN, ECN_SOFT, ECN_HARD = 1 / 4, 0.05, 0.5
HOST_SHARE, APP_SHARE = 0.3, 0.5


@dataclass(slots=True)
class Reading:
    """What was read last.

    Attributes:
        queue_s: smoothed round trip less ``base_s``; ``queue``: the same in units of what counts.
        growing: the queue has grown at every one of the last looks; ``moving``: it was not always the same.
        rate_bps: delivered over two round trips; ``reference_bps`` the most of half a minute.
        shortfall, loss, ecn, host, app: strengths; 1 is just enough to count.
        lossy: enough was sent again, in the last round trips, to be more than an accident, whatever its share.
        lost_s: how long ago anything was sent again.
        ours: the path is full of what we send ourselves.
        settled: it is long enough that the link has been asked for all it can.
    """

    at_s: float = 0.0
    base_s: float = 0.0
    rtt_s: float = 0.0
    queue_s: float = 0.0
    queue: float = 0.0
    growing: bool = False
    moving: bool = False
    rate_bps: float = 0.0
    reference_bps: float = 0.0
    shortfall: float = 0.0
    loss: float = 0.0
    lossy: bool = False
    lost_s: float = math.inf
    retransmitted_share: float = 0.0
    ecn: float = 0.0
    host: float = 0.0
    app: float = 0.0
    ours: bool = False
    paced: bool = False
    settled: bool = False
    limited: bool = False


class Reader:
    """Steps in, one reading out, which is overwritten each time."""

    def __init__(self, congestion_control: str) -> None:
        self.now = Reading()
        self._loss_share = LOSS_SHARE_BBR if congestion_control == "bbr" else LOSS_SHARE
        self._base = BaseRtt()
        self._long = WindowedSums(4)  # bytes sent, of them again, host-limited us, app-limited us
        self._short = WindowedSums(4)  # bytes delivered, sent, of them again, host-limited us
        self._reference = WindowedMax()
        self._recent = WindowedMax()  # round trips of the last two, negated
        self._highest, self._lowest = WindowedMax(), WindowedMax()  # queues of the same time, the lowest negated
        self._rtts: deque[float] = deque(maxlen=QUEUE_SAMPLES)
        self._growth: deque[tuple[float, float]] = deque(maxlen=GROWTH_SAMPLES + 1)
        self._quiet_s = self._deviation_s = 0.0
        self._marked_share = 0.0
        self._lost_at_s = self._forgiven_until_s = -math.inf
        self._asked_since_s: float | None = None
        self._probed_s: float | None = None

    def add(self, step: Step, *, troubled: bool) -> Reading:
        """Take a step.

        Args:
            troubled: what the detector made of the steps before; nothing of the clear path is forgotten meanwhile.
        """
        now = self.now
        now.at_s = step.at_s
        self._sum(step)
        self._queue(step, troubled)
        self._rate(step, troubled)
        self._marks(step)
        return now

    def begin_again(self) -> None:
        """The path is back after an outage: what that has cost says nothing of the path."""
        self._asked_since_s = None
        self._lost_at_s = -math.inf
        self._forgiven_until_s = self.now.at_s + max(SETTLE_S, SETTLE_RTTS * self.now.base_s)

    def _sum(self, step: Step) -> None:
        now, long = self.now, self._long
        rtt_s = max(now.rtt_s, now.base_s)
        window_s = max(LONG_S, LONG_RTTS * rtt_s)
        long.add(
            step.at_s, step.dt_s, (step.sent_bytes, step.retrans_bytes, step.host_us, step.app_us), window_s=window_s
        )
        self._short.add(
            step.at_s, step.dt_s, (step.delivered_bytes, step.sent_bytes, step.retrans_bytes, step.host_us),
            window_s=max(SHORT_S, SHORT_RTTS * now.base_s),
        )  # fmt: skip
        sent, again, host_us, app_us = long.sums
        now.retransmitted_share = min(1.0, again / sent) if sent > 0 else 0.0
        if step.retrans_bytes and step.at_s >= self._forgiven_until_s:
            self._lost_at_s = step.at_s
        now.lost_s = step.at_s - self._lost_at_s
        fresh = now.lost_s <= max(LOSS_FRESH_S, LOSS_FRESH_RTTS * now.base_s)
        counts = fresh and again >= LOSS_SEGMENTS * SEGMENT_BYTES
        now.loss = now.retransmitted_share / self._loss_share if counts else 0.0
        now.lossy = fresh and self._short.sums[2] >= LOSS_SEGMENTS * SEGMENT_BYTES
        # Known soon, forgotten late: a slow receiver makes a queue and losses too.
        host_us_per_s = max(host_us / long.time_s, self._short.sums[3] / self._short.time_s, step.host_us / step.dt_s)
        now.host = host_us_per_s / 1e6 / HOST_SHARE
        now.app = app_us / 1e6 / long.time_s / APP_SHARE
        now.limited = now.host >= 1 or now.app >= 1

    def _rate(self, step: Step, troubled: bool) -> None:
        now = self.now
        now.rate_bps = 8 * self._short.sums[0] / max(self._short.time_s, step.dt_s)
        if step.probing:
            self._probed_s = step.at_s
        probing = self._probed_s is not None and step.at_s - self._probed_s < SHORT_S + 3 * now.base_s
        if step.sending and not now.limited:
            self._asked_since_s = step.at_s if self._asked_since_s is None else self._asked_since_s
            asked_s = step.at_s - self._asked_since_s
        else:
            self._asked_since_s, asked_s = None, 0.0
        now.settled = asked_s >= max(SETTLE_S, SETTLE_RTTS * now.base_s) and not probing
        if now.settled:
            self._reference.add(step.at_s, now.rate_bps, window_s=REFERENCE_S if not troubled else 1e9)
        now.reference_bps = self._reference.value or now.rate_bps
        now.paced = step.paced_bps is not None
        hoped_bps = now.reference_bps
        if step.paced_bps is not None:
            hoped_bps = min(hoped_bps, 0.95 * step.paced_bps)
        # While its round trip grows a path delivers less, also if it is only longer than it was.
        self._recent.add(step.at_s, -now.rtt_s, window_s=self._short.time_s)
        grown_s = now.rtt_s + (self._recent.value or -now.rtt_s)
        hoped_bps *= max(0.0, 1 - grown_s / max(self._short.time_s, step.dt_s))
        short = now.settled and hoped_bps > 0
        now.shortfall = (1 - now.rate_bps / hoped_bps) / (1 - SHORTFALL_SHARE) if short else 0.0
        # A path that has once carried what we are paced to is not filled by us.
        free = step.paced_bps is None or now.reference_bps < 0.85 * step.paced_bps
        now.ours = free and now.rate_bps >= SHORTFALL_SHARE * now.reference_bps

    def _queue(self, step: Step, troubled: bool) -> None:
        now = self.now
        if step.srtt_s is None:
            return
        missing = now.lossy or now.shortfall >= 1
        self._rtts.append(step.srtt_s)
        self._base.add(min(self._rtts), step.min_rtt_s, troubled=troubled, missing=missing, now=step.at_s)
        self._growth.append((step.at_s, step.srtt_s))
        now.rtt_s, now.base_s = step.srtt_s, self._base.value_s or step.srtt_s
        now.queue_s = max(0.0, min(self._rtts) - now.base_s)
        least_s = min(QUEUE_MOST_S, max(QUEUE_LEAST_S, QUEUE_SHARE * now.base_s))
        counts_s = max(least_s, self._quiet_s + QUEUE_DEVIATIONS * self._deviation_s)
        now.queue = now.queue_s / counts_s
        now.growing = self._grows()
        for window, value in ((self._highest, now.queue_s), (self._lowest, -now.queue_s)):
            window.add(step.at_s, value, window_s=max(SHORT_S, SHORT_RTTS * now.base_s))
        moved_s = (self._highest.value or 0.0) + (self._lowest.value or 0.0)
        now.moving = moved_s > max(MOVED_S, MOVED_SHARE * now.queue_s)
        if not troubled and now.queue < 1 and not now.limited:
            self._quiet_s += DEVIATION_GAIN * (now.queue_s - self._quiet_s)
            self._deviation_s += DEVIATION_GAIN * (abs(now.queue_s - self._quiet_s) - self._deviation_s)

    def _grows(self) -> bool:
        looks = self._growth
        if len(looks) <= GROWTH_SAMPLES:
            return False
        slopes = []
        for (before_s, low_s), (after_s, high_s) in pairwise(looks):
            if high_s - low_s < GROWTH_S:
                return False
            slopes.append((high_s - low_s) / (after_s - before_s))
        return slopes[-1] >= STEADY * max(slopes)

    def _marks(self, step: Step) -> None:
        if step.ecn and step.delivered:
            self._marked_share += ECN_GAIN * (step.marked / step.delivered - self._marked_share)
        self.now.ecn = self._marked_share / ECN_SOFT
