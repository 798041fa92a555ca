"""Data-parallel ranks: each caches for itself, behind one address."""

from __future__ import annotations

from prfaas_net.cache.manager import Match, NodeMatch

__all__ = ["RANK_HEADER", "by_node", "member_of", "node_of", "rank_of"]

# vLLM and SGLang both pin a request to the rank that this names.
RANK_HEADER = "X-Data-Parallel-Rank"
_MARK = "#"


def member_of(node_id: str, rank: int, n_ranks: int) -> str:
    """Under which id the cache of a rank is known; that of a server without ranks is the server's own."""
    return node_id if n_ranks == 1 else f"{node_id}{_MARK}{rank}"


def node_of(member: str) -> str:
    """The server that a rank belongs to."""
    return member.partition(_MARK)[0]


def by_node(match: Match) -> Match:
    """Of each server, the rank that holds the most."""
    if not any(_MARK in held.node_id for held in match.nodes):
        return match
    best: dict[str, NodeMatch] = {}
    for held in match.nodes:
        node_id = node_of(held.node_id)
        if node_id not in best or held.usable_tokens > best[node_id].usable_tokens:
            best[node_id] = held._replace(node_id=node_id)
    return Match(tuple(best.values()))


def rank_of(match: Match, node_id: str) -> int | None:
    """The rank of a server that holds the most; None where none of its ranks holds anything."""
    held = [held for held in match.nodes if node_of(held.node_id) == node_id and held.usable_tokens]
    marked = [(one.usable_tokens, -int(one.node_id.partition(_MARK)[2])) for one in held if _MARK in one.node_id]
    return -max(marked)[1] if marked else None
