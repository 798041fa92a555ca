"""Choosing a token from logits.

The draw for the token at position ``p`` of a sequence comes from a counter-based generator (Philox) with
the request's seed as its key and ``p`` as its counter. It depends on nothing else, so a request gives the
same tokens on whichever node each of them is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prfaas_net.errors import InternalError, InvalidRequest

__all__ = ["Greedy", "SamplingParams", "check_sampling", "choose_token"]

_SEED_BITS = 64


class SamplingParams(Protocol):
    """What the engine reads of a request's sampling."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int:
        """0 keeps all tokens."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Tokens to generate, the first one included."""
        ...

    @property
    def ignore_eos(self) -> bool: ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token, always."""

    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what no node could serve.

    Raises:
        InvalidRequest: a parameter is out of range.
    """
    for name, good, expected in (
        ("temperature", 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "more than 0, up to 1"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
        ("max_tokens", sampling.max_tokens >= 1, "1 or more"),
    ):
        if not good:
            raise InvalidRequest(f"{name} is out of range", expected=expected, found=getattr(sampling, name))


def choose_token(logits: np.ndarray[Any, Any], sampling: SamplingParams, position: int) -> int:
    """The token for ``position``.

    Args:
        logits: [vocab_size].

    Raises:
        InternalError: a logit is not a number.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise InternalError("the model computed no number", found=f"logit {logits[best]}", position=position)
    if sampling.temperature == 0:
        return best
    order, weights = _candidates(logits, sampling)
    total = np.cumsum(weights)
    index = int(np.searchsorted(total, _uniform(sampling.seed, position) * total[-1], side="right"))
    return int(order[min(index, len(order) - 1)])


def _candidates(logits: np.ndarray[Any, Any], sampling: SamplingParams) -> tuple[Any, Any]:
    """Tokens that may be drawn, best first, and their weights: top_k first, then top_p of what it left."""
    k = min(sampling.top_k or len(logits), len(logits))
    kept = np.argpartition(logits, -k)[-k:] if k < len(logits) else np.arange(len(logits))
    # Stable and by token id among equals, so that ties fall alike everywhere.
    kept = np.sort(kept)
    order = kept[np.argsort(-logits[kept], kind="stable")]
    scaled = (logits[order].astype(np.float64) - float(logits[order[0]])) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.top_p < 1:
        total = np.cumsum(weights)
        # The smallest set whose mass reaches top_p; never empty.
        n_kept = int(np.searchsorted(total, sampling.top_p * total[-1], side="left")) + 1
        order, weights = order[:n_kept], weights[:n_kept]
    return order, weights


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone."""
    key = seed % (1 << _SEED_BITS)
    return float(np.random.Generator(np.random.Philox(counter=position, key=key)).random())
