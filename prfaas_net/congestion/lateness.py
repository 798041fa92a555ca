"""Whether the machine that looks at a link stood still: what its sockets say then, and just after, is about itself."""

from __future__ import annotations

from prfaas_net.congestion.signals import Step

__all__ = ["Lateness"]

# A look is late if it comes this many times, and at least this much, after the usual time between two.
LATE_TIMES, LATE_LEAST_S = 2.0, 0.025
# How the usual time is learnt: by the look, none counted as more than twice what is usual.
GAIN = 1 / 16
# What has piled up in the meantime drains at what the path has to spare: for a load of three quarters, three times the
# gap; then three round trips until smoothed ones have forgotten it (they take one in eight of each sample).
DRAIN_TIMES, DRAIN_RTTS, DRAIN_MOST_S = 2.0, 1.0, 1.0


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

    def add(self, step: Step, base_s: float, *, idle: bool) -> None:
        """Take a step.

        Args:
            base_s: round trip of the empty path.
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
            lasts_s = min(DRAIN_MOST_S, DRAIN_TIMES * late_s + DRAIN_RTTS * base_s)
            self._until_s = max(self._until_s, step.at_s + lasts_s)
            self.strength = max(self.strength, strength)
        self.doubtful = step.at_s < self._until_s
        if not self.doubtful:
            self.strength = 0.0
