"""The gateway's view of every node's prefix cache: believed as far as it is in order, and not a step further."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling import KvSize, LinkSeen, NodeProfile, NodeSeen, PiecewiseLinear, Role
from tests.gateway.conftest import Bench, open_bench
from tests.gateway.fakes import LAYOUT, FakeNode
from tests.gateway.feeds import FeedScript
from tests.waiting import until

Event = dict[str, Any]
BLOCK = 4
PROMPT = "sixteen tokens .." * 2  # 34 bytes, a token each: 8 full blocks
KEYS = prefix_keys(PrefixScope(LAYOUT, BLOCK), list(PROMPT.encode()))
ROOT = PrefixScope(LAYOUT, BLOCK).root


class CacheScript(FeedScript):
    """A node's cache as a test wants it."""

    def __init__(self, node: FakeNode) -> None:
        super().__init__(node, "/v1/cache/events")
        node.info |= {"block_tokens": BLOCK, "groups": ["full", "linear"]}

    def snapshot(self, n_blocks: int, states: tuple[int, ...] = (), seq: int = 0, **changes: Any) -> None:
        stored = [stored_rows(n_blocks)] if n_blocks else []
        stored += [{"group": "linear", "keys": key_of(index).hex()} for index in states]
        body = {
            "event": "snapshot", "node": self.node.info["node_id"], "boot": "b", "layout": LAYOUT,
            "block_tokens": BLOCK, "seq": seq, "groups": ["full", "linear"], "stored": stored,
        }  # fmt: skip
        self.say(body | changes)


def key_of(index: int) -> bytes:
    return KEYS[16 * index : 16 * index + 16]


def stored_rows(n_blocks: int) -> Event:
    return {"group": "full", "parent": ROOT.hex(), "keys": KEYS[: 16 * n_blocks].hex()}


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[Bench, CacheScript]]:
    """A gateway whose PrfaaS prefill node tells of its cache."""
    scripts: list[CacheScript] = []
    async with open_bench(prepare=lambda fleet: scripts.append(CacheScript(fleet.far)), **settings) as bench:
        yield bench, scripts[0]
        scripts[0].end()


async def cached(bench: Bench, prompt: str = PROMPT, **body: Any) -> dict[str, int]:
    """By cluster, as ``explain`` shows it."""
    answer = await bench.complete(prompt=prompt, explain=True, max_tokens=2, **body)
    found: dict[str, int] = answer["prfaas"]["cached_in"]
    return found


async def comes_to(bench: Bench, expected: dict[str, int]) -> None:
    async with asyncio.timeout(5):
        while await cached(bench) != expected:
            pass


async def test_a_fleet_without_caches_is_routed_by_whole_prompts(bench: Bench) -> None:
    """Nobody asks its nodes for events."""
    assert await cached(bench) == {}


async def test_what_a_node_tells_steers_the_router() -> None:
    """Six blocks of rows, state after the second and the fifth: 20 tokens in that cluster, known in explain."""
    async with scripted() as (bench, script):
        script.snapshot(6, (1, 4))
        await comes_to(bench, {"prfaas": 20})
        script.say({"event": "delta", "seq": 1, "stored": [{"group": "linear", "keys": key_of(5).hex()}]})
        await comes_to(bench, {"prfaas": 24})
        script.say({"event": "delta", "seq": 2, "removed": [{"group": "full", "keys": key_of(4).hex()}]})
        await comes_to(bench, {"prfaas": 8})
        assert await cached(bench, cache_salt="mine") == {}
        call = bench.fleet.decode.calls[-2]
        assert call["prefix_keys"] == KEYS.hex()
        assert bench.fleet.decode.calls[-1]["prefix_keys"] != KEYS.hex()
        assert script.listeners == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"event": "delta", "seq": 2},
        {"event": "delta", "seq": 0},
        {"event": "delta", "seq": 1, "stored": [{"group": "full", "parent": "ab" * 16, "keys": "cd" * 16}]},
        {"event": "delta", "seq": 1, "stored": "everything"},
        {"event": "delta", "seq": 1, "stored": [{"group": "full", "parent": "00", "keys": "11"}]},
        {"event": "surprise"},
        {"no": "event"},
        {"event": "snapshot", "node": "prfaas-0", "boot": "b", "layout": "another", "block_tokens": 4, "seq": 1,
         "groups": ["full", "linear"], "stored": []},
    ],
    ids=["gap", "repeated", "unknown parent", "wrong type", "short key", "unknown kind", "no event", "fingerprint"],
)  # fmt: skip
async def test_after_anything_out_of_order_nothing_is_believed_until_a_new_snapshot(bad: Event) -> None:
    async with scripted() as (bench, script):
        script.snapshot(6, (1, 4))
        await comes_to(bench, {"prfaas": 20})
        script.say(bad)
        await comes_to(bench, {})
        script.end()  # the answer that the gateway has left
        await until(lambda: script.listeners == 2)
        script.snapshot(3, (2,), seq=40)
        await comes_to(bench, {"prfaas": 12})


