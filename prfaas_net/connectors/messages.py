"""What the decode side's connector says to the prefill side's, over HTTP.

``GET /v1/kv/layout`` answers with a :class:`PeerInfo`: what the prefill server's pages look like.

``POST /v1/kv/claims`` (a :class:`ClaimCall`) hands over a ticket. The answer is a stream of JSON lines, and the open
response owns the claim: closing it gives it up.

    {"event": "waiting"}                         once a second, until the end: this side is alive
    {"event": "paired", "cached_tokens": 0}      the prompt is here; its KVCache follows on the KV stream
    {"event": "stale"}                           this server has restarted since its layout was asked for: ask again
    {"event": "sent", "bytes": 1, "seconds": 0.1, "exposed_s": 0.1}
                                                 all of it has landed

It may end instead with ``{"event": "error", "error": {...}}``.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from prfaas_net.nodes.messages import Message

__all__ = ["ClaimCall", "PeerInfo"]


class PeerInfo(Message):
    """A prefill rank, to decode ranks.

    Attributes:
        layout: body of an :class:`~prfaas_net.connectors.layout.EngineLayout`.
    """

    boot_id: str = Field(max_length=128)
    engine_id: str = Field(max_length=256)
    cluster: str = Field(max_length=128)
    layout: dict[str, Any]


class ClaimCall(Message):
    """A ticket for a prompt's KVCache.

    Attributes:
        boot_id: of the prefill server that the plan was made for.
        digest: of the first ``stop_token`` tokens; the prompts must be the same.
        ticket: of the KV stream. None: nothing is wanted.
        plan: body of a :class:`~prfaas_net.connectors.plan.PagePlan`.
        claims: how many decode ranks will claim from this prefill rank.
        release: nobody will come any more: let go at once.
    """

    protocol: int
    boot_id: str = Field("", max_length=128)
    transfer_id: str = Field(min_length=1, max_length=128)
    digest: str = Field("", max_length=64)
    stop_token: int = Field(0, ge=0)
    ticket: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    claims: int = Field(1, ge=1, le=4096)
    release: bool = False
    deadline_s: float = Field(gt=0, le=86400)
