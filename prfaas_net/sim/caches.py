"""The caches of a simulated fleet, and what a gateway knows of them: the real manager, fed by their streams.

A cluster's pool tells what it stores and evicts as a snapshot and numbered deltas, each a moment later, as nodes do
(:mod:`prfaas_net.cache.events`). An arrival is answered from what has been heard; what a prefill then really goes on
from is decided where it runs, from what is really there.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas_net.cache.changes import deltas_of, runs_of
from prfaas_net.cache.events import CacheEvent, Snapshot
from prfaas_net.cache.keys import PrefixScope
from prfaas_net.cache.manager import CacheManager
from prfaas_net.scheduling import KvSize
from prfaas_net.sim.loop import Loop
from prfaas_net.sim.prefix import ClusterCache

__all__ = ["FleetCaches"]

# Stands for the fingerprint of the model's layout: a simulation has one model.
LAYOUT = "simulated"


class FleetCaches:
    """The pool of every cluster that has one.

    Args:
        pool_bytes: by cluster, over all its machines.
        delay_s: from a change to when the gateway has heard of it.
    """

    def __init__(
        self, loop: Loop, kv: KvSize, pool_bytes: Mapping[str, float], block_tokens: int, *, delay_s: float
    ) -> None:
        self._loop, self._delay_s = loop, delay_s
        self._block_tokens = block_tokens
        self._pools = {name: ClusterCache(kv, block_tokens, n_bytes) for name, n_bytes in pool_bytes.items()}
        groups = next(iter(self._pools.values())).groups if self._pools else frozenset()
        self.manager = CacheManager(LAYOUT, block_tokens, groups) if groups else None
        self._root = PrefixScope(LAYOUT, block_tokens).root
        self._seq = dict.fromkeys(self._pools, 0)
        # Streams that broke are told apart from those that followed: what was on its way of the old one is lost.
        self._boots = dict.fromkeys(self._pools, 0)
        for name in self._pools:
            self.begin(name)

    def heard(self, keys: bytes, prompt_tokens: int) -> dict[str, int]:
        """By cluster, from where a prefill there could go on, as far as the gateway knows; in tokens."""
        if self.manager is None or not keys:
            return {}
        match = self.manager.match(keys, n_tokens=prompt_tokens)
        return {node.cluster: node.usable_tokens for node in match.nodes}

    def held(self, cluster: str, keys: bytes, prompt_tokens: int) -> tuple[int, int]:
        """What is really there: from where a prefill could go on, and up to where rows are held; in tokens."""
        pool = self._pools.get(cluster)
        return (0, 0) if pool is None or not keys else pool.match_tokens(keys, prompt_tokens, now=self._loop.now)

    def keep(self, cluster: str, keys: bytes, prompt_tokens: int, *, start_tokens: int, computed: bool) -> None:
        """A cluster has a prompt now; see :meth:`ClusterCache.add`."""
        pool = self._pools.get(cluster)
        if pool is None or not keys:
            return
        pool.add(keys, prompt_tokens, start_tokens=start_tokens, computed=computed, now=self._loop.now)
        for delta in deltas_of(pool.drain_changes(), self._seq[cluster] + 1, self._root):
            self._seq[cluster] = delta.seq
            self._tell(cluster, delta)

    def lose(self, cluster: str) -> None:
        """A cluster's last machine is gone, with all that it held; its stream breaks."""
        pool = self._pools.get(cluster)
        if pool is not None and self.manager is not None:
            pool.drop_all()
            pool.drain_changes()
            self._boots[cluster] += 1
            self.manager.drop(cluster)

    def begin(self, cluster: str) -> None:
        """A cluster's stream begins, or begins again: with a snapshot."""
        pool = self._pools.get(cluster)
        if pool is not None and self.manager is not None:
            pool.drain_changes()
            stored = tuple(runs_of(pool.snapshot_changes(), self._root))
            boot, seq = str(self._boots[cluster]), self._seq[cluster]
            self._tell(cluster, Snapshot(cluster, boot, LAYOUT, self._block_tokens, seq, self.manager.groups, stored))

    def _tell(self, cluster: str, event: CacheEvent) -> None:
        self._loop.after(self._delay_s, self._hear, (cluster, self._boots[cluster], event))

    def _hear(self, told: tuple[str, int, CacheEvent]) -> None:
        cluster, boot, event = told
        if self.manager is None or boot != self._boots[cluster]:
            return
        if not self.manager.apply(cluster, cluster, event, now=self._loop.now).applied:
            self.begin(cluster)
