"""Decoding in the buffers that hold the sequences' state: one sequence, or a batch that changes as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model import Model
from engine.rows import Rows
from engine.sampling import Choice, Sampler, TokenLogprobs
from engine.state import SequenceState
from prfaas_net.errors import InvalidRequest, PrfaasError, UsageError

__all__ = ["DecodeBatch", "Decoding", "Stepped"]


class Decoding:
    """A sequence being decoded in place.

    Attributes:
        n_tokens: tokens whose state the buffer holds.
    """

    def __init__(self, model: Model, state: SequenceState, n_tokens: int, sampler: Sampler, max_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.state = state
        self.sampler = sampler
        self._model = model
        self._max_tokens = max_tokens

    def step(self, token: int) -> tuple[int, str | None]:
        """Append ``token`` to the sequence; return the next token and, if it is the last one, why.

        Raises:
            UsageError: ``max_tokens`` tokens have been produced already.
            InvalidRequest: ``token`` is not in the vocabulary.
        """
        self.check(token)
        if self.sampler.n_produced == 0:
            self.sampler.accept(token)  # the first one, which prefill chose
        result = _advance(self._model, [self], [token])[0]
        if isinstance(result, PrfaasError):
            raise result
        return result.token, self.sampler.accept(result.token)

    def check(self, token: int) -> None:
        """
        Raises:
            UsageError, InvalidRequest: as :meth:`step`.
        """
        if max(1, self.sampler.n_produced) >= self._max_tokens:
            raise UsageError("the sequence is complete", expected=f"{self._max_tokens} tokens in all")
        if not 0 <= token < self._model.spec.vocab_size:
            raise InvalidRequest("a token id is not in the vocabulary", found=token)


@dataclass(frozen=True)
class Stepped:
    """What one step gave one sequence of a batch.

    Attributes:
        key: as :meth:`DecodeBatch.join` gave it.
        finish_reason: ``"stop"`` or ``"length"`` if the token is the last one; the sequence has then left.
        error: what went wrong with this sequence, which has then left; ``token`` means nothing.
    """

    key: int
    token: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    error: PrfaasError | None = None


class DecodeBatch:
    """Sequences of any lengths that are decoded together, a token each a step. For one thread at a time.

    They may join and leave between any two steps; each gets the tokens that it would get alone.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._running: dict[int, tuple[Decoding, int]] = {}
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._running)

    def join(self, decoding: Decoding, first_token: int) -> int:
        """Take a sequence in, whose answer begins with ``first_token``; returns its key in this batch.

        Raises:
            UsageError, InvalidRequest: as :meth:`Decoding.step`.
        """
        decoding.check(first_token)
        decoding.sampler.accept(first_token)
        key, self._next_key = self._next_key, self._next_key + 1
        self._running[key] = (decoding, first_token)
        return key

    def leave(self, key: int) -> None:
        """Let a sequence go; its buffer is not touched any more. No matter if it has left already."""
        self._running.pop(key, None)

    def step(self) -> list[Stepped]:
        """One token for each sequence, in the order in which they joined."""
        if not self._running:
            return []
        keys, running = list(self._running), list(self._running.values())
        results = _advance(self._model, [decoding for decoding, _ in running], [token for _, token in running])
        return [
            self._settled(key, decoding, result)
            for key, (decoding, _), result in zip(keys, running, results, strict=True)
        ]

    def _settled(self, key: int, decoding: Decoding, result: Choice | PrfaasError) -> Stepped:
        if isinstance(result, PrfaasError):
            del self._running[key]
            return Stepped(key, -1, error=result)
        reason = decoding.sampler.accept(result.token)
        if reason is None:
            self._running[key] = (decoding, result.token)
        else:
            del self._running[key]
        return Stepped(key, result.token, reason, result.logprobs)


def _advance(model: Model, decodings: Sequence[Decoding], tokens: Sequence[int]) -> list[Choice | PrfaasError]:
    """Append a token to each sequence; choose what follows.

    Projections and MLPs run over the whole batch as matrix products, attention sequence by sequence.
    """
    rows = Rows([(decoding.n_tokens, 1) for decoding in decodings], model.backend)
    x = model.embed(tokens)
    for layer in model.layers:
        states = [decoding.state.layer(layer.index) for decoding in decodings]
        x = layer.forward(x, states, rows, len(decodings))
    logits = model.logits(x)
    choices: list[Choice | PrfaasError] = []
    for decoding, row in zip(decodings, logits, strict=True):
        decoding.n_tokens += 1
        try:
            choices.append(decoding.sampler.choose(row, decoding.n_tokens))
        except PrfaasError as error:
            choices.append(error)
    return choices
