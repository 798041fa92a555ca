"""How long prompts are: distributions with exact partial means, from a formula or from a sample.

Everything the throughput model needs of a distribution is two integrals up to a length ``x``: the share of
requests below it and the mean of ``L`` over them. The mean of any piecewise-linear function follows exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from statistics import NormalDist

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.profiles import PiecewiseLinear

__all__ = ["EmpiricalLengths", "LengthDistribution", "TruncatedLogNormal"]

_NORMAL = NormalDist()


class LengthDistribution(ABC):
    """A distribution of incremental prefill lengths, in tokens."""

    @abstractmethod
    def below(self, x: float) -> float:
        """P(L <= x)."""

    @abstractmethod
    def moment_below(self, x: float) -> float:
        """E[L; L <= x], the mean of L where it is at most x and 0 elsewhere, in tokens."""

    @abstractmethod
    def quantile(self, u: float) -> float:
        """The length that a share ``u`` of requests does not exceed."""

    @property
    @abstractmethod
    def support(self) -> tuple[float, float]:
        """Shortest and longest length."""

    @property
    def mean(self) -> float:
        """E[L]."""
        return self.moment_below(math.inf)

    def above(self, t: float) -> float:
        """p = P(L > t)."""
        return max(0.0, 1.0 - self.below(t))

    def mean_above(self, t: float) -> float:
        """l_long = E[L | L > t]; ``t`` itself where nothing is longer."""
        p = self.above(t)
        return (self.mean - self.moment_below(t)) / p if p > 0 else t

    def mean_below(self, t: float) -> float:
        """l_short = E[L | L <= t]; ``t`` itself where nothing is shorter."""
        q = self.below(t)
        return self.moment_below(t) / q if q > 0 else t

    def expect(self, f: PiecewiseLinear, low: float = -math.inf, high: float = math.inf) -> float:
        """E[f(L); low < L <= high], not divided by the probability of being there."""
        total = 0.0
        for start, end, value, slope in f.pieces():
            a, b = max(start, low), min(end, high)
            if a < b:
                mass = self.below(b) - self.below(a)
                total += value * mass + slope * (self.moment_below(b) - self.moment_below(a))
        return total


class TruncatedLogNormal(LengthDistribution):
    """ln L is normal (mu, sigma), L is within ``[low, high]``."""

    def __init__(self, mu: float, sigma: float, low: float, high: float) -> None:
        if sigma <= 0 or not 0 < low < high:
            raise ConfigError(
                "a truncated log-normal needs sigma above 0 and bounds with 0 < low < high",
                found=f"sigma {sigma}, {low} to {high}",
            )
        self.mu, self.sigma, self.low, self.high = mu, sigma, low, high
        self._phi_low = _NORMAL.cdf((math.log(low) - mu) / sigma)
        self._mass = _NORMAL.cdf((math.log(high) - mu) / sigma) - self._phi_low
        self._moment_low = _NORMAL.cdf((math.log(low) - mu) / sigma - sigma)
        self._scale = math.exp(mu + sigma * sigma / 2) / self._mass

    def below(self, x: float) -> float:
        if x <= self.low:
            return 0.0
        if x >= self.high:
            return 1.0
        return (_NORMAL.cdf((math.log(x) - self.mu) / self.sigma) - self._phi_low) / self._mass

    def moment_below(self, x: float) -> float:
        if x <= self.low:
            return 0.0
        z = (math.log(min(x, self.high)) - self.mu) / self.sigma
        # E[L; L <= x] of a log-normal is its mean times the normal's distribution, moved by sigma.
        return self._scale * (_NORMAL.cdf(z - self.sigma) - self._moment_low)

    def quantile(self, u: float) -> float:
        z = _NORMAL.inv_cdf(min(max(self._phi_low + u * self._mass, 1e-300), 1 - 1e-16))
        return min(self.high, max(self.low, math.exp(self.mu + self.sigma * z)))

    @property
    def support(self) -> tuple[float, float]:
        return self.low, self.high


class EmpiricalLengths(LengthDistribution):
    """The lengths that were seen, each with the same weight."""

    def __init__(self, sample: Iterable[float]) -> None:
        self._sorted = sorted(sample)
        if not self._sorted or self._sorted[0] < 0:
            raise ConfigError("a sample of lengths needs one or more, none negative", found=self._sorted[:3])
        self._sums = [0.0, *accumulate(self._sorted)]

    def __len__(self) -> int:
        return len(self._sorted)

    def below(self, x: float) -> float:
        return bisect_right(self._sorted, x) / len(self._sorted)

    def moment_below(self, x: float) -> float:
        return self._sums[bisect_right(self._sorted, x)] / len(self._sorted)

    def quantile(self, u: float) -> float:
        index = min(len(self._sorted) - 1, int(u * len(self._sorted)))
        return self._sorted[index]

    @property
    def support(self) -> tuple[float, float]:
        return self._sorted[0], self._sorted[-1]
