"""What an explained answer says of how it came about: what else was considered, what was predicted, what happened."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas_net.scheduling import Alternative
from tests.gateway.conftest import Bench
from tests.gateway.test_state_watch import GBPS, link, scripted
from tests.waiting import until


def by_cluster(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["prefill_cluster"]: way for way in record["alternatives"]}


async def test_every_way_that_was_considered_is_told_with_its_predicted_ttft_and_its_link() -> None:
    """With the verdict that counted at that time."""
    async with scripted(policy="earliest-finish") as (bench, script):
        links = bench.gateway.router.state.links
        script.say({"event": "state", "queue_tokens": 0, "links": [link("clear", available_bps=10 * GBPS)]})
        await until(lambda: ("prfaas", "pd") in links and links["prfaas", "pd"].available_bps)
        answer = await bench.complete(prompt="x" * 300, explain=True, max_tokens=2)
    record = answer["prfaas"]
    ways = by_cluster(record)
    assert ways.keys() == {"prfaas", "pd"}
    far, home = ways["prfaas"], ways["pd"]
    assert [far["chosen"], home["chosen"]] == [True, False]
    assert 0 < far["ttft_s"] < home["ttft_s"]
    assert record["predicted_ttft_s"] == pytest.approx(far["ttft_s"], abs=1e-6) and record["ttft_s"] > 0
    assert (far["link"], far["link_state"], home["link"], home["link_state"]) == ("prfaas>pd", "clear", None, None)
    assert far["link_available_bps"] == 10 * GBPS and far["link_s"] > 0
    assert far["incremental_tokens"] == home["incremental_tokens"] == 300
    assert record["cached_in"] == {} and record["stages_s"]["finished"] >= record["stages_s"]["first_token"]


async def test_ways_are_told_by_every_policy_and_of_a_request_in_flight_too(bench: Bench) -> None:
    """Also where nothing is known of speeds and links: then what is predicted is nothing."""
    async with bench.http.post(
        f"{bench.gateway.url}/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-ID": "mine"}
    ) as answer:
        assert answer.status == 200 and answer.headers["X-Request-ID"] == "mine"
    status, record = await bench.get("/v1/requests/mine")
    assert status == 200
    assert {way["prefill_node"] for way in record["alternatives"]} == {"prfaas-0", "pd-prefill-0"}
    assert [way["prefill_node"] for way in record["alternatives"] if way["chosen"]] == ["pd-prefill-0"]
    assert set(record["alternatives"][0]) == set(Alternative.__annotations__)
