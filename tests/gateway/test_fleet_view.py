"""``GET /v1/fleet`` says what an operator asks: who is there, what the links are worth, where prompts were run."""

from __future__ import annotations

import asyncio
from typing import Any

from prfaas_net.errors import PeerError
from tests.gateway.conftest import open_bench
from tests.gateway.fakes import Script
from tests.gateway.test_cache_watch import scripted as scripted_cache
from tests.gateway.test_state_watch import link, scripted
from tests.waiting import until

VERDICT: dict[str, Any] = {
    "goodput_bps": 8e9, "queueing_delay_s": 0.002, "retransmitted_share": 0.01, "backlog_bytes": 4096, "cause": "ours",
}  # fmt: skip


async def fleet_of(bench: Any) -> dict[str, Any]:
    status, fleet = await bench.get("/v1/fleet")
    assert status == 200
    assert isinstance(fleet, dict)
    return fleet


async def test_nodes_clusters_and_policy_are_told() -> None:
    """Before any request: everybody who was configured, and nothing made up."""
    async with open_bench() as bench:
        fleet = await fleet_of(bench)
        nodes = {node["node"]: node for node in fleet["nodes"]}
        assert list(nodes) == ["prfaas-0", "pd-prefill-0", "pd-decode-0"]
        assert all(node["up"] and node["problem"] is None and node["queue_tokens"] == 0 for node in nodes.values())
        assert fleet["clusters"] == [{"cluster": "pd", "kind": "pd"}, {"cluster": "prfaas", "kind": "prfaas"}]
        assert (fleet["policy"], fleet["threshold_tokens"], fleet["model"]) == ("threshold", 100, "fake")
        assert (fleet["requests"], fleet["offload_share"], fleet["links"]) == ([], None, [])


async def test_a_node_that_is_down_says_why() -> None:
    async with open_bench() as bench:
        await bench.fleet.near.stop()
        await until(lambda: not bench.gateway.fleet.find("pd-prefill-0").up)
        down = (await fleet_of(bench))["nodes"][1]
        assert (down["node"], down["up"]) == ("pd-prefill-0", False)
        assert down["problem"]


async def test_requests_become_points_and_a_share() -> None:
    """Length, time to the first token and place of each; one of two was offloaded."""
    async with open_bench() as bench:
        await bench.complete(prompt="x" * 300)
        await bench.complete(prompt="x" * 30)
        fleet = await fleet_of(bench)
        far, near = fleet["requests"]
        assert (far["prompt_tokens"], far["prefilled_in"], far["offloaded"]) == (300, "prfaas", True)
        assert (near["prompt_tokens"], near["prefilled_in"], near["offloaded"]) == (30, "pd", False)
        assert far["ttft_s"] > 0 and far["at_s"] <= near["at_s"] <= fleet["now_s"]
        assert fleet["offload_share"] == 0.5


async def test_a_failed_request_is_a_point_without_a_time() -> None:
    """It counts, and does not pass for a fast one."""
    async with open_bench() as bench:
        bench.fleet.decode.script = Script(refuse=PeerError("no"))
        status, _, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
        assert status >= 500
        points = (await fleet_of(bench))["requests"]
        assert points and all(point["failed"] and point["ttft_s"] is None for point in points)


async def test_queues_are_seen_while_they_last() -> None:
    """A prompt that a node is running counts as its queue, and its request as running."""
    async with open_bench() as bench:
        bench.fleet.near.script = script = Script(hold_at=0)
        asking = asyncio.create_task(bench.complete(prompt="x" * 50))
        await asyncio.wait_for(script.gate.reached.wait(), 5)
        fleet = await fleet_of(bench)
        _, near, decode = fleet["nodes"]
        assert (near["queue_tokens"], near["running_requests"], decode["running_requests"]) == (50, 1, 1)
        assert fleet["requests_in_flight"] == 1
        script.gate.go_on.set()
        await asking
        fleet = await fleet_of(bench)
        assert fleet["nodes"][1]["queue_tokens"] == 0 and fleet["requests_in_flight"] == 0


async def test_links_are_told_as_their_nodes_judge_them() -> None:
    """Verdict, rates, round trip with its queue, what was sent again; odd fields are left out."""
    async with scripted() as (bench, script):
        told = link("building", available_bps=9e9, budget_bps=1e10, **VERDICT)
        odd = link("clear", peer="pd-prefill-0", goodput_bps="fast", retransmitted_share=-1, cause=7)
        script.say({"event": "state", "queue_tokens": 70, "links": [told, odd]})
        await until(lambda: ("prfaas", "pd") in bench.gateway.router.state.links)
        fleet = await fleet_of(bench)
        first, second = fleet["links"]
        assert (first["from"], first["to"], first["state"]) == ("prfaas-0", "pd-decode-0", "building")
        assert (first["available_bps"], first["goodput_bps"]) == (9e9, 8e9)
        assert first["rtt_s"] == 0.042
        assert (first["retransmitted_share"], first["backlog_bytes"], first["cause"]) == (0.01, 4096, "ours")
        assert (second["goodput_bps"], second["retransmitted_share"], second["cause"]) == (0.0, 0.0, None)
        assert fleet["nodes"][0]["queue_tokens"] == 70


async def test_changes_of_a_verdict_are_remembered() -> None:
    """A verdict that is only repeated is no change."""
    async with scripted() as (bench, script):
        for state in ("clear", "clear", "congested", "clear"):
            script.say({"event": "state", "queue_tokens": 0, "links": [link(state)]})
        script.say({"event": "state", "queue_tokens": 1, "links": [link("clear", available_bps=5e9)]})
        await until(lambda: bench.gateway.router.state.nodes["prfaas-0"].foreign_tokens == 1)
        await until(lambda: bench.gateway.router.state.links["prfaas", "pd"].available_bps == 5e9)
        (pair,) = (await fleet_of(bench))["verdicts"]
        assert (pair["from_cluster"], pair["to_cluster"], pair["available_bps"]) == ("prfaas", "pd", 5e9)
        assert [change["state"] for change in pair["changes"]] == ["clear", "congested", "clear"]


async def test_the_fleet_is_shown_to_holders_of_a_key_only() -> None:
    """The page itself holds nothing of the fleet and needs none."""
    async with open_bench(api_keys=["long-enough"]) as bench:
        assert (await bench.get("/v1/fleet"))[0] == 401
        headers = {"Authorization": "Bearer long-enough"}
        async with bench.http.get(f"{bench.gateway.url}/v1/fleet", headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers["Cache-Control"] == "no-store"
        async with bench.http.get(bench.gateway.url) as answer:
            page = await answer.text()
            assert answer.status == 200 and "long-enough" not in page and "prfaas-0" not in page


async def test_cached_blocks_are_those_that_a_node_told_of() -> None:
    """Null where a node keeps no prefix cache: that is not the same as an empty one."""
    async with scripted_cache() as (bench, script), asyncio.timeout(5):
        script.snapshot(5)
        while not (far := (await fleet_of(bench))["nodes"][0])["cached_blocks"]:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.01)
        near = (await fleet_of(bench))["nodes"][1]
        assert (far["cached_blocks"], near["cached_blocks"]) == (5, None)
