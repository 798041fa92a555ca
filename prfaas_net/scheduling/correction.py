"""What predictions got wrong, per node, and how it corrects the next ones."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Correction"]

# Weight of a new observation: the last ten or so count.
WEIGHT = 0.1
# One observation may be a hiccup: it moves the pace by a factor of two at most, and first observations count more.
MAX_STEP = 2.0
# A node that is this much slower or faster than its profile has the wrong profile.
MAX_PACE = 1000.0


@dataclass(slots=True)
class Correction:
    """Tracks predicted against observed times of one node.

    Attributes:
        pace: observed over predicted prefill time, smoothed; predictions are multiplied by it.
        bias_s: how much later than predicted KVCache lands, smoothed; added to predictions.
        error_s: mean absolute error of the landing times, smoothed.
        seen: prefills that were observed; ``landed``: landings.
    """

    pace: float = 1.0
    bias_s: float = 0.0
    error_s: float = 0.0
    seen: int = 0
    landed: int = 0

    def ran(self, predicted_s: float, took_s: float) -> None:
        """A prefill that was predicted to take ``predicted_s`` (pace included) took ``took_s``."""
        if predicted_s <= 0.0 or took_s <= 0.0:
            return
        self.seen += 1
        ratio = took_s / predicted_s
        if self.seen > 1:
            ratio = min(MAX_STEP, max(1 / MAX_STEP, ratio))
        weight = max(WEIGHT, 1.0 / self.seen)
        self.pace = min(MAX_PACE, max(1 / MAX_PACE, self.pace * (1.0 + weight * (ratio - 1.0))))

    def arrived(self, late_s: float) -> None:
        """A KVCache landed ``late_s`` after its prediction, bias included."""
        self.landed += 1
        weight = max(WEIGHT, 1.0 / (self.landed + 1))
        self.bias_s += weight * late_s
        self.error_s += weight * (abs(late_s) - self.error_s)