async def test_a_node_that_goes_away_holds_nothing() -> None:
    """Its connection breaks: what was known of it is forgotten at once."""
    async with scripted() as (bench, script):
        script.snapshot(6, (4,))
        await comes_to(bench, {"prfaas": 20})
        script.end()
        await comes_to(bench, {})


async def test_usage_tells_what_the_prefill_found_not_what_was_expected() -> None:
    """The router knew of 20 tokens; the node found 8."""
    async with scripted() as (bench, script):
        script.snapshot(6, (1, 4))
        await comes_to(bench, {"prfaas": 20})
        bench.fleet.decode.script.cached_tokens = 8
        for node in (bench.fleet.far, bench.fleet.near):
            node.script.cached_tokens = 8
        answer = await bench.complete(prompt=PROMPT, explain=True)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        assert answer["prfaas"]["incremental_tokens"] == len(PROMPT) - 8


@pytest.mark.parametrize("lie", [-1, 34, "many", 1.5])
async def test_a_node_that_claims_nonsense_fails_the_request(bench: Bench, lie: Any) -> None:
    bench.fleet.decode.script.cached_tokens = lie
    status, answer, _ = await bench.post("/v1/completions", {"prompt": PROMPT})
    assert status == 502
    assert "cached_tokens" in answer["error"]["message"]


async def test_what_is_held_and_what_had_better_be_moved_is_shown() -> None:
    """A hot prefix on the one PrfaaS node: no second node to replicate to, so nothing is advised; all is counted."""
    async with scripted() as (bench, script):
        assert (await bench.get("/v1/cache"))[1]["enabled"] is False
        script.snapshot(6, (1, 4))
        await comes_to(bench, {"prfaas": 20})
        status, body = await bench.get("/v1/cache")
        assert status == 200
        assert body["nodes"]["prfaas-0"] == {"cluster": "prfaas", "blocks": 8}
        assert body["counters"]["snapshots"] == 1
        assert body["counters"]["advice_uses"] >= 1
        assert body["advice"] == []


async def test_a_prefix_that_is_hot_in_another_cluster_is_advised_to_be_copied() -> None:
    """Used at home, held only far away, dear to compute and cheap to move."""
    async with scripted(policy="local") as (bench, script):
        script.snapshot(6, (1, 4))
        await comes_to(bench, {"prfaas": 20})
        router = bench.gateway.router
        router.predictor.kv = KvSize(1000.0, 100.0)
        router.observe(LinkSeen("prfaas", "pd", LinkState.CLEAR, 1e9), now=0.0)
        slow = NodeProfile("slow", PiecewiseLinear.straight(1.0, 1.0))
        router.observe(NodeSeen("pd-prefill-0", "pd", Role.PREFILL, 4096, 64, slow), now=0.0)
        for _ in range(20):
            await cached(bench)
            router.state.nodes["pd-prefill-0"].correction.pace = router.state.nodes["pd-prefill-0"].shared.pace = 1.0
        (advice,) = (await bench.get("/v1/cache"))[1]["advice"]
        assert (advice["kind"], advice["source"], advice["target_cluster"]) == ("CopyPrefix", "prfaas-0", "pd")
        assert (advice["n_tokens"], advice["keys"]) == (20, KEYS[: 16 * 5].hex())


async def test_field_61_an_index_that_stays_empty_is_seen_to_be_empty() -> None:
    """A node that keeps a cache and tells nothing of it is counted as silent; so is how much the look-ups found."""

    def nodes(bench: Bench, state: str) -> float:
        return bench.count("prfaas_cache_nodes", state=state)

    async with scripted() as (bench, script):
        assert (nodes(bench, "told"), nodes(bench, "silent")) == (0, 1)
        await bench.complete(prompt=PROMPT)
        script.snapshot(4, states=(3,))
        await until(lambda: (nodes(bench, "told"), nodes(bench, "silent")) == (1, 0))
        await comes_to(bench, {"prfaas": 16})
        asked, found = (bench.count("prfaas_cache_lookup_tokens_total", outcome=word) for word in ("asked", "found"))
        assert asked >= len(PROMPT) and found >= 16
        script.end()
        await until(lambda: nodes(bench, "silent") == 1)
