"""How a gateway has a cached prefix brought from one node to another.

Both calls are one POST whose answer is a stream of JSON lines, like those of :mod:`prfaas_net.nodes.messages`: the open
response owns the work, and either may end in ``{"event": "error", ...}``.

``POST /v1/cache/take`` (a :class:`CacheTakeCall`), to where the prefix shall be, answers with

    {"event": "reserved", "ticket": {...}, "held_tokens": 512}    memory is reserved; rows of so many tokens are there
    {"event": "done", "kept_tokens": 2048}                        it is cached; at once, if it was before

``POST /v1/cache/copy`` (a :class:`CacheCopyCall`), to a node that holds it, answers with

    {"event": "done", "kv_bytes": 1048576, "transfer_s": 0.08}    all of it has landed there
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.nodes.messages import MAX_PROMPT_TOKENS, Message

__all__ = ["CacheCopyCall", "CacheTakeCall"]

_KEYS = "^(?:[0-9a-f]{32})+$"


class CacheTakeCall(Message):
    """Take a prefix in and cache it.

    Attributes:
        prefix_keys: hex of its block keys; it ends where the last block does.
        source_cluster: where it will come from; decides which of the node's addresses the ticket names.
        deadline_s: from now.
    """

    request_id: str = Field(min_length=1, max_length=128)
    layout: str = Field(max_length=64)
    prefix_keys: str = Field(max_length=2 * KEY_BYTES * MAX_PROMPT_TOKENS, pattern=_KEYS)
    source_cluster: str = Field(max_length=128)
    deadline_s: float = Field(gt=0, le=3600)


class CacheCopyCall(Message):
    """Send a prefix that is cached here to whoever issued the ticket.

    Attributes:
        destination_cluster: where that is; decides how a link to there behaves.
    """

    request_id: str = Field(min_length=1, max_length=128)
    prefix_keys: str = Field(max_length=2 * KEY_BYTES * MAX_PROMPT_TOKENS, pattern=_KEYS)
    ticket: dict[str, Any]
    destination_cluster: str = Field("", max_length=128)
    deadline_s: float = Field(gt=0, le=3600)
