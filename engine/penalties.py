"""Penalties on tokens that have been used.

Presence and frequency penalties are OpenAI's, over the answer: a token that occurs n > 0 times loses
``presence + n * frequency``. The repetition penalty is CTRL's (Keskar et al. 2019, arXiv:1909.05858), over prompt
and answer: the logit of a token that occurs is divided by it if positive, else multiplied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

__all__ = ["Penalties"]


class _Params(Protocol):
    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...

    @property
    def repetition_penalty(self) -> float: ...


class Penalties:
    """The penalties of one answer, and what they count."""

    def __init__(self, sampling: _Params, prompt_tokens: Collection[int]) -> None:
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._repetition = np.float32(sampling.repetition_penalty)
        self._counts: dict[int, int] = {}
        self._used = set(prompt_tokens) if sampling.repetition_penalty != 1 else set()

    @classmethod
    def of(cls, sampling: _Params, prompt_tokens: Collection[int]) -> Penalties | None:
        """The penalties; None if there are none."""
        none = not sampling.presence_penalty and not sampling.frequency_penalty and sampling.repetition_penalty == 1
        return None if none else cls(sampling, prompt_tokens)

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, logits: np.ndarray[Any, Any]) -> None:
        """Change the logits [vocab_size] in place."""
        if self._repetition != 1:
            used = np.fromiter(self._used | self._counts.keys(), dtype=np.int64)
            values = logits[used]
            logits[used] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts and (self._presence or self._frequency):
            tokens = np.fromiter(self._counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            logits[tokens] -= (self._presence + self._frequency * counts).astype(np.float32)
