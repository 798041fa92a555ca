"""What predictions got wrong, per node, and how it corrects the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

__all__ = ["Correction"]

# Weight of a new observation: the last ten or so count.
WEIGHT = 0.1
# One observation may be a hiccup: it moves the pace by a factor of two at most, and first observations count more.
MAX_STEP = 2.0
# A node that is this much slower or faster than its profile has the wrong profile.
MAX_PACE = 1000.0
# A node that landings have made look late gets no more of them, and so could never show that it is late no longer.
# Its lateness is believed for HOLD_S after the last landing, and then forgotten with a time constant of FORGET_S:
# about the half minute after which a squeezed link is expected to have recovered (``earliest-finish``).
HOLD_S, FORGET_S = 30.0, 30.0


@dataclass(slots=True)
class Correction:
    """Tracks predicted against observed times of one node.

    Attributes:
        pace: observed over predicted prefill time, smoothed; predictions are multiplied by it.
        bias_s: how much later than predicted KVCache lands, smoothed, at the last landing; :meth:`bias_at` is what is
            added to predictions.
        error_s: mean absolute error of the landing times, smoothed.
        seen: prefills that were observed; ``landed``: landings; ``landed_s``: when the last one was.
    """

    pace: float = 1.0
    bias_s: float = 0.0
    error_s: float = 0.0
    seen: int = 0
    landed: int = 0
    landed_s: float = -inf

    def bias_at(self, now: float) -> float:
        """How much later than predicted KVCache is expected to land, in seconds: less, the longer none has landed."""
        age_s = now - self.landed_s - HOLD_S
        return self.bias_s * exp(-age_s / FORGET_S) if age_s > 0.0 and self.bias_s else self.bias_s

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

    def arrived(self, late_s: float, *, now: float) -> None:
        """A KVCache landed ``late_s`` after its prediction, bias included."""
        self.landed += 1
        weight = max(WEIGHT, 1.0 / (self.landed + 1))
        self.bias_s = self.bias_at(now) + weight * late_s
        self.landed_s = now
        self.error_s += weight * (abs(late_s) - self.error_s)
