"""How many data connections a link should have.

A hill climb over Falcon's score (Arslan et al., SC'21; constants from their code):
``throughput / K^n - throughput * B * loss``. Another connection must gain 2 % to be worth its cost, and loss counts
tenfold. The step grows while the climb goes on in one direction and falls back to one when it turns; a count that is
not better is left again.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StreamSample", "StreamTuner"]

COST_PER_STREAM = 1.02
LOSS_WEIGHT = 10.0
# A probe lasts so many round trips, and at least so long; its first third is thrown away (slow start).
PROBE_RTTS = 20
PROBE_MIN_S = 3.0
MAX_STEP = 4
# Below this share of a probe with something to send, the link shows what we offered, not what it can carry.
MIN_BUSY_SHARE = 0.6
# More connections must raise the score by this much to be kept; fewer need only be as good.
TOLERANCE = 0.02


@dataclass(frozen=True)
class StreamSample:
    """What the link did since the last sample.

    Attributes:
        acked_bytes: by the receiver.
        retrans_share: bytes retransmitted of bytes sent.
        busy_share: of the time, with chunks waiting.
    """

    at_s: float
    acked_bytes: int
    retrans_share: float
    busy_share: float
    rtt_s: float


class StreamTuner:
    """Samples in, a number of connections out.

    Args:
        start: connections to begin with; ``lowest`` and ``highest`` bound the climb.
    """

    def __init__(self, *, start: int, lowest: int = 1, highest: int = 16) -> None:
        self.lowest, self.highest = lowest, highest
        self.streams = max(lowest, min(start, highest))
        self._best: tuple[int, float] | None = None
        self._direction, self._step = 1, 1
        self._probe: list[StreamSample] = []

    def add(self, sample: StreamSample) -> int:
        """Take a sample; return how many connections the link should have from now on."""
        self._probe.append(sample)
        first, last = self._probe[0], self._probe[-1]
        if last.at_s - first.at_s < max(PROBE_MIN_S, PROBE_RTTS * sample.rtt_s):
            return self.streams
        score = self._score()
        self._probe = [sample]
        if score is not None:
            self._climb(score)
        return self.streams

    def _score(self) -> float | None:
        """Of the probe that has just ended; None if it says nothing about the link."""
        first, last = self._probe[0], self._probe[-1]
        settled_at = first.at_s + (last.at_s - first.at_s) / 3
        kept = [sample for sample in self._probe if sample.at_s > settled_at]
        if sum(sample.busy_share for sample in kept) < MIN_BUSY_SHARE * len(kept):
            return None
        start_s = max(sample.at_s for sample in self._probe if sample.at_s <= settled_at)
        throughput = sum(sample.acked_bytes for sample in kept) / (last.at_s - start_s)
        loss = sum(sample.retrans_share for sample in kept) / len(kept)
        return throughput / COST_PER_STREAM**self.streams - throughput * LOSS_WEIGHT * loss

    def _climb(self, score: float) -> None:
        if self._best is None:
            self._best = self.streams, score
        elif self.streams == self._best[0]:
            # Back at the best: the link may have changed, so the old score is worth only half.
            self._best = self.streams, (self._best[1] + score) / 2
        elif score > self._best[1] * (1 + TOLERANCE if self.streams > self._best[0] else 1.0):
            self._best = self.streams, score
            self._step = min(MAX_STEP, self._step * 2)
        else:
            # Not worth it: go back, and try the other side next time.
            self._direction, self._step = -self._direction, 1
            self.streams = self._best[0]
            return
        self._move()

    def _move(self) -> None:
        assert self._best is not None
        target = self._best[0] + self._direction * self._step
        clamped = max(self.lowest, min(target, self.highest))
        if clamped == self.streams:
            self._direction, self._step = -self._direction, 1
            clamped = max(self.lowest, min(self._best[0] + self._direction, self.highest))
        self.streams = clamped
