"""The gateway's ear at every node's prefix cache, and what it knows from it.

A node tells what it holds in one endless answer: a snapshot, then numbered changes. The global manager keeps it as
soft state. Whenever anything is out of order (a gap, a connection that broke, a node that restarted), all that is
known of that node is forgotten and a new snapshot is asked for; until it comes, nothing is said to be cached there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager, Match
from prfaas_net.clock import Clock
from prfaas_net.errors import PrfaasError
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.nodes.messages import NodeInfo

__all__ = ["CacheWatch"]

log = logging.getLogger(__name__)

# A node says something at least every two seconds (see nodes.cache_feed).
SILENCE_S = 10.0
# A snapshot of a million blocks is 35 MB of hex; this bounds what a broken node can make us hold.
MAX_LINE_BYTES = 128 << 20
RETRY_S = 0.5
# Hashing 16K tokens takes half a millisecond; longer prompts are not hashed on the event loop.
INLINE_HASH_TOKENS = 16384


class CacheWatch:
    """Follows the prefix caches of a fleet.

    Args:
        nodes: as the fleet watches them.
        clock: for the manager.
    """

    def __init__(self, nodes: Sequence[WatchedNode], client: NodeClient, clock: Clock) -> None:
        self.manager: CacheManager | None = None
        self._nodes = nodes
        self._client = client
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen."""
        self._tasks = [asyncio.create_task(self._follow(node), name=f"cache of {node.url}") for node in self._nodes]

    async def stop(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def keys_of(self, token_ids: Sequence[int], salt: str) -> bytes:
        """The prompt's block keys; none while no node keeps a prefix cache."""
        manager = self.manager
        if manager is None:
            return b""
        scope = PrefixScope(manager.layout, manager.block_tokens, salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            return prefix_keys(scope, token_ids)
        return await asyncio.to_thread(prefix_keys, scope, token_ids)

    def match(self, keys: bytes, n_tokens: int) -> Match | None:
        """What each node holds of a prompt; None while nothing is known."""
        return None if self.manager is None or not keys else self.manager.match(keys, n_tokens=n_tokens)

    async def _follow(self, node: WatchedNode) -> None:
        while True:
            info = node.info
            if info is not None and node.up and info.block_tokens:
                try:
                    await self._listen(node, info)
                except PrfaasError as error:
                    log.info("the cache of node %s is unknown: %s", info.node_id, error.line())
                except Exception:
                    log.exception("listening to the cache of node %s failed", info.node_id)
                finally:
                    if self.manager is not None:
                        self.manager.drop(info.node_id)
            await asyncio.sleep(RETRY_S)

    async def _listen(self, node: WatchedNode, info: NodeInfo) -> None:
        """Until something is out of order."""
        stream = await self._client.watch(
            info.node_id, node.url, "/v1/cache/events", limit_bytes=MAX_LINE_BYTES, silence_s=SILENCE_S
        )
        try:
            manager = self._manager_for(info)
            while True:
                event = await stream.next()
                if event["event"] == "beat":
                    continue
                outcome = manager.apply(info.node_id, info.cluster, event, now=self._clock.now())
                if not outcome.applied:
                    log.warning("the cache of node %s is asked for again: %s", info.node_id, outcome)
                    return
                if manager is not self.manager:
                    return  # the fleet runs another model now
        finally:
            stream.close()

    def _manager_for(self, info: NodeInfo) -> CacheManager:
        """The manager for this model; a new one when the fleet changed to another."""
        wanted = (info.layout, info.block_tokens, frozenset(info.groups))
        manager = self.manager
        if manager is None or (manager.layout, manager.block_tokens, manager.groups) != wanted:
            if manager is not None and any(other is not info and _serves(other, manager) for other in self._infos()):
                # The others go on; this one is refused by the manager, and counted.
                return manager
            manager = self.manager = CacheManager(*wanted)
        return manager

    def _infos(self) -> list[NodeInfo]:
        return [node.info for node in self._nodes if node.info is not None and node.up]


def _serves(info: NodeInfo, manager: CacheManager) -> bool:
    return (info.layout, info.block_tokens) == (manager.layout, manager.block_tokens)
