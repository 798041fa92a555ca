"""The detector that links use: several signals, and names for everything that only looks like congestion.

A queue that we did not make is growing: ``BUILDING``. It is ``CONGESTED`` once something is lost or missing too, or the
queue is deep and still grows, or stands. A link that waits for its receiver, its send buffer or its application is
never called congested, and neither is one that we fill ourselves because it is not paced below what it carries.
"""

from __future__ import annotations

import math
from dataclasses import replace

from prfaas_net.congestion.bandwidth import BandwidthEstimator
from prfaas_net.congestion.detector import Detector
from prfaas_net.congestion.lateness import Lateness
from prfaas_net.congestion.reading import ECN_HARD, ECN_SOFT, Reader, Reading
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.signals import SignalTracker, Step
from prfaas_net.congestion.verdict import UNKNOWN, Cause, Evidence, LinkState, Verdict

__all__ = ["PathDetector"]

# Nothing came back for so long, and the kernel has timed out.
DOWN_S, DOWN_RTTS = 0.5, 5.0
# Nothing was under way for so long.
IDLE_S, IDLE_RTTS = 0.2, 2.0
# A queue this many times what counts is deep.
DEEP = 2.0
# While a queue grows, less arrives than is sent. Where as much arrives as if none grew (a shortfall so far below 0,
# which is what growing round trips excuse), the acknowledgements were late, and not the data.
KEEPS_UP = -0.5
# A deep queue that has lasted so long and still moves is no longer route; nor is it if less arrives for as long. (A
# machine that stands still for 50 ms makes a queue and a shortfall too.)
MOVING_S, MOVING_RTTS = 0.2, 4.0
# A queue that is neither deep nor loses anything, but does not go away either.
# (Longer than it takes to tell it from a longer route.)
STANDING_S, STANDING_RTTS = 2.5, 20.0
# A rate that is missing something is others' doing if anything was lost within so long; else it is only growing back.
LOST_S, LOST_RTTS = 1.0, 10.0
# How many looks in a row have to say so before it is said, and how long trouble must be over.
RISE = {LinkState.BUILDING: 2, LinkState.CONGESTED: 2, LinkState.DOWN: 1, LinkState.CLEAR: 1}
RISE_OTHERS = 3
CALM_S, CALM_RTTS, CALM_LOOKS = 0.5, 6.0, 5
# What is left of the confidence in a verdict whose link was not measured for long.
KNOWN_STATE = 0.3
_TROUBLED = (LinkState.BUILDING, LinkState.CONGESTED)
_SIGNALS = ("queue", "shortfall", "loss", "ecn", "host", "app")


