"""What a node needs of an engine: the only thing that prfaas-net knows about engines.

An engine is synchronous: its calls block, are made from worker threads, and are expected to release the GIL
while they compute. It keeps the state of a sequence in a buffer that the *node* gives it, laid out by a
:class:`~prfaas_net.kv.RegionMap`; so the node decides where state lives and when it is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas_net.kv import CacheLayout, RegionMap

__all__ = [
    "DecodeSequence",
    "Engine",
    "PrefillResult",
    "PrefillSink",
    "Sampling",
    "TextStream",
    "TextTokenizer",
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    The random draw for the token at position ``p`` depends on (``seed``, ``p``) alone, so the same request
    gives the same tokens wherever each of them is made.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        seed: used when ``temperature`` > 0.
        max_tokens: tokens to generate, the first one (from prefill) included.
        ignore_eos: go on after an end-of-sequence token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False


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


class DecodeSequence(Protocol):
    """A sequence being decoded in place in its buffer."""

    def step(self, token: int) -> tuple[int, str | None]:
        """Append ``token`` to the sequence; return the next token and, if it is the last one, why."""
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
        self, token_ids: Sequence[int], sampling: Sampling, regions: RegionMap, buffer: Any, sink: PrefillSink
    ) -> PrefillResult | None:
        """Run the prompt; fill ``buffer``; tell ``sink`` as layers complete. None if the sink cancelled it."""
        ...

    def resume(self, n_tokens: int, sampling: Sampling, regions: RegionMap, buffer: Any) -> DecodeSequence:
        """Take up decoding from a buffer that holds the state of ``n_tokens`` tokens.

        ``buffer`` must be writable and have room for ``n_tokens + sampling.max_tokens`` tokens.
        """
        ...


class TextTokenizer(Protocol):
    """Text to token ids and back, for the gateway."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat prompt that ends where the assistant's answer starts."""
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
