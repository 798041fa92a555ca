"""Exact hit lengths on real traces: agents and conversations, with room for everything and with too little."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pytest

from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.retention import snapshot_lengths
from prfaas_net.kv import KvKind
from prfaas_net.sim.requests import mooncake_conversation

TOKENS = 512
Requests = list[tuple[int, Sequence[int]]]


def requests_of(trace: str) -> Requests:
    """Prompt length and block ids of every request; each id names its whole prefix, the last block may not be full."""
    if trace == "conversation":
        return [(request.prompt_tokens, request.block_ids) for request in mooncake_conversation()]
    path = Path(__file__).parent / "data" / f"lmcache_agent_{trace}.runs.jsonl.gz"
    rows = map(orjson.loads, gzip.decompress(path.read_bytes()).splitlines())
    return [(row[1], [i for first, n in row[3] for i in range(first, first + n)]) for row in rows]


def keys_of(ids: Sequence[int]) -> bytes:
    return b"".join(i.to_bytes(16, "little") for i in ids)


def by_dictionary(requests: Requests) -> Iterator[int]:
    """Blocks of each prompt that were seen before: what every other way of finding it must equal."""
    seen: set[int] = set()
    for _, ids in requests:
        yield next((k for k, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)


def by_cache(requests: Requests, cache: PrefixCache, *, partial: bool) -> Iterator[int]:
    """Blocks that the cache answers. ``partial`` takes a last block that is not full for a full one."""
    for now, (n_tokens, ids) in enumerate(requests):
        n = len(ids) if partial else n_tokens // TOKENS
        keys = keys_of(ids[:n])
        asked = n * TOKENS + 1 if partial else n_tokens
        hit = cache.match(keys, n_tokens=asked, need_state=True, now=now)
        entries = cache.insert_rows(keys, 0, n, now=now)
        lengths = snapshot_lengths(asked, TOKENS, None, start_tokens=hit.length_tokens, known_tokens=hit.rows_tokens)
        states = [cache.insert_state(keys, length // TOKENS - 1, now=now) for length in lengths]
        cache.commit([*entries, *(state for state in states if state is not None)])
        cache.release(hit)
        yield hit.length_tokens // TOKENS


# Token reuse, block reuse and share of requests with a hit that the traces are known for (infinite cache).
STATISTICS = {
    "conversation": (12_031, 0.374, 0.366, 0.9999),
    "miniswe": (402, 0.900, 0.865, 0.953),
    "taubench": (188, 0.188, 0.185, 0.207),
}


@pytest.mark.parametrize("trace", STATISTICS)
def test_an_infinite_cache_reuses_what_the_traces_are_known_for(trace: str) -> None:
    requests = requests_of(trace)
    n_blocks = len({block for _, ids in requests for block in ids})
    cache = PrefixCache(n_blocks, 1, {KvKind.FULL: 1}, TOKENS)
    hits = list(by_cache(requests, cache, partial=True))
    assert hits == list(by_dictionary(requests))
    reused = sum(min(k * TOKENS, n_tokens) for k, (n_tokens, _) in zip(hits, requests, strict=True))
    figures = (
        len(requests),
        reused / sum(n_tokens for n_tokens, _ in requests),
        sum(hits) / sum(len(ids) for _, ids in requests),
        sum(k > 0 for k in hits) / len(requests),
    )
    assert figures == pytest.approx(STATISTICS[trace], abs=6e-4)
    assert cache.pool.n_free == 0 and not cache.stats.evictions
    cache.validate()


@pytest.mark.parametrize("trace", ["miniswe", "taubench"])
def test_a_hybrid_hit_ends_where_a_state_was_kept(trace: str) -> None:
    """Full blocks only, at least one token to run, and state at exactly that length: beside two sets."""
    requests = requests_of(trace)
    cache = PrefixCache(10_000, 1, {KvKind.FULL: 1, KvKind.LINEAR: 3}, TOKENS)
    rows: set[int] = set()
    states: set[int] = set()
    expected = []
    for n_tokens, ids in requests:
        full, most = ids[: n_tokens // TOKENS], (n_tokens - 1) // TOKENS
        known = next((k for k, block in enumerate(full[:most]) if block not in rows), most)
        expected.append(max((k + 1 for k in range(known) if full[k] in states), default=0))
        rows.update(full)
        # Kept: after the last full block, after the one that leaves a token, and where the known part ends.
        states.update(full[n - 1] for n in {len(full), most, known} if n > expected[-1])
    assert list(by_cache(requests, cache, partial=False)) == expected
    assert sum(expected) > 0


@pytest.mark.parametrize("trace", ["miniswe", "taubench"])
def test_a_small_cache_reuses_less_and_never_more(trace: str) -> None:
    requests = requests_of(trace)
    most = list(by_dictionary(requests))
    totals = []
    for pool_blocks in (20, 60, 1000):
        cache = PrefixCache(pool_blocks, 1, {KvKind.FULL: 1}, TOKENS)
        hits = list(by_cache(requests, cache, partial=True))
        cache.validate()
        assert all(k <= limit for k, limit in zip(hits, most, strict=True))
        totals.append(sum(hits))
    assert totals[0] < totals[1] <= totals[2] == sum(most)
