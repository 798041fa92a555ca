"""Whether the machine that looks at a link stood still: what its sockets say then, and just after, is about itself."""

from __future__ import annotations

from prfaas_net.congestion.signals import Step

__all__ = ["Lateness"]

# A look is late if it comes this many times, and at least this much, after the usual time between two.
LATE_TIMES, LATE_LEAST_S = 1.8, 0.016
# How the usual time is learnt: by the look, none counted as more than twice what is usual.
GAIN = 1 / 16
# What has piled up in the meantime drains at what the path has to spare: for a load of two thirds, twice the gap; then
# a round trip until smoothed ones have forgotten it.
DRAIN_TIMES, DRAIN_RTTS, DRAIN_MOST_S = 2.0, 1.0, 1.0
# Where others queue, acknowledgements still come at the pace of the bottleneck. Where next to none comes between two
# looks, of so many segments that should, they were held up in one place (the receiver's machine, or this one) and come
# in heaps, and each heap's round trips are too long by the wait.
HEAP_SHARE, HEAP_SEGMENTS, SEGMENT_BYTES = 0.15, 16, 1448
HEAP_RTTS = 3.0


class Lateness:
    """Steps in; how much they should be doubted.

    Attributes:
        strength: 1 is just late enough to count; 0 if the last looks came in time.
        doubtful: what is seen now may be the machine's own doing.
    """

    def __init__(self) -> None:
        self.strength = 0.0
        self.doubtful = False
        self._usual_s: float | None = None
        self._until_s = 0.0

    def add(self, step: Step, base_s: float, rate_bps: float, *, idle: bool) -> None:
        """Take a step.

        Args:
            base_s: round trip of the empty path.
            rate_bps: what arrived lately.
            idle: the link had nothing to do, and was looked at seldom for that reason.
        """
        usual_s = step.dt_s if self._usual_s is None else self._usual_s
        if idle:
            self.strength, self.doubtful = 0.0, False
            return
        late_s = step.dt_s - usual_s
        strength = late_s / max(LATE_LEAST_S, (LATE_TIMES - 1) * usual_s)
        self._usual_s = usual_s + GAIN * (min(step.dt_s, 2 * usual_s) - usual_s)
        if strength >= 1:
            self._doubt(step.at_s, strength, DRAIN_TIMES * late_s + DRAIN_RTTS * base_s)
        due_bytes = rate_bps / 8 * step.dt_s
        if step.sending and due_bytes >= HEAP_SEGMENTS * SEGMENT_BYTES and (
            step.delivered_bytes < HEAP_SHARE * due_bytes
        ):  # fmt: skip
            self._doubt(step.at_s, 1.0, DRAIN_TIMES * step.dt_s + HEAP_RTTS * base_s)
        self.doubtful = step.at_s < self._until_s
        if not self.doubtful:
            self.strength = 0.0

    def _doubt(self, now: float, strength: float, lasts_s: float) -> None:
        self._until_s = max(self._until_s, now + min(DRAIN_MOST_S, lasts_s))
        self.strength = max(self.strength, strength)
