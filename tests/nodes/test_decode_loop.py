"""Decoding of many requests by one loop: together, each as if alone, and nothing freed while it is used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas_net.nodes.engine_api import Sampling
from tests.nodes.conftest import Event, Hand, Nodes
from tests.nodes.hash_engine import BROKEN_SEED, REFUSED_SEED, HashEngine
from tests.waiting import until

PROMPT = [(7 * i + 3) % 1000 for i in range(100)]


async def serve(hand: Hand, prompt: list[int], **changes: Any) -> list[Event]:
    """One request through both nodes; the events of decode."""
    async with hand.decode(len(prompt), **changes) as decode:
        ticket = (await decode.next())["ticket"]
        call = {name: changes[name] for name in changes.keys() & {"sampling", "request_id"}}
        async with hand.prefill(prompt, ticket, **call) as prefill:
            events = await decode.all()
            await prefill.all()
            return events


def tokens(events: list[Event]) -> list[int]:
    return [event["token"] for event in events if event["event"] == "token"]


async def test_requests_are_stepped_together(nodes: Nodes) -> None:
    """Four that run at once share steps, and each gets its own tokens."""
    engine = HashEngine(step_seconds=0.01)
    async with nodes(None, engine) as hand:
        sampling = {"max_tokens": 30}
        lengths = (5, 40, 64, 100)
        answers = await asyncio.gather(
            *(serve(hand, PROMPT[:n], request_id=f"r{n}", sampling=sampling) for n in lengths)
        )
        for n, events in zip(lengths, answers, strict=True):
            assert tokens(events) == HashEngine().generate(PROMPT[:n], Sampling(max_tokens=30))
        assert max(engine.batch_sizes) >= 2
        assert len(engine.batch_sizes) < 4 * 29
        await hand.settled()


async def test_memory_is_given_back_when_no_step_uses_it(nodes: Nodes) -> None:
    """A caller that leaves in the middle of a long step is let go, but its reservation stays until the step is over."""
    engine = HashEngine(step_seconds=0.3)
    async with nodes(None, engine) as hand:
        async with hand.decode(50, sampling={"max_tokens": 9}) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT[:50], ticket, sampling={"max_tokens": 9}) as prefill:
                await prefill.until("done")
                await decode.until("landed")
                steps = len(engine.batch_sizes)
                await until(lambda: len(engine.batch_sizes) > steps)
        await asyncio.sleep(0.05)
        assert hand.decode_node.memory.used_bytes > 0
        await hand.settled()
        assert len(engine.batch_sizes) <= 4
        engine.step_seconds = 0.0
        assert tokens(await serve(hand, PROMPT)) == HashEngine().generate(PROMPT, Sampling(max_tokens=8))


@pytest.mark.parametrize(("seed", "words"), [(REFUSED_SEED, "refuses this seed"), (BROKEN_SEED, "the sequence broke")])
async def test_one_bad_request_fails_alone(nodes: Nodes, seed: int, words: str) -> None:
    """Whether the batch does not take it or it fails in it: the others notice nothing."""
    async with nodes(None, HashEngine(step_seconds=0.005)) as hand:
        good, bad = await asyncio.gather(
            serve(hand, PROMPT, request_id="good", sampling={"max_tokens": 20}),
            serve(hand, PROMPT[:40], request_id="bad", sampling={"max_tokens": 20, "seed": seed}),
        )
        assert tokens(good) == HashEngine().generate(PROMPT, Sampling(max_tokens=20))
        assert words in bad[-1]["error"]["message"]
        await hand.settled()


async def test_a_step_that_fails_fails_all_and_the_next_request_is_served(nodes: Nodes) -> None:
    """The batch cannot be trusted any more; a new one can."""
    engine = HashEngine(fail_step=True)
    async with nodes(None, engine) as hand:
        events = await serve(hand, PROMPT)
        assert events[-1]["error"]["error"] == "InternalError"
        await hand.settled()
        engine.fail_step = False
        assert tokens(await serve(hand, PROMPT)) == HashEngine().generate(PROMPT, Sampling(max_tokens=8))


async def test_a_node_that_stops_ends_what_runs(nodes: Nodes) -> None:
    """After the step that runs, without waiting for the answer to end."""
    engine = HashEngine(step_seconds=0.05)
    async with nodes(None, engine) as hand:
        async with hand.decode(50, sampling={"max_tokens": 4000}) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT[:50], ticket, sampling={"max_tokens": 4000}) as prefill:
                await prefill.until("done")
                await decode.until("landed")
                async with asyncio.timeout(2):
                    await hand.decode_node.close()
        assert not hand.decode_node.memory.used_bytes


async def test_logprobs_come_with_every_token(nodes: Nodes) -> None:
    """That of the first one with the seal, from the prefill node."""
    async with nodes() as hand:
        events = await serve(hand, PROMPT, sampling={"max_tokens": 3, "logprobs": 2})
        found = [event for event in events if event["event"] == "token"]
        assert len(found) == 3
        for event in found:
            token = event["token"]
            top = [[token, -float(token)], [token + 1, -float(token + 1)]]
            assert event["logprobs"] == {"logprob": -float(token), "top": top}
        events = await serve(hand, PROMPT, sampling={"max_tokens": 3})
        assert not any("logprobs" in event for event in events)


async def test_the_engine_learns_which_tokens_the_prompt_has(nodes: Nodes) -> None:
    """What the gateway sent with the call, for the repetition penalty."""
    engine = HashEngine()
    async with nodes(None, engine) as hand:
        await serve(hand, PROMPT, prompt_token_set=[3, 5])
        assert engine.joined == [[3, 5]]
