"""Detectors that everybody knows, to be compared with: each one signal, one threshold, and no memory to speak of."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from prfaas_net.congestion.detector import Detector
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.signals import SignalTracker, Step
from prfaas_net.congestion.verdict import UNKNOWN, Evidence, LinkState, Verdict
from prfaas_net.congestion.windows import WindowedMax, WindowedSums

__all__ = ["LossShare", "RttIncreasing", "RttRatio"]


class _OneSignal(Detector):
    """Congested while the signal's strength is 1 or more, clear otherwise."""

    signal = ""

    def __init__(self, congestion_control: str) -> None:
        self._tracker = SignalTracker(congestion_control)
        self._verdict = UNKNOWN

    def observe(self, sample: LinkSample) -> Verdict:
        step = self._tracker.add(sample)
        if step is None:
            return self._verdict
        strength = self._strength(step)
        state = LinkState.CONGESTED if strength >= 1 else LinkState.CLEAR
        since_s = self._verdict.since_s if state is self._verdict.state else step.at_s
        evidence = (Evidence(self.signal, strength, since_s),) if strength >= 1 else ()
        self._verdict = replace(self._verdict, state=state, at_s=step.at_s, since_s=since_s, evidence=evidence)
        return self._verdict

    def _strength(self, step: Step) -> float:
        raise NotImplementedError


class RttRatio(_OneSignal):
    """Smoothed round trip above 1.25 times the least of 10 s."""

    name = "rtt-1.25"
    signal = "queue"
    RATIO, WINDOW_S = 1.25, 10.0

    def __init__(self, congestion_control: str) -> None:
        super().__init__(congestion_control)
        self._negated = WindowedMax()
        self._last = 0.0

    def _strength(self, step: Step) -> float:
        if step.srtt_s is not None:
            self._negated.add(step.at_s, -(step.min_rtt_s or step.srtt_s), window_s=self.WINDOW_S)
            self._last = step.srtt_s / (self.RATIO * -(self._negated.value or -1.0))
        return self._last


class LossShare(_OneSignal):
    """More than 2 % of the bytes of the last half second sent again."""

    name = "loss-2%"
    signal = "loss"
    SHARE, WINDOW_S = 0.02, 0.5

    def __init__(self, congestion_control: str) -> None:
        super().__init__(congestion_control)
        self._sums = WindowedSums(2)

    def _strength(self, step: Step) -> float:
        self._sums.add(step.at_s, step.dt_s, (step.sent_bytes, step.retrans_bytes), window_s=self.WINDOW_S)
        sent, again = self._sums.sums
        return again / sent / self.SHARE if sent > 0 else 0.0


class RttIncreasing(_OneSignal):
    """``QuicRttMonitor.is_rtt_increasing`` of aioquic (after HyStart++): the least of five samples a quarter above the
    least that the greatest of five ever was, five times in a row. A bare alarm: it has no end, so each lasts as long
    as the condition."""

    name = "rtt-increasing"
    signal = "queue"
    SIZE, QUARTER = 5, 4

    def __init__(self, congestion_control: str) -> None:
        super().__init__(congestion_control)
        self._last_five: deque[float] = deque(maxlen=self.SIZE)
        self._least_s: float | None = None
        self._increases = 0
        self._high = False

    def _strength(self, step: Step) -> float:
        if step.srtt_s is None:
            return self._increases / self.SIZE if self._high else 0.0
        self._last_five.append(step.srtt_s)
        if len(self._last_five) < self.SIZE:
            return 0.0
        greatest_s = max(self._last_five)
        self._least_s = greatest_s if self._least_s is None else min(self._least_s, greatest_s)
        above_s = min(self._last_five) - self._least_s
        self._high = above_s * self.QUARTER >= self._least_s
        if self._high:
            self._increases += 1
        elif above_s > 0:  # at nothing, or below it, the count stands, as in aioquic
            self._increases = 0
        return self._increases / self.SIZE if self._high else 0.0
