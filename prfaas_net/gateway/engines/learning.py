"""How long an engine takes for prompts, learnt from those that it computed while it had no other of ours to compute.

Our own nodes measure themselves and say so. Of an engine the gateway sees when a prompt was given and when it was done;
that is its time as long as nobody else was in the queue. A correction of the router's own (its *pace*) follows from
there on; this gives it a curve of the right shape to correct.
"""

from __future__ import annotations

from math import log2

from prfaas_net.scheduling import NodeProfile, PiecewiseLinear

__all__ = ["LearntPrefill"]

# Weight of a new time in its bucket; the first ones count in full.
WEIGHT = 0.2
# Lengths are told apart by their powers of two, up to 2**24 tokens.
BUCKETS = 25
# A curve is told anew when a bucket has moved by this share: the router forgets its correction then.
MOVED_SHARE = 0.25
# Buckets with fewer prompts do not make a curve yet.
MIN_SEEN = 2


class LearntPrefill:
    """Mean times by length.

    Args:
        name: of the profile.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tokens = [0.0] * BUCKETS
        self._seconds = [0.0] * BUCKETS
        self._seen = [0] * BUCKETS
        self._told: NodeProfile | None = None

    def ran(self, tokens: int, seconds: float) -> None:
        """A prompt of which ``tokens`` had to be computed took ``seconds``, alone."""
        if tokens < 1 or seconds <= 0.0:
            return
        i = min(BUCKETS - 1, int(log2(tokens)))
        self._seen[i] += 1
        weight = max(WEIGHT, 1.0 / self._seen[i])
        self._tokens[i] += weight * (tokens - self._tokens[i])
        self._seconds[i] += weight * (seconds - self._seconds[i])

    @property
    def profile(self) -> NodeProfile | None:
        """What is known; None until two lengths are. The same object until it has moved."""
        knots = [i for i in range(BUCKETS) if self._seen[i] >= MIN_SEEN]
        if len(knots) < 2:
            return None
        told, seconds, longest = self._told, list[float](), 0.0
        for i in knots:
            # Noise may have a longer prompt take less; a curve that falls would send the longest to the slowest.
            longest = max(longest, self._seconds[i])
            seconds.append(longest)
        if told is None or any(
            abs(told.prefill_s(self._tokens[i]) - s) > MOVED_SHARE * s for i, s in zip(knots, seconds, strict=True)
        ):
            told = NodeProfile(self._name, PiecewiseLinear.of([self._tokens[i] for i in knots], seconds))
            self._told = told
        return told
