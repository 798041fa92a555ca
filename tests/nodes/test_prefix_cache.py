"""Prefix caches of nodes: what is there already is neither computed nor sent again, and changes no token."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager
from prfaas_net.kv import KvKind
from prfaas_net.nodes.engine_api import Sampling
from tests.nodes.conftest import Event, Hand, Nodes
from tests.nodes.hash_engine import LAYOUT, HashEngine
from tests.waiting import until

BLOCK = 32
PROMPT = [(7 * i + 3) % 1000 for i in range(300)]
CACHE: Event = {"cache": {"block_tokens": BLOCK, "state_interval_tokens": 4 * BLOCK}}
ROW_BYTES = (32 + 32 + 24) * 4
GROUPS = frozenset({KvKind.FULL, KvKind.WINDOW, KvKind.LINEAR})


def settings(arena: str = "8MiB") -> dict[str, Event]:
    node = {"kv": {"arena": arena}, **CACHE}
    return {"prefill": node, "decode": node}


def keys_of(prompt: list[int], salt: str = "") -> bytes:
    return prefix_keys(PrefixScope(LAYOUT.fingerprint, BLOCK, salt), prompt)


async def run(hand: Hand, prompt: list[int], salt: str = "", **changes: Any) -> tuple[list[int], Event]:
    """One request as a gateway makes it; returns its tokens and its transfer's report."""
    async with hand.decode(len(prompt), prefix_keys=keys_of(prompt, salt).hex(), **changes) as decode:
        ticket = (await decode.next())["ticket"]
        async with hand.prefill(prompt, ticket, cache_salt=salt, **changes) as prefill:
            decoded, prefilled = await decode.all(), await prefill.all()
    tokens = [event for event in decoded if event["event"] == "token"]
    report: Event = prefilled[-1]["report"]
    started = next(event for event in prefilled if event["event"] == "started")
    assert tokens[0]["cached_tokens"] == started["cached_tokens"] == report["cached_tokens"]
    return [event["token"] for event in tokens], report


def alone(prompt: list[int]) -> list[int]:
    return HashEngine().generate(prompt, Sampling(max_tokens=8))


def validate(hand: Hand) -> None:
    hand.prefill_node.memory.cache.validate()
    hand.decode_node.memory.cache.validate()


async def test_a_second_identical_prompt_prefills_and_sends_only_its_tail(nodes: Nodes) -> None:
    """300 tokens in blocks of 32: 288 are there. State crosses whole, for it is that of the end."""
    engine = HashEngine()
    async with nodes(engine, **settings()) as hand:
        first, report = await run(hand, PROMPT)
        assert (report["cached_tokens"], report["held_tokens"]) == (0, 0)
        assert report["kv_bytes"]["full"] == 300 * ROW_BYTES
        await hand.settled()
        second, again = await run(hand, PROMPT)
        assert first == second == alone(PROMPT)
        assert engine.started_at == [0, 288]
        assert (again["cached_tokens"], again["held_tokens"]) == (288, 288)
        assert again["kv_bytes"]["full"] == 12 * ROW_BYTES
        assert again["kv_bytes"]["linear"] == report["kv_bytes"]["linear"]
        await hand.settled()
        validate(hand)


@pytest.mark.parametrize("shared", [1, 31, 32, 33, 127, 128, 129, 200, 288, 299])
async def test_a_prompt_goes_on_from_the_longest_state_that_it_shares(nodes: Nodes, shared: int) -> None:
    """Rows as far as whole blocks are shared; computing starts at a kept state: every 128 tokens, and the last."""
    engine = HashEngine()
    other = PROMPT[:shared] + [(11 * i + 5) % 1000 for i in range(350 - shared)]
    async with nodes(engine, **settings()) as hand:
        await run(hand, PROMPT)
        await hand.settled()
        tokens, report = await run(hand, other)
        assert tokens == alone(other)
        blocks = shared // BLOCK * BLOCK
        assert report["held_tokens"] == blocks
        assert report["cached_tokens"] == max(at for at in (0, 128, 256, 288) if at <= blocks)
        await hand.settled()
        validate(hand)


async def test_a_whole_number_of_blocks_leaves_its_last_token_to_compute(nodes: Nodes) -> None:
    """An equal prompt needs logits; a longer one goes on from its very end."""
    prompt = PROMPT[: 4 * BLOCK]
    async with nodes(**settings()) as hand:
        await run(hand, prompt)
        await hand.settled()
        tokens, report = await run(hand, prompt)
        assert tokens == alone(prompt)
        assert report["held_tokens"] == 3 * BLOCK
        await hand.settled()
        tokens, report = await run(hand, [*prompt, 1, 2, 3])
        assert tokens == alone([*prompt, 1, 2, 3])
        assert report["cached_tokens"] == 4 * BLOCK


