"""Decoding one sequence, token by token, in the buffer that holds its state."""

from __future__ import annotations

from engine.model import Model
from engine.sampling import SamplingParams, choose_token
from engine.state import SequenceState
from prfaas_net.errors import InvalidRequest, UsageError

__all__ = ["Decoding", "finish_reason"]


def finish_reason(token: int, n_produced: int, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> str | None:
    """Why ``token``, the ``n_produced``-th one produced, is the last; None if it is not."""
    if token in eos_token_ids and not sampling.ignore_eos:
        return "stop"
    return "length" if n_produced >= sampling.max_tokens else None


class Decoding:
    """A sequence being decoded in place.

    Attributes:
        n_tokens: tokens whose state the buffer holds.
    """

    def __init__(
        self, model: Model, state: SequenceState, n_tokens: int, sampling: SamplingParams, eos_token_ids: frozenset[int]
    ) -> None:
        self.n_tokens = n_tokens
        self._model = model
        self._state = state
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self._n_produced = 1  # prefill chose the first

    def step(self, token: int) -> tuple[int, str | None]:
        """Append ``token`` to the sequence; return the next token and, if it is the last one, why.

        Raises:
            UsageError: ``max_tokens`` tokens have been produced already.
            InvalidRequest: ``token`` is not in the vocabulary.
        """
        if self._n_produced >= self._sampling.max_tokens:
            raise UsageError("the sequence is complete", expected=f"{self._sampling.max_tokens} tokens in all")
        if not 0 <= token < self._model.spec.vocab_size:
            raise InvalidRequest("a token id is not in the vocabulary", found=token)
        position = self.n_tokens
        x = self._model.embed([token])
        for layer in self._model.layers:
            x = layer.forward(x, self._state.layer(layer.index), position, 1)
            self._state.publish(layer.index, position, position + 1)
        self.n_tokens += 1
        self._n_produced += 1
        next_token = choose_token(self._model.logits(x), self._sampling, self.n_tokens)
        return next_token, finish_reason(next_token, self._n_produced, self._sampling, self._eos_token_ids)
