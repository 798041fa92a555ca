"""Log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prfaas_net.nodes.engine_api import TokenLogprobs

__all__ = ["Scored", "chat_logprobs", "completion_logprobs"]

# A token of the answer and what is known of it.
Scored = tuple[int, TokenLogprobs]
TokenText = Callable[[int], str]


def chat_logprobs(scored: Sequence[Scored], text_of: TokenText) -> dict[str, Any]:
    """``logprobs`` of a chat choice: one entry a token."""
    return {
        "content": [
            {
                **_entry(token, found.logprob, text_of),
                "top_logprobs": [_entry(other, logprob, text_of) for other, logprob in found.top],
            }
            for token, found in scored
        ],
        "refusal": None,
    }


def _entry(token: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(scored: Sequence[Scored], text_of: TokenText, offset: int) -> tuple[dict[str, Any], int]:
    """``logprobs`` of a completion choice, four lists side by side; and the offset of the text that follows.

    Args:
        offset: of the first token's text in the answer.
    """
    texts, offsets = [], []
    for token, _ in scored:
        texts.append(text_of(token))
        offsets.append(offset)
        offset += len(texts[-1])
    tops = [{text_of(other): logprob for other, logprob in found.top} for _, found in scored]
    body = {
        "tokens": texts,
        "token_logprobs": [found.logprob for _, found in scored],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return body, offset
