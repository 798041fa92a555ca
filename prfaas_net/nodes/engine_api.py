"""What a node needs of an engine: the only thing that prfaas-net knows about engines.

An engine is synchronous: its calls block, are made from worker threads, and are expected to release the GIL
while they compute. It keeps the state of a sequence in a buffer that the *node* gives it, laid out by a
:class:`~prfaas_net.kv.RegionMap`; so the node decides where state lives and when it is freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas_net.errors import PrfaasError
from prfaas_net.kv import CacheLayout, RegionMap

__all__ = [
    "DecodeBatch",
    "Engine",
    "PrefillResult",
    "PrefillSink",
    "Sampling",
    "Snapshots",
    "Stepped",
    "TextStream",
    "TextTokenizer",
    "TokenLogprobs",
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    The random draw for the token at position ``p`` depends on (``seed``, ``p``) alone, so the same request
    gives the same tokens wherever each of them is made.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        min_p: drops tokens less likely than that times the likeliest.
        seed: used when ``temperature`` > 0.
        max_tokens: tokens to generate, the first one (from prefill) included.
        min_tokens: tokens before an end-of-sequence token can be chosen.
        ignore_eos: go on after an end-of-sequence token.
        presence_penalty, frequency_penalty: OpenAI's, over the answer.
        repetition_penalty: over prompt and answer; 1 is none.
        logit_bias: pairs of a token and what is added to its logit.
        logprobs: how many of the likeliest tokens to tell beside each chosen one; None tells nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def counts_prompt(self) -> bool:
        """Whether choosing a token needs to know which tokens the prompt has."""
        return self.repetition_penalty != 1.0


class TokenLogprobs(Protocol):
    """Natural logarithms of probabilities, by the model's own logits."""

    @property
    def logprob(self) -> float:
        """Of the chosen token."""
        ...

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens and theirs, best first."""
        ...


class PrefillSink(Protocol):
    """Told of state the moment it is final in the buffer. Called from the engine's thread."""

    def emit(self, layer_index: int, stop_token: int) -> None:
        """Layer ``layer_index`` holds every row before ``stop_token``.

        For a layer with window or linear state the call is made once, with ``stop_token`` the prompt's end.
        """
        ...

    def cancelled(self) -> bool:
        """Asked between layers; when true the engine stops there."""
        ...


class Snapshots(Protocol):
    """Wants the state of a prompt at certain lengths, for a prefix cache. Called from the engine's thread."""

    def boundaries(self, start: int, stop: int) -> Sequence[int]:
        """Lengths in ``start < length < stop`` at which to be told, ascending."""
        ...

    def take(self, n_tokens: int) -> None:
        """The buffer holds the state after exactly ``n_tokens`` tokens, of every kind, until this returns."""
        ...


class PrefillResult(Protocol):
    """What a prefill ends with."""

    @property
    def first_token(self) -> int:
        """Sampled from the logits of the last position."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` if the first token already ends the request."""
        ...

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """If the request asked for them."""
        ...


class Stepped(Protocol):
    """What one step gave one sequence of a batch."""

    @property
    def key(self) -> int: ...

    @property
    def token(self) -> int: ...

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` if the token is the last one; the sequence has then left."""
        ...

    @property
    def logprobs(self) -> TokenLogprobs | None: ...

    @property
    def error(self) -> PrfaasError | None:
        """What went wrong with this sequence alone, which has then left."""
        ...


class DecodeBatch(Protocol):
    """Sequences of any lengths that are decoded together. For one thread at a time.

    They may join and leave between any two steps; each gets the tokens that it would get alone.
    """

    def join(
        self,
        n_tokens: int,
        first_token: int,
        sampling: Sampling,
        regions: RegionMap,
        buffer: Any,
        prompt_tokens: Collection[int] = (),
    ) -> int:
        """Take in a sequence whose buffer holds the state of ``n_tokens`` tokens; returns its key.

        Args:
            first_token: of the answer; prefill chose it.
            buffer: decoded in: writable, with room for ``n_tokens + sampling.max_tokens`` tokens.
            prompt_tokens: the tokens that occur in the prompt, where :attr:`Sampling.counts_prompt`.
        """
        ...

    def leave(self, key: int) -> None:
        """Let a sequence go, if it is still there; its buffer is not touched any more."""
        ...

    def step(self) -> Sequence[Stepped]:
        """One token for each sequence."""
        ...


class Engine(Protocol):
    """A model, ready to prefill and to decode."""

    @property
    def model_name(self) -> str: ...

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus output that the model admits."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def prefill_chunk_tokens(self) -> int:
        """Tokens that one pass through the layers takes: the granularity of ``PrefillSink.emit``."""
        ...

    def prefill(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        regions: RegionMap,
        buffer: Any,
        sink: PrefillSink,
        *,
        start_token: int = 0,
        snapshots: Snapshots | None = None,
    ) -> PrefillResult | None:
        """Run the prompt; fill ``buffer``; tell ``sink`` as layers complete. None if the sink cancelled it.

        Args:
            token_ids: the whole prompt.
            start_token: the buffer holds the state of so many tokens of it already: they are not run again, and
                the sink is not told of them.
            snapshots: is shown the state at the lengths that it names.
        """
        ...

    def batch(self) -> DecodeBatch:
        """An empty batch for decoding."""
        ...


class TextTokenizer(Protocol):
    """Text to token ids and back, for the gateway."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat prompt that ends where the assistant's answer starts."""
        ...

    def token_text(self, token: int) -> str:
        """One token as text by itself, special ones too; incomplete characters as U+FFFD."""
        ...

    def stream(self) -> TextStream:
        """A decoder for one answer."""
        ...


class TextStream(Protocol):
    """Turns one answer's tokens into text, never cutting inside a character."""

    def push(self, token: int) -> str:
        """The text that this token completed; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left when no token follows: incomplete characters as U+FFFD."""
        ...
