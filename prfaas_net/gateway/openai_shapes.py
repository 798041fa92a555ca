"""What clients get: answers in the shapes of the two OpenAI endpoints, whole and in chunks."""

from __future__ import annotations

import copy
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import orjson

from prfaas_net.gateway.answer import Piece
from prfaas_net.gateway.logprobs import Scored, chat_logprobs, completion_logprobs
from prfaas_net.gateway.record import RequestRecord

__all__ = ["DONE", "ChatShape", "CompletionShape", "Shape", "sse", "usage_after", "usage_of"]

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def usage_of(record: RequestRecord, *others: RequestRecord) -> dict[str, Any]:
    """The ``usage`` block, as of now; of several choices the tokens are added up, and their prompt counts once."""
    return usage_after(record, record.output_tokens + sum(other.output_tokens for other in others))


def usage_after(record: RequestRecord, output_tokens: int) -> dict[str, Any]:
    """The ``usage`` block after so many tokens of the answer."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": record.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


class Shape(ABC):
    """One answer's identity, and how its parts are written.

    Args:
        model: the name the client knows the model by.
        token_text: one token as text by itself, for log-probabilities.
        token_ids: whether choices carry the ids of their tokens.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, token_text: Callable[[int], str], *, token_ids: bool = False) -> None:
        self._token_text = token_text
        self.token_ids = token_ids
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self._first = True
        self._index = 0

    def choice(self, index: int) -> Self:
        """The same answer's shape for another of its choices. Taken before anything was written."""
        shape = copy.copy(self)
        shape._index = index
        return shape

    def whole(self, pieces: Sequence[Piece], record: RequestRecord, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        scored = [entry for piece in pieces for entry in piece.scored]
        choice = {
            "index": self._index,
            **self._whole("".join(piece.text for piece in pieces)),
            "logprobs": self._logprobs(scored) if scored else None,
            "finish_reason": record.finish_reason,
        }
        if self.token_ids:
            tokens = [piece.token for piece in pieces if piece.token is not None]
            choice |= {"token_ids": tokens, "prompt_token_ids": list(prompt_ids)}
        return {**self._head, "object": self.whole_object, "choices": [choice], "usage": usage_of(record)}

    def chunk(self, piece: Piece, usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """A streamed piece; ``with_usage`` writes the field, with null for none."""
        logprobs = self._logprobs(piece.scored) if piece.scored else None
        choice: dict[str, Any] = {"index": self._index, **self._part(piece.text)}
        choice |= {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        self._first = False
        if self.token_ids:
            choice["token_ids"] = [] if piece.token is None else [piece.token]
        body = {**self._head, "object": self.chunk_object, "choices": [choice]}
        return {**body, "usage": usage} if with_usage else body

    def closing(self, *records: RequestRecord) -> dict[str, Any]:
        """The chunk after the last piece: usage over all choices, and no choices."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage_of(*records)}

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]: ...


class CompletionShape(Shape):
    """``/v1/completions``."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    _offset = 0

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        body, self._offset = completion_logprobs(scored, self._token_text, self._offset)
        return body


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _part(self, text: str) -> dict[str, Any]:
        # The role rides on the first token: a chunk of its own before it would count as the first token.
        return {"delta": {"role": "assistant", "content": text} if self._first else {"content": text}}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return chat_logprobs(scored, self._token_text)
