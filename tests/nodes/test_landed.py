"""A prefill node that dies in the middle: what had landed of its prompt is not sent again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prfaas_net.errors import CorruptionError
from prfaas_net.kv import KvKind, Manifest, RegionMap
from prfaas_net.nodes.engine_api import PrefillSink, Sampling, Snapshots
from tests.nodes.conftest import Event, Hand, Nodes
from tests.nodes.hash_engine import LAYOUT, HashEngine, HashResult
from tests.nodes.test_prefix_cache import BLOCK, PROMPT, ROW_BYTES, alone, keys_of, run, settings
from tests.waiting import until

# A whole number of prefill chunks, and not of blocks behind it.
LANDED_TOKENS = 192


class HeldEngine(HashEngine):
    """Its prefills stop for a while once so many tokens have left."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def prefill(
        self, token_ids: Sequence[int], sampling: Sampling, regions: RegionMap, buffer: Any, sink: PrefillSink,
        *, start_token: int = 0, snapshots: Snapshots | None = None,
    ) -> HashResult | None:  # fmt: skip
        held = _HoldingSink(sink, self.go_on)
        return super().prefill(token_ids, sampling, regions, buffer, held, start_token=start_token, snapshots=snapshots)


class _HoldingSink:
    def __init__(self, sink: PrefillSink, go_on: threading.Event) -> None:
        self._sink = sink
        self._go_on = go_on

    def emit(self, layer_index: int, stop_token: int) -> None:
        if stop_token > LANDED_TOKENS:
            assert self._go_on.wait(20)
        self._sink.emit(layer_index, stop_token)

    def cancelled(self) -> bool:
        return self._sink.cancelled()


async def die_in_the_middle(hand: Hand, engine: HeldEngine, spoil: bool = False) -> None:
    """One attempt that ends when ``LANDED_TOKENS`` have landed, and nothing else."""
    async with hand.decode(len(PROMPT), prefix_keys=keys_of(PROMPT).hex()) as decode:
        reserved = await decode.next()
        manifest = Manifest.from_json(reserved["ticket"]["manifest"], LAYOUT)
        ((transfer, incoming),) = hand.decode_node.listener._inbox._incoming.items()
        async with hand.prefill(PROMPT, reserved["ticket"]) as prefill:
            await prefill.until("started")
            await until(lambda: manifest.whole_rows(transfer.landed.__contains__) == LANDED_TOKENS, within_s=10)
        if spoil:
            await incoming.abort(CorruptionError("what came is not what was said"))
            assert (await decode.until("end"))["event"] == "error"
    # The decode node has let go of it; only now may more be sent.
    await until(lambda: not hand.decode_node.memory.used_bytes)
    engine.go_on.set()
    await hand.settled()


def counted(hand: Hand, fate: str) -> float:
    value = hand.decode_node.metrics.registry.get_sample_value("prfaas_kv_unfinished_bytes_total", {"fate": fate})
    assert value is not None
    return value


async def test_the_next_attempt_begins_behind_what_had_landed(nodes: Nodes) -> None:
    """From another sender just as well; every token is that of an undisturbed run, and it is counted what was saved."""
    engine = HeldEngine()
    async with nodes(prefill_engine=engine, **settings()) as hand:
        await die_in_the_middle(hand, engine)
        assert (counted(hand, "kept"), counted(hand, "lost")) == (LANDED_TOKENS * ROW_BYTES, 0)
        hand.prefill_node.memory.cache.validate()
        tokens, report = await run(hand, PROMPT)
        assert tokens == alone(PROMPT)
        assert report["held_tokens"] == LANDED_TOKENS
        assert report["kv_bytes"]["full"] == (len(PROMPT) - LANDED_TOKENS) * ROW_BYTES
        await hand.settled()
        hand.decode_node.memory.cache.validate()


async def test_an_attempt_waits_for_what_the_one_before_gives_back(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway asks again the moment that it has hung up."""
    monkeypatch.setattr("prfaas_net.nodes.landed.PREDECESSOR_WITHIN_S", 60.0)
    async with nodes(**settings()) as hand:
        before = hand.decode_node._calls.enter("r1")

        async def ask() -> Event:
            async with hand.decode(len(PROMPT), prefix_keys=keys_of(PROMPT).hex(), again=True) as decode:
                return await decode.next()

        answer = asyncio.create_task(ask())
        await until(lambda: hand.decode_node.metrics.registry.get_sample_value("prfaas_decode_running_requests"))
        assert not answer.done() and not hand.decode_node.listener.reservations
        hand.decode_node._calls.leave("r1", before)
        assert (await answer)["event"] == "reserved"
        await hand.settled()


async def test_an_attempt_does_not_wait_long_for_the_one_before(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everything is sent."""
    monkeypatch.setattr("prfaas_net.nodes.landed.PREDECESSOR_WITHIN_S", 0.01)
    async with nodes(**settings()) as hand:
        before = hand.decode_node._calls.enter("r1")
        async with hand.decode(len(PROMPT), again=True) as decode, asyncio.timeout(10):
            assert (await decode.next())["event"] == "reserved"
        hand.decode_node._calls.leave("r1", before)
        await hand.settled()


async def test_what_was_sent_by_somebody_who_is_not_believed_is_not_kept(nodes: Nodes) -> None:
    """It is counted as what has to be sent again."""
    engine = HeldEngine()
    async with nodes(prefill_engine=engine, **settings()) as hand:
        await die_in_the_middle(hand, engine, spoil=True)
        assert (counted(hand, "kept"), counted(hand, "lost")) == (0, LANDED_TOKENS * ROW_BYTES)
        _, report = await run(hand, PROMPT)
        assert report["held_tokens"] == 0


async def test_without_a_cache_nothing_is_kept(nodes: Nodes) -> None:
    """As everywhere."""
    engine = HeldEngine()
    off = {"kv": {"arena": "8MiB"}, "cache": {"block_tokens": BLOCK, "enabled": False}}
    async with nodes(prefill_engine=engine, prefill=off, decode=off) as hand:
        await die_in_the_middle(hand, engine)
        assert (counted(hand, "kept"), counted(hand, "lost")) == (0, LANDED_TOKENS * ROW_BYTES)


def test_rows_are_whole_where_every_layer_has_them() -> None:
    """The first missing chunk of any layer ends them; window and linear state says nothing of them."""
    manifest = Manifest(LAYOUT, 10, 50, 8, 512)
    full = [chunk for chunk in manifest.chunks if chunk.kind is KvKind.FULL]
    assert manifest.whole_rows(lambda chunk: True) == 50
    assert manifest.whole_rows(lambda chunk: False) == 10
    assert manifest.whole_rows(lambda chunk: manifest.chunks[chunk].kind is KvKind.FULL) == 50
    for missing in full:
        whole = manifest.whole_rows(lambda chunk, missing=missing: chunk != missing.index)  # type: ignore[misc]
        assert whole < missing.stop_token <= whole + 8