class PathDetector(Detector):
    """
    Args:
        congestion_control: of the data connections; BBR loses more before it means anything, and sends next to
            nothing for 200 ms every 10 s.
    """

    name = "prfaas"

    def __init__(self, congestion_control: str) -> None:
        self._tracker = SignalTracker(congestion_control)
        self._reader = Reader(congestion_control)
        self._bandwidth = BandwidthEstimator()
        self._lateness = Lateness()
        self._verdict = UNKNOWN
        self._since_s: dict[str, float] = {}
        self._lasted_s: dict[str, float] = {}
        self._wanted, self._wanted_looks = LinkState.IDLE, 0
        self._calm_since_s: float | None = None
        self._calm_looks = 0
        self._quiet_since_s: float | None = None
        self._looks = 0

    def observe(self, sample: LinkSample) -> Verdict:
        step = self._tracker.add(sample)
        if step is None:
            if not self._looks and math.isfinite(sample.at_s):
                self._verdict = replace(UNKNOWN, at_s=sample.at_s, since_s=sample.at_s)
            return self._verdict
        self._looks += 1
        reading = self._reader.add(step, troubled=self._verdict.state in _TROUBLED)
        self._lateness.add(step, reading.base_s, idle=self._verdict.state is LinkState.IDLE)
        self._note(step, reading)
        wanted = self._classify(step, reading)
        state = self._settle(wanted, reading)
        self._estimate(step, reading)
        self._verdict = self._make(state, step, reading)
        return self._verdict

    # -- signals ------------------------------------------------------------------------------------------------

    def _note(self, step: Step, reading: Reading) -> None:
        """Since when each signal counts."""
        on = {name: getattr(reading, name) >= 1 for name in _SIGNALS}
        on["stalled"] = step.stalled_s > 0 and step.timeouts > 0
        on["closed"] = not step.alive
        on["late"] = self._lateness.doubtful
        for name, counts in on.items():
            if not counts:
                self._since_s.pop(name, None)
                self._lasted_s.pop(name, None)
            elif name not in self._since_s:
                self._since_s[name], self._lasted_s[name] = step.at_s, 0.0
            elif not self._lateness.doubtful:
                self._lasted_s[name] += step.dt_s
        if step.sending or step.backlog_bytes > 0:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = step.at_s

    def _lasted(self, signal: str) -> float:
        """Seconds; those in which the machine itself may be to blame do not count."""
        return self._lasted_s.get(signal, 0.0)

    def _classify(self, step: Step, reading: Reading) -> LinkState:
        """What this look alone says."""
        if not step.alive:
            return LinkState.DOWN
        if step.timeouts and step.stalled_s > max(DOWN_S, DOWN_RTTS * reading.base_s):
            return LinkState.DOWN
        if self._quiet_since_s is not None:
            quiet_s = step.at_s - self._quiet_since_s
            return LinkState.IDLE if quiet_s > max(IDLE_S, IDLE_RTTS * reading.base_s) else self._calm(reading)
        if reading.host >= 1:
            return LinkState.HOST_LIMITED
        if reading.ours or (reading.app >= 1 and not reading.paced):
            return self._calm(reading)
        trouble = self._trouble(reading)
        if trouble is not None and self._lateness.doubtful and not self._beyond_doubt(reading):
            # Not ours to say now: it stays what it was, and what was clear waits for its host.
            return self._verdict.state if self._verdict.state in _TROUBLED else LinkState.HOST_LIMITED
        return trouble or self._calm(reading)

    @staticmethod
    def _beyond_doubt(reading: Reading) -> bool:
        """A machine that stands still loses nothing, or little, and marks nothing."""
        return (reading.loss >= 1 and reading.app < 1) or reading.ecn >= 1

    def _trouble(self, reading: Reading) -> LinkState | None:
        queue, app = reading.queue >= 1, reading.app >= 1
        missing = reading.shortfall >= 1
        queued_s = self._lasted("queue")
        moving_s = max(MOVING_S, MOVING_RTTS * reading.base_s)
        standing_s = max(STANDING_S, STANDING_RTTS * reading.base_s)
        if (
            (reading.loss >= 1 and not app)
            or reading.ecn * ECN_SOFT >= ECN_HARD
            or (queue and reading.lossy)
            or min(queued_s, self._lasted("shortfall")) > moving_s
            or (reading.queue >= DEEP and reading.growing and reading.shortfall > KEEPS_UP)
            or (reading.queue >= DEEP and reading.moving and queued_s > moving_s)
            or queued_s > standing_s
        ):
            return LinkState.CONGESTED
        lost_lately = reading.lost_s < max(LOST_S, LOST_RTTS * reading.base_s)
        if queue or reading.ecn >= 1 or (missing and lost_lately and not app):
            return LinkState.BUILDING
        return None

    @staticmethod
    def _calm(reading: Reading) -> LinkState:
        return LinkState.APP_LIMITED if reading.app >= 1 else LinkState.CLEAR

    # -- states -------------------------------------------------------------------------------------------------

    def _settle(self, wanted: LinkState, reading: Reading) -> LinkState:
        """Hysteresis: trouble is believed after two looks, and over after it has been for a while."""
        state, now = self._verdict.state, reading.at_s
        self._wanted_looks = self._wanted_looks + 1 if wanted is self._wanted else 1
        self._wanted = wanted
        if state in _TROUBLED:
            if wanted is LinkState.CONGESTED or wanted is state:
                self._calm_since_s, self._calm_looks = None, 0
                return wanted if self._wanted_looks >= RISE[wanted] else state
            if wanted is LinkState.DOWN:
                return wanted
            self._calm_since_s = now if self._calm_since_s is None else self._calm_since_s
            self._calm_looks += 1
            long_enough = now - self._calm_since_s >= max(CALM_S, CALM_RTTS * reading.base_s)
            return wanted if long_enough and self._calm_looks >= CALM_LOOKS else state
        if state is LinkState.DOWN and wanted is not state:
            self._reader.begin_again()
        self._calm_since_s, self._calm_looks = None, 0
        if wanted is LinkState.CONGESTED and self._wanted_looks < RISE[wanted]:
            return state
        return wanted if self._wanted_looks >= RISE.get(wanted, RISE_OTHERS) else state

    def _estimate(self, step: Step, reading: Reading) -> None:
        if step.sending:
            self._bandwidth.sending(reading.rate_bps, now=step.at_s)
        if reading.settled and not reading.limited and step.sending:
            self._bandwidth.add(reading.rate_bps, round_s=max(0.1, 2 * reading.base_s), now=step.at_s)
        else:
            self._bandwidth.carried(reading.rate_bps, paced_bps=step.paced_bps, now=step.at_s)

    def _make(self, state: LinkState, step: Step, reading: Reading) -> Verdict:
        now = step.at_s
        strengths = {name: getattr(reading, name) for name in _SIGNALS} | {
            "stalled": step.stalled_s / max(DOWN_S, DOWN_RTTS * reading.base_s),
            "closed": 1.0,
            "late": self._lateness.strength,
        }
        evidence = tuple(Evidence(name, strengths[name], since_s) for name, since_s in self._since_s.items())
        return Verdict(
            state=state,
            at_s=now,
            since_s=self._verdict.since_s if state is self._verdict.state else now,
            cause=self._cause(state, reading),
            evidence=evidence,
            available_bps=self._bandwidth.rate_bps,
            available_error=self._bandwidth.error,
            steady_bps=self._bandwidth.steady_bps,
            base_rtt_s=reading.base_s,
            queueing_delay_s=reading.queue_s,
            goodput_bps=reading.rate_bps,
            retransmitted_share=reading.retransmitted_share,
            backlog_bytes=step.backlog_bytes,
            confidence=self._confidence(state, step, evidence),
        )

    @staticmethod
    def _cause(state: LinkState, reading: Reading) -> Cause | None:
        if state in _TROUBLED:
            return Cause.OTHERS
        full = reading.queue >= 1 or reading.loss >= 1
        return Cause.OURS if state is LinkState.CLEAR and reading.ours and full else None

    def _confidence(self, state: LinkState, step: Step, evidence: tuple[Evidence, ...]) -> float:
        """How much was seen, times how lately, times how far from the threshold. A state is known at once; what a link
        could carry is known less and less while it is not asked."""
        seen = min(1.0, self._looks / 20)
        lately = min(1.0, 0.1 / step.dt_s)
        strongest = max((item.strength for item in evidence), default=0.0)
        clear = strongest / (1 + strongest) if state in _TROUBLED else 1 / (1 + strongest / 4)
        return seen * lately * clear * (KNOWN_STATE + (1 - KNOWN_STATE) * self._bandwidth.trust(step.at_s))
