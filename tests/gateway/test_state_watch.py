"""What nodes tell of queues and links reaches the router, at once, and is forgotten when they fall silent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling import LinkBook, LinkSeen, parse_links
from tests.gateway.conftest import Bench, open_bench
from tests.gateway.feeds import FeedScript
from tests.waiting import until

GBPS = 1e9


def link(state: str = "clear", peer: str = "pd-decode-0", **changes: Any) -> dict[str, Any]:
    return {"peer": peer, "state": state, "available_bps": None, "budget_bps": None, "base_rtt_s": 0.04} | changes


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[Bench, FeedScript]]:
    """A gateway whose PrfaaS prefill node tells of its queue and links."""
    scripts: list[FeedScript] = []
    kv = {"constant_bytes": 1000, "bytes_per_token": 100_000}

    def prepare(fleet: Any) -> None:
        for node in fleet.nodes:
            node.info["kv_size"] = kv
            profile = {"prefill": [[1, 0.01], [1000, 1.0]], "decode_step_s": 0.02, "max_batch": 8}
            node.info["profile"] = profile
        # The far node is twice as fast.
        fleet.far.info["profile"] = profile | {"prefill": [[1, 0.005], [1000, 0.5]]}
        scripts.append(FeedScript(fleet.far, "/v1/state/events"))

    async with open_bench(prepare=prepare, **settings) as bench:
        yield bench, scripts[0]
        scripts[0].end()


async def where(bench: Bench) -> str:
    """The cluster that a prompt of 300 tokens is prefilled in."""
    answer = await bench.complete(prompt="x" * 300, explain=True, max_tokens=2)
    return str(answer["prfaas"]["prefilled_in"])


@pytest.mark.parametrize(
    ("state", "available_bps", "cluster"),
    [("clear", 10 * GBPS, "prfaas"), ("congested", 0.01 * GBPS, "pd"), ("down", None, "pd")],
)
async def test_a_verdict_steers_the_next_request(state: str, available_bps: float | None, cluster: str) -> None:
    """30 MB over 10 Gbps is nothing; over 10 Mbps, or while the link is down, it is better computed at home."""
    async with scripted(policy="earliest-finish") as (bench, script):
        links = bench.gateway.router.state.links
        script.say({"event": "state", "queue_tokens": 0, "links": [link("building")]})
        script.say({"event": "state", "queue_tokens": 0, "links": [link(state, available_bps=available_bps)]})
        await until(lambda: ("prfaas", "pd") in links and links["prfaas", "pd"].state is LinkState(state))
        assert await where(bench) == cluster


async def test_a_queue_that_others_filled_counts() -> None:
    """100,000 tokens of another gateway on the fast node: the slow one is sooner."""
    async with scripted(policy="earliest-finish") as (bench, script):
        node = bench.gateway.router.state.nodes["prfaas-0"]
        script.say({"event": "state", "queue_tokens": 100_000, "links": [link(available_bps=10 * GBPS)]})
        await until(lambda: node.foreign_tokens == 100_000)
        assert await where(bench) == "pd"
        script.end()
        await until(lambda: node.foreign_tokens == 0)


async def test_a_gateway_may_be_told_not_to_listen() -> None:
    """To see what following is worth: nobody asks the nodes for their state."""
    async with scripted(policy="earliest-finish", fleet={"follow_state": False}) as (bench, script):
        await where(bench)
        assert script.listeners == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"event": "surprise"},
        {"event": "state", "queue_tokens": -1, "links": []},
        {"event": "state", "queue_tokens": 0, "links": [{"peer": "x"}]},
        {"event": "state", "queue_tokens": 0, "links": [link("splendid")]},
        {"event": "state", "queue_tokens": 0, "links": [link(available_bps="much")]},
        {"event": "state", "queue_tokens": 0, "links": [link(available_bps=-1)]},
    ],
)
async def test_a_state_that_cannot_be_read_is_asked_for_again(bad: dict[str, Any]) -> None:
    async with scripted() as (bench, script):
        await until(lambda: script.listeners == 1)
        script.say(bad)
        script.end()
        await until(lambda: script.listeners == 2)
        assert ("prfaas", "pd") not in bench.gateway.router.state.links


def test_links_of_two_clusters_are_added_up() -> None:
    """Rates add, the worst state speaks, the shortest round trip counts; one that was not measured is as good."""
    book = LinkBook()
    (first,) = book.note("a", "far", [("near", link("clear", "d0", available_bps=2e9, budget_bps=5e9))])
    assert first == LinkSeen("far", "near", LinkState.CLEAR, 2e9, 5e9, 0.04, 5e9)
    (both,) = book.note("b", "far", [("near", link("building", "d0", budget_bps=5e9, base_rtt_s=0.03))])
    assert both == LinkSeen("far", "near", LinkState.BUILDING, 4e9, 10e9, 0.03, 10e9)
    assert book.note("b", "far", [("near", link("building", "d0", budget_bps=5e9, base_rtt_s=0.03))]) == []


def test_a_link_that_is_held_back_keeps_its_budget() -> None:
    """What it is paced to now counts by itself, so that a router can tell a squeezed link from a thin one."""
    (seen,) = LinkBook().note("a", "far", [("near", link("congested", budget_bps=1e9, configured_budget_bps=5e9))])
    assert (seen.budget_bps, seen.paced_bps) == (5e9, 1e9)


def test_a_link_counts_as_down_when_all_are() -> None:
    """One of two is not."""
    book = LinkBook()
    book.note("a", "far", [("near", link("down", "d0"))])
    (seen,) = book.note("b", "far", [("near", link("clear", "d0", available_bps=1e9))])
    assert (seen.state, seen.available_bps) == (LinkState.CLEAR, 1e9)
    (seen,) = book.note("b", "far", [("near", link("down", "d0"))])
    assert seen.state is LinkState.DOWN


def test_a_node_that_is_gone_takes_its_links_along() -> None:
    book = LinkBook()
    book.note("a", "far", [("near", link("down", "d0"))])
    (seen,) = book.note("a", "far", [])
    assert seen == LinkSeen("far", "near", LinkState.IDLE)


@pytest.mark.parametrize("body", [None, {}, [1], [{"peer": 1, "state": "clear"}], [link(budget_bps=1e18)]])
def test_what_is_no_list_of_links_is_refused(body: object) -> None:
    assert parse_links(body) is None
