"""A cached prefix goes from one node to another over the KV stream, and prompts go on from it there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.nodes.cache_copy import MAX_COPIES
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.pd import PdNode
from prfaas_net.nodes.prefill import PrefillNode
from tests.nodes.conftest import Event, Hand, Nodes, Stream
from tests.nodes.hash_engine import LAYOUT, HashEngine
from tests.nodes.test_prefix_cache import BLOCK, PROMPT, alone, keys_of, run, settings
from tests.waiting import until

N_TOKENS = 288
PREFIX = keys_of(PROMPT)[: N_TOKENS // BLOCK * KEY_BYTES]


@contextlib.asynccontextmanager
async def second_node(engine: HashEngine, **changes: Any) -> AsyncIterator[PrefillNode]:
    """Another prefill node, in another cluster."""
    own: Event = {"role": "prefill", "node_id": "p1", "cluster": "pd", **settings()["prefill"], **changes}
    node = PrefillNode(NodeConfig.model_validate(own), engine)
    await node.start()
    try:
        yield node
    finally:
        await node.close()


def take(hand: Hand, node: Any, **changes: Any) -> contextlib.AbstractAsyncContextManager[Stream]:
    body = {"request_id": "c1", "layout": LAYOUT.fingerprint, "prefix_keys": PREFIX.hex(), "source_cluster": "prfaas"}
    return hand.call(node, "/v1/cache/take", body | {"deadline_s": 30.0} | changes)


def copy(hand: Hand, node: Any, ticket: Event, **changes: Any) -> contextlib.AbstractAsyncContextManager[Stream]:
    body = {"request_id": "c1", "prefix_keys": PREFIX.hex(), "ticket": ticket, "deadline_s": 30.0}
    return hand.call(node, "/v1/cache/copy", body | changes)


async def refusal(stream: Stream) -> str:
    """Name and message of the error that a call ends in: a status with that body, where nothing was begun."""
    told = await stream.next()
    error: Event = told["error"] if isinstance(told["error"], dict) else told
    return f"{error['error']} {error['message']}"


async def bring(hand: Hand, target: Any, **changes: Any) -> tuple[list[Event], list[Event]]:
    """From the first prefill node to ``target``; what both said."""
    async with take(hand, target, **changes) as taking:
        first = await taking.next()
        if first["event"] != "reserved":
            return [first], []
        more = {name: changes[name] for name in ("prefix_keys",) if name in changes}
        async with copy(hand, hand.prefill_node, first["ticket"], **more) as copying:
            sent = await copying.all()
        return [first, *await taking.all()], sent


async def test_prompts_go_on_from_what_was_copied(nodes: Nodes) -> None:
    """The node that got it computes twelve tokens of three hundred, and every token is right."""
    engine = HashEngine()
    async with nodes(**settings()) as hand, second_node(engine) as node:
        await run(hand, PROMPT)
        taken, sent = await bring(hand, node)
        assert taken[-1] == {"event": "done", "kept_tokens": N_TOKENS} and taken[0]["held_tokens"] == 0
        assert sent[-1]["event"] == "done" and sent[-1]["kv_bytes"] > 0
        await until(lambda: not node.memory.used_bytes and not node.listener.reservations, within_s=20)
        hand.prefill_node = node
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert (engine.started_at, report["cached_tokens"]) == ([N_TOKENS], N_TOKENS)
        node.memory.cache.validate()


async def test_a_prefix_that_is_there_is_not_sent(nodes: Nodes) -> None:
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        await run(hand, PROMPT)
        await bring(hand, node)
        taken, sent = await bring(hand, node)
        assert taken == [{"event": "done", "kept_tokens": N_TOKENS}] and sent == []


async def test_rows_that_are_there_are_not_sent(nodes: Nodes) -> None:
    """Of a longer prefix only what is new crosses: the rest of the rows, and the state at its end."""
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        await run(hand, PROMPT)
        shorter = PREFIX[: 128 // BLOCK * KEY_BYTES].hex()
        _, first = await bring(hand, node, prefix_keys=shorter)
        taken, second = await bring(hand, node)
        assert taken[0]["held_tokens"] == 128 and taken[-1]["kept_tokens"] == N_TOKENS
        assert 0 < second[-1]["kv_bytes"] - first[-1]["kv_bytes"] < first[-1]["kv_bytes"]


async def test_a_prefix_that_is_gone_is_told_to_both(nodes: Nodes) -> None:
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        async with take(hand, node) as taking:
            ticket = (await taking.next())["ticket"]
            async with copy(hand, hand.prefill_node, ticket) as copying:
                assert (await refusal(copying)).startswith("BusyError the prefix is not cached here any more")
        await until(lambda: not node.memory.used_bytes and not node.listener.reservations, within_s=20)
        await until(lambda: not hand.prefill_node.memory.used_bytes, within_s=20)


async def test_whoever_leaves_ends_it_on_both_sides(nodes: Nodes) -> None:
    """The receiver reserved and nobody sends: closing the call is enough."""
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        async with take(hand, node) as taking:
            await taking.next()
            assert node.memory.used_bytes
        await until(lambda: not node.memory.used_bytes and not node.listener.reservations, within_s=20)


async def test_a_copy_ends_at_its_deadline(nodes: Nodes) -> None:
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        async with take(hand, node, deadline_s=0.2) as taking:
            await taking.next()
            last = (await taking.all())[-1]
        assert last["event"] == "error" and last["error"]["error"] == "DeadlineError"
        await until(lambda: not node.memory.used_bytes, within_s=20)


async def test_few_run_at_a_time(nodes: Nodes) -> None:
    """The others are told at once, and may come again."""
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_COPIES):
            taking = await stack.enter_async_context(take(hand, node))
            assert (await taking.next())["event"] == "reserved"
        async with take(hand, node) as refused:
            assert "other prefixes are being copied" in await refusal(refused)


async def test_what_does_not_fit_is_refused(nodes: Nodes) -> None:
    """Another model, keys that are none, a longer prefix than any prompt, a ticket for another length."""
    async with nodes(**settings()) as hand, second_node(HashEngine()) as node:
        async with take(hand, node, layout="another") as stream:
            assert "another model" in await refusal(stream)
        async with take(hand, node, prefix_keys="00") as stream:
            assert stream.response.status == 400
        async with take(hand, node, prefix_keys="00" * KEY_BYTES * 10_000) as stream:
            assert "longer than any prompt" in await refusal(stream)
        await run(hand, PROMPT)
        async with take(hand, node) as stream:
            ticket = (await stream.next())["ticket"]
            async with copy(hand, hand.prefill_node, ticket, prefix_keys=PREFIX[:KEY_BYTES].hex()) as sending:
                assert "a prefix of another length" in await refusal(sending)
        await until(lambda: not node.memory.used_bytes, within_s=20)


@pytest.mark.parametrize(
    ("changes", "takes_part"),
    [
        ({}, True),
        ({"cache": {"share": False}}, False),
        ({"cache": {"enabled": False}}, False),
        ({"role": "decode"}, False),
        ({"role": "decode", "convertible": True}, True),
        ({"listen": "10.0.0.1:9000"}, False),
        ({"listen": "10.0.0.1:9000", "kv": {"listen": "10.0.0.1:9100"}}, True),
    ],
)
def test_who_exchanges_prefixes(changes: Event, takes_part: bool) -> None:
    """Whoever prefills and can be reached by others, unless told not to."""
    assert NodeConfig.model_validate({"role": "prefill", **changes}).takes_prefixes is takes_part


async def test_a_node_that_is_told_not_to_exchanges_nothing(nodes: Nodes) -> None:
    cache = {**settings()["prefill"]["cache"], "share": False}
    async with nodes(**settings()) as hand, second_node(HashEngine(), cache=cache) as node:
        assert not node.info().takes_prefixes
        async with take(hand, node) as refused:
            assert "exchanges no prefixes" in await refusal(refused)


async def test_a_node_that_changes_roles_takes_prefixes_in_either(nodes: Nodes) -> None:
    """One port for prompts that land and for prefixes."""
    engine = HashEngine()
    config = NodeConfig.model_validate({"role": "decode", "node_id": "pd0", **settings()["decode"]})
    node = PdNode(config, engine)
    async with nodes(**settings()) as hand:
        await node.start()
        try:
            await run(hand, PROMPT)
            taken, _ = await bring(hand, node)
            assert taken[-1] == {"event": "done", "kept_tokens": N_TOKENS}
            assert node.ground.memory.cached_bytes > 0
        finally:
            await node.close()
