"""The gateway's ear at every node's prefix cache, and what it knows from it.

A node tells what it holds in one endless answer: a snapshot, then numbered changes. The global manager keeps it as
soft state. Whenever anything is out of order (a gap, a connection that broke, a node that restarted), all that is
known of that node is forgotten and a new snapshot is asked for; until it comes, nothing is said to be cached there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from prfaas_net.cache.events import CacheEvent
from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager, Match, Outcome
from prfaas_net.clock import Clock
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.engines.ranks import by_node, node_of, rank_of
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.gateway.follower import Follower
from prfaas_net.kv import KvKind
from prfaas_net.nodes.messages import NodeInfo

__all__ = ["CacheWatch"]

# Hashing 16K tokens takes half a millisecond; longer prompts are not hashed on the event loop.
INLINE_HASH_TOKENS = 16384


class CacheWatch(Follower):
    """Follows the prefix caches of a fleet.

    Attributes:
        clusters: of those whose events come another way (:meth:`told`).
        asked_tokens, found_tokens: of prompts that were looked up, and of those what some node held.
    """

    path = "/v1/cache/events"
    # A snapshot of a million blocks is 35 MB of hex; this bounds what a broken node can make us hold.
    max_line_bytes: ClassVar[int] = 128 << 20

    def __init__(self, nodes: Sequence[WatchedNode], client: NodeClient, clock: Clock) -> None:
        super().__init__(nodes, client)
        self.manager: CacheManager | None = None
        self._clock = clock
        self._telling: set[str] = set()
        self.clusters: dict[str, str] = {}
        self.asked_tokens = self.found_tokens = 0

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
        if self.manager is None or not keys:
            return Match()
        found = by_node(self.manager.match(keys, n_tokens=n_tokens))
        self.asked_tokens += n_tokens
        self.found_tokens += max((node.usable_tokens for node in found.nodes), default=0)
        return found

    def listening(self) -> tuple[int, int]:
        """How many nodes tell what they hold, and how many should and do not."""
        infos = [node.info for node in self.nodes if node.up and node.info is not None]
        keeping = [info.node_id for info in infos if self.wants(info)]
        told = sum(node_id in self._telling for node_id in keeping)
        return told, len(keeping) - told

    def blocks_of(self, node_id: str) -> int:
        """(block, group) pairs that a node holds, all its ranks together."""
        if self.manager is None:
            return 0
        members = [node_id, *(member for member in self.clusters if member != node_id and node_of(member) == node_id)]
        return sum(map(self.manager.node_blocks, members))

    def rank_of(self, node_id: str, keys: bytes, n_tokens: int) -> int | None:
        """The data-parallel rank of a node that holds the most of a prompt."""
        return None if self.manager is None else rank_of(self.manager.match(keys, n_tokens=n_tokens), node_id)

    def expect(self, layout: str, block_tokens: int, groups: frozenset[KvKind]) -> None:
        """Events of caches of this shape will be told, all of the same."""
        if self.manager is None:
            self.manager = CacheManager(layout, block_tokens, groups)

    def told(self, member: str, event: CacheEvent) -> Outcome:
        """An event of somebody in :attr:`clusters`."""
        assert self.manager is not None
        return self.manager.apply(member, self.clusters[member], event, now=self._clock.now())

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
