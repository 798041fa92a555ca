"""How the gateway watches its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from prfaas_net.gateway import Gateway
from prfaas_net.gateway.fleet import WatchedNode

from .conftest import Bench, config_for, open_bench
from .fakes import ByteTokenizer, FakeFleet, FakeNode, Script, fake_fleet


def watched(gateway: Gateway, node: FakeNode) -> WatchedNode:
    return next(w for w in gateway.fleet.nodes if w.url == node.url)


async def until(gateway: Gateway, node: FakeNode, holds: Callable[[WatchedNode], object]) -> WatchedNode:
    """Poll a node, as the gateway does by itself, until something holds of it."""
    seen = watched(gateway, node)
    for _ in range(10):
        if holds(seen):
            return seen
        await gateway.fleet.poll(seen)
    raise AssertionError(f"never: {seen}")


def quiet(fleet: FakeFleet, **settings: Any) -> Gateway:
    """A gateway that polls only when the test says so, after its first round."""
    return Gateway(config_for(fleet, fleet={"poll_interval": 3600, **settings}), ByteTokenizer())


async def test_first_answer_counts() -> None:
    """A gateway that started after its nodes is ready when start() returns."""
    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        assert all(node.up for node in gateway.fleet.nodes)
        assert gateway.router.state.max_model_tokens == 4096


async def test_down_after_three_up_after_two() -> None:
    """One lost answer is no outage, and one answer after an outage is no recovery."""
    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        seen = watched(gateway, fleet.near)
        states = []
        for healthy in (False, False, True, False, False, False, True, True):
            fleet.near.healthy = healthy
            await gateway.fleet.poll(seen)
            states.append(seen.up)
            assert gateway.router.state.nodes["pd-prefill-0"].up is seen.up
        assert states == [True] * 5 + [False, False, True]
        assert seen.problem is None


async def test_node_that_starts_late_is_found() -> None:
    """Nodes may come up after the gateway, which says until then what is missing."""
    async with fake_fleet() as fleet:
        await fleet.decode.stop()
        async with quiet(fleet) as gateway:
            seen = watched(gateway, fleet.decode)
            assert not seen.up and "cannot be reached" in str(seen.problem)
            await fleet.decode.start()
            await gateway.fleet.poll(seen)
            assert seen.up


async def test_other_layout_is_not_admitted() -> None:
    """State of another model never mixes in: the error names both nodes, and the rest serves on."""
    async with fake_fleet() as fleet:
        fleet.near.info["layout"] = "ffff"
        async with quiet(fleet) as gateway:
            seen = watched(gateway, fleet.near)
            assert not seen.up
            assert "prfaas-0" in str(seen.problem) and "pd-prefill-0" in str(seen.problem)
            assert "layout ffff" in str(seen.problem)
            assert not gateway.fleet.missing_roles()
            fleet.near.info["layout"] = fleet.far.info["layout"]
            await until(gateway, fleet.near, lambda node: node.up)


async def test_node_that_changes_its_layout_is_taken_out_at_once() -> None:
    """A restart with another checkpoint does not wait for three failures."""
    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        fleet.near.info.update(layout="ffff", boot_id="boot-2")
        await gateway.fleet.poll(watched(gateway, fleet.near))
        assert not gateway.router.state.nodes["pd-prefill-0"].up


async def test_two_addresses_with_one_id() -> None:
    """An id that answers twice is a mistake in the configuration, and is said to be one."""
    async with fake_fleet() as fleet:
        fleet.near.info["node_id"] = "prfaas-0"
        async with quiet(fleet) as gateway:
            down = [node for node in gateway.fleet.nodes if not node.up]
            assert len(down) == 1
            assert "two addresses answer as node prfaas-0" in str(down[0].problem)


async def test_restart_is_noticed() -> None:
    """A new boot id is counted; the node goes on being used."""
    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        fleet.near.info["boot_id"] = "boot-2"
        seen = watched(gateway, fleet.near)
        await gateway.fleet.poll(seen)
        assert (seen.restarts, seen.up) == (1, True)


async def test_node_that_changes_its_name_is_forgotten_under_the_old_one() -> None:
    """An address may be given to another node."""
    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        fleet.near.info.update(node_id="pd-prefill-9", boot_id="boot-2")
        await gateway.fleet.poll(watched(gateway, fleet.near))
        assert "pd-prefill-0" not in gateway.router.state.nodes
        assert gateway.router.state.nodes["pd-prefill-9"].up


async def test_something_else_on_the_port() -> None:
    """An address that answers like no node says so in one line."""
    async with fake_fleet() as fleet:
        fleet.near.info.clear()
        async with quiet(fleet) as gateway:
            assert "not a node of ours" in str(watched(gateway, fleet.near).problem)


async def test_broken_calls_take_a_node_out_before_the_next_poll() -> None:
    """What requests find out, later requests need not find out again."""
    async with fake_fleet() as fleet, quiet(fleet, down_after=2) as gateway, aiohttp.ClientSession() as http:
        bench = Bench(gateway, fleet, http)
        fleet.near.script = Script(fail_at=0, die=True)
        await fleet.near.stop()
        answer = await bench.complete(explain=True)
        assert [step["rung"] for step in answer["prfaas"]["fallbacks"]] == ["prefill_node"]
        await until(gateway, fleet.near, lambda node: not node.up)
        answer = await bench.complete(explain=True)
        assert answer["prfaas"]["prefilled_in"] == "prfaas"
        assert any("no PD prefill node is up" in reason for reason in answer["prfaas"]["reasons"])
        assert not answer["prfaas"]["fallbacks"]


async def test_node_key() -> None:
    """With the shared secret calls pass; the secret itself is not sent."""
    async with open_bench(fleet_key="a node secret", node_key="a node secret") as bench:
        assert (await bench.complete(max_tokens=5))["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("key", [None, "another secret"])
async def test_wrong_node_key(key: str | None) -> None:
    """Without it the client gets a 502, not a 401: its own key is not at fault."""
    async with open_bench(fleet_key="a node secret", node_key=key) as bench:
        status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
        assert status == 502
        assert "node_key" in answer["error"]["message"]


async def test_polling_goes_on_by_itself(bench: Bench) -> None:
    """Every node is asked again and again."""
    async with asyncio.timeout(5):
        await asyncio.gather(*(node.next_polls(3) for node in bench.fleet.nodes))
