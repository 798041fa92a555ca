"""What a node can do, as tables: prefill time over length, KVCache size over length, decode step and batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prfaas_net.errors import ConfigError

__all__ = ["DecodeProfile", "KvSize", "NodeProfile", "PiecewiseLinear"]


@dataclass(frozen=True)
class PiecewiseLinear:
    """A function known at knots, straight between them and beyond both ends.

    Attributes:
        knots: lengths in tokens, rising.
        values: what it is there (seconds, bytes).

    Raises:
        ConfigError: fewer than two knots, knots that do not rise, or as many values as there are knots missing.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]
    slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        knots, values = self.knots, self.values
        if len(knots) < 2 or len(knots) != len(values):
            raise ConfigError(
                "a table needs two or more knots, and a value for each",
                expected="as many values as knots",
                found=f"{len(knots)} knots and {len(values)} values",
            )
        if any(b <= a for a, b in pairwise(knots)):
            raise ConfigError("the knots of a table rise", expected="each larger than the one before", found=knots)
        slopes = [(values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)]
        object.__setattr__(self, "slopes", tuple(slopes))

    @classmethod
    def of(cls, knots: Sequence[float], values: Sequence[float]) -> PiecewiseLinear:
        """From any two sequences."""
        return cls(tuple(knots), tuple(values))

    @classmethod
    def straight(cls, start: float, slope: float) -> PiecewiseLinear:
        """``start + slope * x``."""
        return cls((0.0, 1.0), (start, start + slope))

    def __call__(self, x: float) -> float:
        """Its value at ``x``; never below 0, where a line that falls is drawn on too far."""
        knots = self.knots
        i = bisect_right(knots, x) - 1
        last = len(knots) - 2
        i = 0 if i < 0 else last if i > last else i
        value = self.values[i] + (x - knots[i]) * self.slopes[i]
        return value if value > 0.0 else 0.0

    def scaled(self, factor: float) -> PiecewiseLinear:
        """The same curve, every value times ``factor``."""
        return PiecewiseLinear(self.knots, tuple(v * factor for v in self.values))

    def pieces(self) -> list[tuple[float, float, float, float]]:
        """(from, to, value at 0, slope) of every straight piece, the outer two drawn on without end."""
        inf = float("inf")
        rows = []
        for i, slope in enumerate(self.slopes):
            low = -inf if i == 0 else self.knots[i]
            high = inf if i == len(self.slopes) - 1 else self.knots[i + 1]
            rows.append((low, high, self.values[i] - slope * self.knots[i], slope))
        return rows


@dataclass(frozen=True)
class KvSize:
    """S_kv(l): bytes of the KVCache of a sequence of ``l`` tokens.

    Attributes:
        constant_bytes: linear states, whatever the length.
        bytes_per_token: rows of full attention.
        window_bytes_per_token: rows of sliding windows, kept for the last ``window_tokens`` only.
    """

    constant_bytes: float
    bytes_per_token: float
    window_bytes_per_token: float = 0.0
    window_tokens: int = 0

    def __call__(self, tokens: float) -> float:
        """Bytes at this length."""
        size = self.constant_bytes + self.bytes_per_token * tokens
        if self.window_bytes_per_token:
            size += self.window_bytes_per_token * min(tokens, self.window_tokens)
        return size

    def increment(self, cached_tokens: float, tokens: float) -> float:
        """What crosses a link when the other side holds a prefix of ``cached_tokens``, in bytes.

        The linear states always cross: those of the prefix are not those of the whole.
        """
        if cached_tokens <= 0:
            return self(tokens)
        rows = self.bytes_per_token * (tokens - cached_tokens)
        if self.window_bytes_per_token:
            rows += self.window_bytes_per_token * min(tokens - cached_tokens, self.window_tokens)
        return self.constant_bytes + rows

    def table(self, longest_tokens: float) -> PiecewiseLinear:
        """The same as a table, for integrals."""
        knots = [0.0, float(longest_tokens)]
        if self.window_bytes_per_token and 0 < self.window_tokens < longest_tokens:
            knots.insert(1, float(self.window_tokens))
        return PiecewiseLinear.of(knots, [self(x) for x in knots])


@dataclass(frozen=True)
class DecodeProfile:
    """How an instance decodes.

    Attributes:
        step_s: time of one step of a batch, T_decode of the paper.
        max_batch: requests that decode together within the SLO, BS_max of the paper.
    """

    step_s: float
    max_batch: int

    def __post_init__(self) -> None:
        if self.step_s <= 0 or self.max_batch < 1:
            raise ConfigError(
                "a decode profile needs a step that takes time and a batch of one or more",
                found=f"step {self.step_s} s, batch {self.max_batch}",
            )


@dataclass(frozen=True)
class NodeProfile:
    """One instance of a kind of hardware running one model.

    Attributes:
        prefill_s: T_prefill over the incremental length, in seconds over tokens.
        decode: None where it never decodes.
    """

    name: str
    prefill_s: PiecewiseLinear
    decode: DecodeProfile | None = None