async def test_salted_prompts_share_nothing(nodes: Nodes) -> None:
    """Neither with the unsalted one nor with another salt; with their own they do."""
    async with nodes(**settings()) as hand:
        for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 288), ("", 288)):
            tokens, report = await run(hand, PROMPT, salt)
            assert tokens == alone(PROMPT)
            assert report["cached_tokens"] == report["held_tokens"] == cached
            await hand.settled()


async def test_a_decode_node_that_holds_less_is_sent_what_was_cached(nodes: Nodes) -> None:
    """Cached rows leave first, before anything is computed."""
    async with nodes(**settings()) as hand:
        await run(hand, PROMPT)
        await hand.settled()
        hand.decode_node.memory.cache.drop_all()
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert (report["cached_tokens"], report["held_tokens"]) == (288, 0)
        assert report["kv_bytes"]["full"] == 300 * ROW_BYTES


async def test_a_prefill_node_that_forgot_computes_what_need_not_be_sent(nodes: Nodes) -> None:
    """The two caches are independent of each other."""
    async with nodes(**settings()) as hand:
        await run(hand, PROMPT)
        await hand.settled()
        hand.prefill_node.memory.cache.drop_all()
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert (report["cached_tokens"], report["held_tokens"]) == (0, 288)
        assert report["kv_bytes"]["full"] == 12 * ROW_BYTES


async def test_without_keys_or_cache_everything_is_computed_and_sent(nodes: Nodes) -> None:
    """A caller that opts out, and nodes that keep nothing."""
    async with nodes(**settings()) as hand:
        await run(hand, PROMPT)
        await hand.settled()
        tokens, report = await run(hand, PROMPT, use_cache=False)
        assert tokens == alone(PROMPT)
        assert report["cached_tokens"] == 0
    off: Event = {"kv": {"arena": "8MiB"}, "cache": {"enabled": False}}
    async with nodes(prefill=off, decode=off) as hand:
        for _ in range(2):
            tokens, report = await run(hand, PROMPT)
            assert tokens == alone(PROMPT)
            assert report["cached_tokens"] == report["held_tokens"] == 0
            await hand.settled()
        assert hand.prefill_node.memory.cached_bytes == hand.decode_node.memory.cached_bytes == 0


async def test_a_prefill_that_is_given_up_keeps_what_was_whole_and_leaks_nothing(nodes: Nodes) -> None:
    """The next one goes on from there."""
    engine = HashEngine(chunk_seconds=0.05, prefill_chunk_tokens=32)
    async with nodes(engine, **settings()) as hand:
        async with hand.decode(300, prefix_keys=keys_of(PROMPT).hex(), chunk_tokens=32) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket) as prefill:
                while (await prefill.until("progress"))["tokens"] < 192:
                    pass
                decode.response.close()
                await prefill.until("done")
        await hand.settled()
        validate(hand)
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert report["cached_tokens"] == 128


async def test_under_pressure_the_cache_gives_way_and_no_token_changes(nodes: Nodes) -> None:
    """Sixty prompts of six families, four at a time, in memory for few: every answer right, every block accounted."""
    async with nodes(**settings(arena="2MiB")) as hand:
        gate = asyncio.Semaphore(4)

        async def one(number: int) -> bool:
            family = number % 6
            prompt = [(13 * i + family) % 1000 for i in range(150)] + [number] * (10 + number)
            async with gate:
                return (await run(hand, prompt, request_id=f"r{number}"))[0] == alone(prompt)

        assert all(await asyncio.gather(*(one(number) for number in range(60))))
        await hand.settled()
        validate(hand)
        assert hand.prefill_node.memory.cache.stats.evictions[KvKind.LINEAR] > 0
        assert hand.prefill_node.memory.cache.stats.hits > 0


