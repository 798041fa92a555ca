"""The frequencies of rotary positions, and how long contexts stretch them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Floats", "LinearScaling", "Llama3Scaling", "RopeScaling", "RopeSpec", "YarnScaling", "yarn_mscale"]

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


class RopeScaling(Protocol):
    """A rule that stretches the frequencies."""

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        ...

    def apply(self, frequencies: Floats, dim: int, theta: float) -> Floats: ...


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of one kind of layer.

    Attributes:
        dim: how many entries of a head are rotated, the first ones; even.
        theta: the base of the frequencies.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim/2); the result has all first ones, then all
            second ones either way.
    """

    dim: int
    theta: float
    interleaved: bool = False
    scaling: RopeScaling | None = None

    @property
    def magnitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def frequencies(self) -> Floats:
        """theta^(-2i/dim), stretched: [dim/2]."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        plain = (np.float32(1.0) / np.float32(self.theta) ** exponents).astype(np.float32)
        return plain if self.scaling is None else self.scaling.apply(plain, self.dim, self.theta).astype(np.float32)


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, dim: int, theta: float) -> Floats:
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: long waves are stretched, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, dim: int, theta: float) -> Floats:
        turns = self.original_max_tokens * frequencies / np.float32(2.0 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0).astype(np.float32)
        stretched: Floats = ((1 - blend) * frequencies / np.float32(self.factor) + blend * frequencies).astype(
            np.float32
        )
        return stretched


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention magnitude, 0.1 m ln(s) + 1 (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): waves that turn often are kept, slow ones interpolated.

    Attributes:
        beta_fast, beta_slow: turns over the original length at which the blend begins and ends.
        truncate: round the two ends of the blend outwards to whole dimensions.
    """

    factor: float
    original_max_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float

    def apply(self, frequencies: Floats, dim: int, theta: float) -> Floats:
        low, high = self._dimension(self.beta_fast, dim, theta), self._dimension(self.beta_slow, dim, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
        blended: Floats = (frequencies / np.float32(self.factor) * ramp + frequencies * (1 - ramp)).astype(np.float32)
        return blended

    def _dimension(self, turns: float, dim: int, theta: float) -> float:
        """The dimension whose wave turns so often over the original length."""
        return dim * math.log(self.original_max_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))
