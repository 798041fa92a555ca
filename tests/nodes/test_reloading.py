"""Budgets of links that change while something crosses them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import orjson
import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.reloading import change_of
from prfaas_net.transport.options import SO_MAX_PACING_RATE, UNPACED
from tests.nodes.conftest import Hand, Nodes
from tests.nodes.test_nodes import PROMPT, run


def config(**kv: Any) -> NodeConfig:
    return NodeConfig.model_validate({"role": "prefill", "cluster": "prfaas", "node_id": "p", "kv": kv})


def test_what_is_hot_is_told_apart_from_what_is_not() -> None:
    """By name, in tables too; only the former is in force."""
    old, new = config(budget=100, arena=100), config(budget=200, arena=200)
    change = change_of(old, new, ("kv.budget",))
    assert (change.applied, change.needs_restart, change.outcome) == (("kv.budget",), ("kv.arena",), "applied")
    assert (change.config.kv.budget, change.config.kv.arena) == (200, 100)
    assert change_of(new, new, ("kv.budget",)).outcome == "unchanged"
    assert "not before a restart: kv.arena" in change.line()


def paces(hand: Hand) -> list[int]:
    """Bytes a second that each data connection of the prefill node is held to, as the kernel has it."""
    sockets = [stream.sock for link in hand.prefill_node.links.links for stream in link.streams]
    return [int.from_bytes(s.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), "little") for s in sockets]


async def reload(hand: Hand) -> tuple[int, Any]:
    url = "http://{}:{}/v1/reload".format(*hand.prefill_node.control.address)
    async with hand.session.post(url) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_budgets_change_under_a_running_link(nodes: Nodes) -> None:
    """Of the link to one cluster; given, changed and taken away, with requests before, between and after."""
    async with nodes() as hand, asyncio.timeout(40):
        node = hand.prefill_node
        before = node.config

        def with_links(**links: Any) -> None:
            kv = {**before.kv.model_dump(), "links": links}
            told = before.model_copy(update={"kv": type(before.kv).model_validate(kv)})
            node.ground.reread = lambda: told

        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket, destination_cluster="pd") as prefill:
                await decode.all()
                await prefill.all()
        assert set(paces(hand)) == {UNPACED}
        n = len(paces(hand))
        for budget_bps, pace in ((800_000_000, 100_000_000 // n), (80_000_000, 10_000_000 // n)):
            with_links(pd={"budget": budget_bps}, elsewhere={"budget": 1})
            assert await reload(hand) == (200, {"applied": ["kv.links"], "needs_restart": []})
            assert set(paces(hand)) == {pace}
            decoded, _ = await run(hand, PROMPT[:50])
            assert decoded[-1]["event"] == "finish"
        with_links()
        await reload(hand)
        assert set(paces(hand)) == {UNPACED}
        await hand.settled()


async def test_a_bad_file_changes_nothing(nodes: Nodes) -> None:
    """The explanation comes back; without a file there is nothing to read."""
    async with nodes() as hand:

        def bad() -> NodeConfig:
            raise ConfigError("node.toml: unknown key kv.budgets", do="did you mean 'budget'?")

        status, answer = await reload(hand)
        assert status == 500 and "--config" in answer["do"]
        hand.prefill_node.ground.reread = bad
        status, answer = await reload(hand)
        assert status == 500 and answer["do"] == "did you mean 'budget'?"
        assert hand.prefill_node.metrics.registry.get_sample_value("prfaas_reloads_total", {"outcome": "refused"}) == 2


@pytest.mark.parametrize("budget", [None, 1_000_000])
def test_a_link_to_a_cluster_has_what_is_said_of_it_over_what_is_said_of_all(budget: int | None) -> None:
    kv = config(budget=budget, connections=2, links={"pd": {"dscp": 10}, "far": {"budget": 7}}).kv
    assert (kv.options("pd").dscp, kv.options("pd").budget_bps, kv.options("pd").connections) == (10, budget, 2)
    assert (kv.options("far").budget_bps, kv.options("else").budget_bps) == (7, budget)