async def test_a_listener_knows_what_the_node_holds(nodes: Nodes) -> None:
    """From the snapshot and the changes after it, the global manager answers what a request then finds."""
    async with nodes(**settings(arena="2MiB")) as hand:
        await run(hand, PROMPT)
        await hand.settled()
        manager = CacheManager(LAYOUT.fingerprint, BLOCK, GROUPS)
        node = hand.prefill_node
        url = "http://{}:{}/v1/cache/events".format(*node.control.address)

        async def listen() -> None:
            async with hand.session.get(url) as response:
                async for line in response.content:
                    event = orjson.loads(line)
                    if event["event"] != "beat":
                        assert manager.apply("p0", "prfaas", event, now=0.0).applied, event

        listener = asyncio.create_task(listen())
        try:
            for number in range(30):
                await run(hand, [number, *PROMPT[: 40 + 9 * number]])
            await hand.settled()
            held = node.memory.cache.snapshot_changes()
            await until(lambda: manager.node_blocks("p0") == len(held))
            assert node.memory.cache.stats.evictions[KvKind.FULL] > 0
            for number in range(30):
                prompt = [number, *PROMPT[: 40 + 9 * number]]
                hit = node.memory.find(keys_of(prompt), len(prompt), need_state=True)
                node.memory.release(hit)
                match = manager.match(keys_of(prompt), n_tokens=len(prompt)).node("p0")
                assert hit.length_tokens == (match.usable_tokens if match else 0)
        finally:
            listener.cancel()


@pytest.mark.parametrize("keys", ["xyz", "ab" * 15, "AB" * 16])
async def test_keys_that_are_no_keys_are_refused(nodes: Nodes, keys: str) -> None:
    async with nodes() as hand, hand.decode(300, prefix_keys=keys) as decode:
        assert decode.response.status == 400
        assert "prefix_keys" in await decode.response.text()


async def test_more_keys_than_the_prompt_has_blocks_change_nothing(nodes: Nodes) -> None:
    """Only full blocks of the prompt are kept, whatever is sent."""
    async with nodes(**settings()) as hand:
        async with hand.decode(40, prefix_keys=keys_of(PROMPT).hex()) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT[:40], ticket) as prefill:
                await decode.all()
                await prefill.all()
        await hand.settled()
        assert len(hand.decode_node.memory.cache.snapshot_changes()) == 1


def tiered(path: Path) -> dict[str, Event]:
    """Only the prefill node has a second tier."""
    both = settings()
    return both | {"prefill": {**both["prefill"], "cache": {**CACHE["cache"], "tier": str(path), "tier_size": "8MiB"}}}


async def test_a_second_tier_survives_a_restart(nodes: Nodes, tmp_path: Path) -> None:
    """The node starts with an empty cache; what is on disk saves the work all the same."""
    async with nodes(**tiered(tmp_path)) as hand:
        await run(hand, PROMPT)
    async with nodes(**tiered(tmp_path)) as hand:
        assert hand.prefill_node.memory.cached_bytes == 0
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert (report["cached_tokens"], report["held_tokens"]) == (288, 0)
        await hand.settled()
        validate(hand)


def spoil(directory: Path, tag: str) -> None:
    """Flip one byte in every payload of a kind."""
    (path,) = directory.glob("*.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        found = db.execute("SELECT id, payload FROM payloads JOIN entries USING (id) WHERE tag = ?", (tag,)).fetchall()
        assert found
        for number, payload in found:
            damaged = bytes([payload[0] ^ 1]) + payload[1:]
            db.execute("UPDATE payloads SET payload = ? WHERE id = ?", (damaged, number))


@pytest.mark.parametrize("tag", ["full", "linear", "window"])
async def test_a_poisoned_entry_is_found_out_and_computed_again(nodes: Nodes, tmp_path: Path, tag: str) -> None:
    """One flipped byte in every payload of a kind: nothing of it is used, the answer is right, and it is counted."""
    async with nodes(**tiered(tmp_path)) as hand:
        await run(hand, PROMPT)
    spoil(tmp_path, tag)
    async with nodes(**tiered(tmp_path)) as hand:
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert report["cached_tokens"] == 0
        assert hand.prefill_node.memory.tier is not None
        assert hand.prefill_node.memory.tier.stats.poisoned > 0
        await hand.settled()
        validate(hand)
        again, report = await run(hand, PROMPT)
        assert (again, report["cached_tokens"]) == (tokens, 288)


async def test_what_memory_had_no_room_for_comes_back_from_the_second_tier(nodes: Nodes, tmp_path: Path) -> None:
    """Many prompts through a small arena; the first one again."""
    plan = tiered(tmp_path)
    plan["prefill"]["kv"] = {"arena": "2MiB"}
    async with nodes(**plan) as hand:
        for number in range(30):
            await run(hand, [number, *PROMPT])
            await hand.settled()
        assert hand.prefill_node.memory.cache.stats.evictions[KvKind.LINEAR] > 0
        tokens, report = await run(hand, [0, *PROMPT])
        assert tokens == alone([0, *PROMPT])
        assert report["cached_tokens"] == 288
        await hand.settled()
        validate(hand)
