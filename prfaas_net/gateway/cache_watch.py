"""The gateway's ear at every node's prefix cache, and what it knows from it.

A node tells what it holds in one endless answer: a snapshot, then numbered changes. The global manager keeps it as
soft state. Whenever anything is out of order (a gap, a connection that broke, a node that restarted), all that is
known of that node is forgotten and a new snapshot is asked for; until it comes, nothing is said to be cached there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager, Match
from prfaas_net.clock import Clock
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.gateway.follower import Follower
from prfaas_net.nodes.messages import NodeInfo

__all__ = ["CacheWatch"]

# Hashing 16K tokens takes half a millisecond; longer prompts are not hashed on the event loop.
INLINE_HASH_TOKENS = 16384


class CacheWatch(Follower):
    """Follows the prefix caches of a fleet."""

    path = "/v1/cache/events"
    # A snapshot of a million blocks is 35 MB of hex; this bounds what a broken node can make us hold.
    max_line_bytes: ClassVar[int] = 128 << 20

    def __init__(self, nodes: Sequence[WatchedNode], client: NodeClient, clock: Clock) -> None:
        super().__init__(nodes, client)
        self.manager: CacheManager | None = None
        self._clock = clock
        self._telling: set[str] = set()

    async def keys_of(self, token_ids: Sequence[int], salt: str) -> bytes:
        """The prompt's block keys; none while no node keeps a prefix cache."""
        manager = self.manager
        if manager is None:
            return b""
        scope = PrefixScope(manager.layout, manager.block_tokens, salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            return prefix_keys(scope, token_ids)
        return await asyncio.to_thread(prefix_keys, scope, token_ids)

    def match(self, keys: bytes, n_tokens: int) -> Match:
        """What each node holds of a prompt."""
        return Match() if self.manager is None or not keys else self.manager.match(keys, n_tokens=n_tokens)

    def wants(self, info: NodeInfo) -> bool:
        return bool(info.block_tokens)

    def take(self, info: NodeInfo, event: dict[str, Any]) -> str | None:
        manager = self._manager_for(info)
        self._telling.add(info.node_id)
        outcome = manager.apply(info.node_id, info.cluster, event, now=self._clock.now())
        return None if outcome.applied else f"{outcome.resync}, {outcome.detail}"

    def lost(self, info: NodeInfo) -> None:
        self._telling.discard(info.node_id)
        if self.manager is not None:
            self.manager.drop(info.node_id)

    def _manager_for(self, info: NodeInfo) -> CacheManager:
        """The manager for this model; a new one when the whole fleet has changed to another.

        While others still serve the old one, a node that does not fit is refused by it, and counted.
        """
        wanted = (info.layout, info.block_tokens, frozenset(info.groups))
        manager = self.manager
        if manager is not None and (manager.layout, manager.block_tokens, manager.groups) == wanted:
            return manager
        if manager is None or not self._telling - {info.node_id}:
            manager = self.manager = CacheManager(*wanted)
        return manager
