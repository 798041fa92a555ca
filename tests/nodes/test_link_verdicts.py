"""A prefill node says what its queue and its links are doing: when it changes, when asked, and in its metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from tests.nodes.conftest import Hand, Nodes
from tests.nodes.hash_engine import HashEngine
from tests.waiting import until

PROMPT = list(range(300))


async def run(hand: Hand) -> None:
    async with hand.decode(len(PROMPT)) as decode:
        ticket = (await decode.next())["ticket"]
        async with hand.prefill(PROMPT, ticket) as prefill:
            await decode.all()
            await prefill.all()


async def test_a_node_shows_the_verdict_of_every_link(nodes: Nodes) -> None:
    """``GET /v1/links``, ``/metrics``, and whoever listens inside the node."""
    async with nodes() as hand:
        told: list[dict[str, Any]] = []
        hand.prefill_node.state.listen(told.append)
        await run(hand)
        await until(lambda: [link["state"] for link in hand.prefill_node.state.describe()["links"]] == ["idle"])
        assert told
        base = "http://{}:{}".format(*hand.prefill_node.control.address)
        async with hand.session.get(base + "/v1/links") as response:
            (row,) = await response.json()
        assert row["peer"] == "d0"
        assert row["state"] == "idle"
        assert row["budget_bps"] is None
        async with hand.session.get(base + "/metrics") as response:
            text = await response.text()
        assert 'prfaas_link_state{peer="d0",state="idle"} 1.0' in text
        assert 'prfaas_link_verdicts_total{state="idle"}' in text
        await hand.settled()


async def test_a_gateway_that_listens_hears_of_queue_and_links(nodes: Nodes) -> None:
    """The whole state at once, at every change, and again and again while nothing changes."""
    async with nodes(HashEngine(chunk_seconds=0.02)) as hand:
        base = "http://{}:{}".format(*hand.prefill_node.control.address)
        async with hand.session.get(base + "/v1/state/events") as response:
            first = orjson.loads(await response.content.readline())
            assert first == {"event": "state", "queue_tokens": 0, "links": []}
            await run(hand)
            events = [first]
            while len(events) < 3 or events[-1] != events[-2] or not events[-1]["links"]:
                events.append(orjson.loads(await response.content.readline()))
        queues = [event["queue_tokens"] for event in events]
        assert max(queues) == len(PROMPT)
        assert queues[-1] == 0
        assert events[-1]["links"][0]["peer"] == "d0"


async def test_a_prompt_that_is_given_up_leaves_the_queue(nodes: Nodes) -> None:
    """While it waits, and while it runs."""
    async with nodes(HashEngine(chunk_seconds=0.1)) as hand:
        async with hand.decode(len(PROMPT)) as one, hand.decode(len(PROMPT), request_id="r2") as two:
            tickets = [(await one.next())["ticket"], (await two.next())["ticket"]]

            async def prefill(number: int) -> None:
                async with hand.prefill(PROMPT, tickets[number]) as call:
                    await call.all()

            calls = [asyncio.create_task(prefill(number)) for number in range(2)]
            await until(lambda: hand.prefill_node.state.queue_tokens == 600)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await until(lambda: hand.prefill_node.state.queue_tokens == 0)
        await hand.settled()
