"""A node's KVCache memory in its ``/metrics``: read when it is asked for, kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas_net.nodes.kv_memory import KvMemory
from prfaas_net.nodes.second_tier import SecondTier

__all__ = ["MemoryCollector"]


class MemoryCollector(Collector):
    """The pool by what its blocks are used for, and how the prefix cache fares."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        memory = self._memory
        pool, stats = memory.cache.pool, memory.cache.stats
        yield GaugeMetricFamily(
            "prfaas_kv_arena_used_bytes", "KVCache memory reserved by sequences", value=memory.used_bytes
        )
        blocks = GaugeMetricFamily("prfaas_kv_pool_bytes", "KVCache memory by what it is used for", labels=("use",))
        for use, n in (("free", pool.n_free), ("prefix", pool.n_prefix), ("transfer", pool.n_transfer)):
            blocks.add_metric([use], n * memory.block_bytes)
        yield blocks
        held = GaugeMetricFamily("prfaas_prefix_cache_bytes", "Cached state by kind", labels=("group",))
        evicted = CounterMetricFamily("prfaas_prefix_cache_evictions", "Entries that gave way", labels=("group",))
        for group in memory.slots.group_bytes:
            held.add_metric([group.value], stats.bytes_held[group])
            evicted.add_metric([group.value], stats.evictions[group])
        yield held
        yield evicted
        for name, text, value in (
            ("queries_tokens", "Prompt tokens looked up", stats.tokens_asked),
            ("hits_tokens", "Prompt tokens found", stats.tokens_reused),
            ("declined", "Entries not taken in for want of room", stats.declined),
            ("moved_blocks", "Memory blocks copied aside for a sequence", stats.blocks_moved),
        ):
            yield CounterMetricFamily(f"prfaas_prefix_cache_{name}", text, value=value)
        if memory.tier is not None:
            yield from _tier(memory.tier)


def _tier(tier: SecondTier) -> Iterator[Metric]:
    entries = CounterMetricFamily("prfaas_cache_tier_entries", "What became of entries", labels=("outcome",))
    stats = tier.stats
    for outcome, n in (
        ("stored", stats.stored), ("skipped", tier.n_skipped), ("hit", stats.hits), ("miss", stats.misses),
        ("removed", stats.removed), ("poisoned", stats.poisoned), ("failed", stats.failures),
    ):  # fmt: skip
        entries.add_metric([outcome], n)
    yield entries
