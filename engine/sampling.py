"""Choosing a token from logits.

The draw for the token at position ``p`` of a sequence comes from a counter-based generator (Philox) with
the request's seed as its key and ``p`` as its counter. It depends on nothing else, so a request gives the
same tokens on whichever node each of them is made.

In this order: end tokens are closed until ``min_tokens``; ``logit_bias`` is added; penalties are taken off;
the temperature divides; ``min_p``, ``top_k`` and ``top_p`` drop tokens; one of the rest is drawn. The vocabulary
is never sorted: what must be in order is first cut off from the rest by partition.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.penalties import Penalties
from prfaas_net.errors import InternalError, InvalidRequest

__all__ = ["Choice", "Greedy", "Sampler", "SamplingParams", "TokenLogprobs", "check_sampling", "draw_token"]

_SEED_BITS = 64
_FIRST_CANDIDATES = 64
MAX_LOGPROBS = 100


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
    def min_p(self) -> float:
        """Drops tokens less likely than that times the likeliest."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Tokens to generate, the first one included."""
        ...

    @property
    def min_tokens(self) -> int:
        """Tokens before an end token can be chosen."""
        ...

    @property
    def ignore_eos(self) -> bool: ...

    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...

    @property
    def repetition_penalty(self) -> float: ...

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """Pairs of a token and what is added to its logit."""
        ...

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None tells nothing."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token, always."""

    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, by the model's own logits.

    Attributes:
        logprob: of the chosen token.
        top: the likeliest tokens and theirs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    """A chosen token."""

    token: int
    logprobs: TokenLogprobs | None


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse what no node could serve.

    Raises:
        InvalidRequest: a parameter is out of range.
    """
    infinity = float("inf")
    for name, good, expected in (
        ("temperature", 0 <= sampling.temperature < infinity, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "more than 0, up to 1"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("max_tokens", sampling.max_tokens >= 1, "1 or more"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "0 to max_tokens"),
        ("presence_penalty", abs(sampling.presence_penalty) < infinity, "a number"),
        ("frequency_penalty", abs(sampling.frequency_penalty) < infinity, "a number"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < infinity, "more than 0"),
        ("logprobs", sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        (
            "logit_bias",
            all(0 <= token < vocab_size and abs(bias) < infinity for token, bias in sampling.logit_bias),
            f"numbers for tokens 0 to {vocab_size - 1}",
        ),
    ):
        if not good:
            raise InvalidRequest(f"{name} is out of range", expected=expected, found=getattr(sampling, name))


class Sampler:
    """Chooses the tokens of one answer, one after the other.

    Args:
        prompt_tokens: for the repetition penalty; which of them there are is enough.
    """

    def __init__(
        self, sampling: SamplingParams, eos_token_ids: frozenset[int], prompt_tokens: Collection[int] = ()
    ) -> None:
        self.n_produced = 0
        self._sampling = sampling
        self._eos = eos_token_ids
        self._eos_list = sorted(eos_token_ids)
        biases = dict(sampling.logit_bias)
        self._bias_tokens = np.fromiter(biases.keys(), dtype=np.int64)
        self._biases = np.fromiter(biases.values(), dtype=np.float32)
        self._penalties = Penalties.of(sampling, prompt_tokens)

    def accept(self, token: int) -> str | None:
        """Take note of a token of the answer; return why it is the last one, or None if it is not."""
        self.n_produced += 1
        if self._penalties is not None:
            self._penalties.add(token)
        if token in self._eos and not self._sampling.ignore_eos:
            return "stop"
        return "length" if self.n_produced >= self._sampling.max_tokens else None

    def choose(self, logits: np.ndarray[Any, Any], position: int) -> Choice:
        """The token for ``position``.

        Args:
            logits: [vocab_size], left as they are.

        Raises:
            InternalError: a logit is not a number.
        """
        if not np.isfinite(logits.max()):  # a maximum is NaN if any entry is
            raise InternalError("the model computed no number", found=f"logit {logits.max()}", position=position)
        adjusted = self._adjusted(logits)
        token = int(adjusted.argmax())
        if self._sampling.temperature > 0:
            token = draw_token(adjusted, self._sampling, position)
        n_top = self._sampling.logprobs
        return Choice(token, _logprobs(logits, token, n_top) if n_top is not None else None)

    def _adjusted(self, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits with everything that changes them; the same array if nothing does."""
        early = self.n_produced < self._sampling.min_tokens and bool(self._eos_list)
        if not early and not len(self._bias_tokens) and self._penalties is None:
            return logits
        adjusted = logits.copy()
        if len(self._bias_tokens):
            adjusted[self._bias_tokens] += self._biases
        if early:
            adjusted[self._eos_list] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(adjusted)
        return adjusted


def draw_token(logits: np.ndarray[Any, Any], sampling: SamplingParams, position: int) -> int:
    """A token by temperature, ``min_p``, ``top_k`` and ``top_p``."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= sampling.temperature
    weights = np.exp(scaled)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0
    uniform = _uniform(sampling.seed, position)
    if not 0 < sampling.top_k < len(weights) and sampling.top_p >= 1:
        total = np.cumsum(weights)
        return int(np.searchsorted(total, uniform * total[-1], side="right"))
    order = _candidates(weights, sampling.top_k or len(weights), sampling.top_p)
    total = np.cumsum(weights[order])
    return int(order[min(int(np.searchsorted(total, uniform * total[-1], side="right")), len(order) - 1)])


def _candidates(weights: np.ndarray[Any, Any], top_k: int, top_p: float) -> np.ndarray[Any, Any]:
    """Tokens that may be drawn, best first: top_k first, then top_p of what it left. Never none.

    Only the best few are put in order; if they do not hold the mass of top_p, four times as many.
    """
    n_vocab = len(weights)
    limit = min(top_k, n_vocab)
    n = limit if top_p >= 1 else min(limit, _FIRST_CANDIDATES)
    mass = weights.sum() if limit == n_vocab else np.partition(weights, n_vocab - limit)[n_vocab - limit :].sum()
    while True:
        kept = np.argpartition(weights, n_vocab - n)[n_vocab - n :] if n < n_vocab else np.arange(n_vocab)
        # Stable and by token id among equals, so that ties fall alike everywhere.
        kept = np.sort(kept)
        order = kept[np.argsort(-weights[kept], kind="stable")]
        if top_p >= 1:
            return order
        total = np.cumsum(weights[order])
        if total[-1] >= top_p * mass or n >= limit:
            # The smallest set whose mass reaches top_p.
            n_kept = int(np.searchsorted(total, top_p * mass, side="left")) + 1
            return order[:n_kept]
        n = min(4 * n, limit)


def _logprobs(logits: np.ndarray[Any, Any], token: int, n_top: int) -> TokenLogprobs:
    high = float(logits.max())
    log_total = high + float(np.log(np.exp(logits - high, dtype=np.float64).sum()))
    best: list[int] = []
    if n_top:
        n_top = min(n_top, len(logits))
        kept = np.sort(np.argpartition(logits, -n_top)[-n_top:])
        best = kept[np.argsort(-logits[kept], kind="stable")].tolist()
    return TokenLogprobs(
        float(logits[token]) - log_total, tuple((index, float(logits[index]) - log_total) for index in best)
    )


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone."""
    key = seed % (1 << _SEED_BITS)
    return float(np.random.Generator(np.random.Philox(counter=position, key=key)).random())
