"""Nodes that join by themselves: whom a gateway takes in, for how long, and what their going costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from prfaas_net.gateway import joining
from prfaas_net.gateway.keys import KeyHash, new_key
from prfaas_net.nodes.config import JoinSection
from prfaas_net.nodes.join_messages import JOIN_PATH, LEAVE_PATH
from prfaas_net.nodes.joining import Joiner
from prfaas_net.nodes.messages import NodeInfo
from tests.waiting import until

from .conftest import Bench, open_bench
from .fakes import FakeNode, Script

TOKEN = new_key()
SETTINGS = {"token_hash": str(KeyHash.of(TOKEN)), "lease": "60s"}


def call_of(node: FakeNode, **other: str) -> dict[str, str]:
    said = {name: node.info[name] for name in ("node_id", "boot_id", "role", "cluster")}
    return {"url": node.url, **said, **other}


async def join(bench: Bench, call: Any, token: str = TOKEN, path: str = JOIN_PATH) -> tuple[int, Any]:
    status, answer, _ = await bench.post(path, call, headers={"Authorization": f"Bearer {token}"})
    return status, answer


@asynccontextmanager
async def with_guest(**settings: Any) -> AsyncIterator[tuple[Bench, FakeNode]]:
    """A gateway with its listed nodes, and a decode node of the same fabric that is not listed."""
    async with open_bench(join={**SETTINGS, **settings.pop("join", {})}, **settings) as bench:
        guest = FakeNode(bench.fleet.decode.fabric, "decode", "pd", "pd-decode-9", None)
        await guest.start()
        try:
            yield bench, guest
        finally:
            await guest.stop()


def nodes_of(bench: Bench) -> set[str]:
    return {node.name for node in bench.gateway.fleet.nodes}


async def test_a_node_that_joins_serves_until_it_leaves() -> None:
    """It needs no API key, only the token; leaving is at once, and a second time harmless."""
    async with with_guest(api_keys=["long-enough"]) as (bench, guest):
        await bench.fleet.decode.stop()
        await until(lambda: bench.gateway.fleet.missing_roles())
        status, answer = await join(bench, call_of(guest))
        assert (status, answer) == (200, {"lease_s": 60.0, "renew_s": 20.0})
        key = {"Authorization": "Bearer long-enough"}
        assert (await bench.post("/v1/completions", {"prompt": "Hi"}, headers=key))[0] == 200
        assert guest.calls
        assert (await join(bench, call_of(guest)))[0] == 200  # renewed
        for _ in range(2):
            assert (await join(bench, {"url": guest.url, "boot_id": "boot-1"}, path=LEAVE_PATH))[0] == 200
            assert "pd-decode-9" not in nodes_of(bench)
        assert "pd-decode-9" not in bench.gateway.router.state.nodes
        assert (await bench.post("/v1/completions", {"prompt": "Hi"}, headers=key))[0] == 503
        counted = {word: bench.count("prfaas_joins_total", outcome=word) for word in ("joined", "renewed", "left")}
        assert counted == {"joined": 1, "renewed": 1, "left": 1}


async def test_a_node_that_leaves_ends_what_it_has() -> None:
    """Nothing new comes to it; the stream that it is in the middle of goes on to its end."""
    async with with_guest() as (bench, guest):
        await bench.fleet.decode.stop()
        await until(lambda: bench.gateway.fleet.missing_roles())
        await join(bench, call_of(guest))
        guest.script = Script(hold_at=2)
        streaming = asyncio.create_task(bench.stream(max_tokens=4))
        async with asyncio.timeout(10):
            await guest.script.gate.reached.wait()
            await join(bench, {"url": guest.url, "boot_id": "boot-1"}, path=LEAVE_PATH)
            guest.script.gate.go_on.set()
            assert (await streaming)[-1] == "[DONE]"
        bench.assert_nothing_held()


async def test_a_node_that_vanishes_is_gone_when_its_lease_is_over() -> None:
    """Its requests go on elsewhere, and nothing of it is left."""
    async with with_guest(join={"lease": "3s"}) as (bench, guest):
        # It answers to its name still, but does not renew: only its lease tells that it is gone.
        guest.info["node_id"] = "a-guest"
        guest.script = Script(hold_at=0)
        assert (await join(bench, call_of(guest)))[0] == 200
        asking = asyncio.create_task(bench.complete(max_tokens=3, explain=True))
        async with asyncio.timeout(20):
            await guest.script.gate.reached.wait()
            answer = await asking
        assert answer["choices"][0]["text"] == "Hel"
        assert answer["prfaas"]["fallbacks"][-1]["rung"] == "decode_node"
        assert bench.count("prfaas_joins_total", outcome="expired") == 1
        assert "a-guest" not in nodes_of(bench) | set(bench.gateway.router.state.nodes)
        bench.assert_nothing_held()
        guest.script.gate.go_on.set()


async def test_field_63_a_node_that_is_not_what_it_says_is_refused_when_it_registers() -> None:
    """By its role, its cluster, its name; and the answer says what was found. Nobody looks for it in vain later."""
    async with with_guest() as (bench, guest):
        for wrong in ({"role": "prefill"}, {"cluster": "prfaas"}, {"node_id": "other"}, {"boot_id": "other"}):
            status, answer = await join(bench, call_of(guest, **wrong))
            (name, said), message = next(iter(wrong.items())), answer["error"]["message"]
            assert (status, answer["error"]["code"]) == (409, "not_admitted")
            assert f"{name}: said {said!r}" in message and "found" in message
        guest.info["layout"] = "ffff"
        status, answer = await join(bench, call_of(guest))
        assert status == 409 and "layout ffff" in answer["error"]["message"]
        await guest.stop()
        status, answer = await join(bench, call_of(guest))
        assert status == 409 and "cannot be reached" in answer["error"]["message"]
        assert nodes_of(bench) == {"prfaas-0", "pd-prefill-0", "pd-decode-0"}


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        ([], 400, "valid dictionary"),
        ({}, 400, "Field required"),
        ({"url": "ftp://x"}, 400, "http://127.0.0.1:9001"),
        ({"url": "http://a@x"}, 400, "http://127.0.0.1:9001"),
        ({"role": "king"}, 400, "'prefill'"),
        ({"node_id": "x" * 129}, 400, "at most 128"),
        ({"node_id": "x" * 5000}, 413, "too large"),
    ],
)
async def test_bad_calls_are_refused(call: Any, status: int, words: str) -> None:
    """With one clear line; nothing is asked of anybody."""
    async with with_guest() as (bench, guest):
        body = {**call_of(guest), **call} if isinstance(call, dict) and call else call
        found, answer = await join(bench, body)
        assert found == status and words in answer["error"]["message"], answer
        assert nodes_of(bench) == {"prfaas-0", "pd-prefill-0", "pd-decode-0"}


async def test_wrong_tokens_are_refused_and_a_flood_of_them_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While whoever has the right one still joins; and where joining is off, it is off for all."""
    monkeypatch.setattr(joining, "WRONG_PER_S", 0.0)
    async with with_guest() as (bench, guest):
        found = [(await join(bench, call_of(guest), token=f"wrong-{n}"))[0] for n in range(22)]
        assert found == [401] * 19 + [429] * 3
        assert (await join(bench, call_of(guest)))[0] == 200
    async with open_bench() as bench:
        status, answer = await join(bench, {})
        assert (status, answer["error"]["code"]) == (403, "joining_is_off")


async def test_no_more_nodes_join_than_may() -> None:
    """The bound is told; a node that restarts on another port takes its own place."""
    async with with_guest(join={"max_nodes": 1}) as (bench, guest):
        assert (await join(bench, call_of(guest)))[0] == 200
        other = FakeNode(guest.fabric, "decode", "pd", "pd-decode-10", None)
        await other.start()
        try:
            status, answer = await join(bench, call_of(other))
            assert (status, answer["error"]["code"]) == (429, "too_many_nodes")
            other.info.update(node_id="pd-decode-9", boot_id="boot-2")
            assert (await join(bench, call_of(other)))[0] == 200
            assert bench.gateway.fleet.find_url(guest.url) is None
        finally:
            await other.stop()


async def test_a_listed_node_may_join_as_well() -> None:
    """And stays when its lease is over or it leaves."""
    async with with_guest(join={"lease": "200ms"}) as (bench, _):
        assert (await join(bench, call_of(bench.fleet.near)))[0] == 200
        await until(lambda: bench.count("prfaas_joins_total", outcome="expired") == 1, within_s=15)
        assert "pd-prefill-0" in nodes_of(bench)


def a_joiner(node: FakeNode, gateways: list[str], token: str = TOKEN) -> Joiner:
    settings = JoinSection.model_validate({"gateways": gateways, "token": token})
    return Joiner(settings, lambda: NodeInfo.model_validate(node.info), node.url)


async def test_a_node_joins_all_its_gateways_renews_and_leaves() -> None:
    """With its own client, before several gateways; one that is not there costs the others nothing."""
    async with with_guest(join={"lease": "400ms"}) as (one, guest), open_bench(join=SETTINGS) as two:
        gateways = ["http://127.0.0.1:1", one.gateway.url, two.gateway.url]
        joiner = a_joiner(guest, gateways)
        joiner.start()
        try:
            await until(lambda: "pd-decode-9" in nodes_of(one) & nodes_of(two), within_s=15)
            await until(lambda: one.count("prfaas_joins_total", outcome="renewed") >= 2, within_s=15)
            assert set(joiner.problems) == {"http://127.0.0.1:1"}
        finally:
            async with asyncio.timeout(10):
                await joiner.leave()
                await joiner.leave()
        for bench in (one, two):
            assert "pd-decode-9" not in nodes_of(bench)


async def test_a_node_says_why_it_may_not_join(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and goes on trying; the token is in no line."""
    async with with_guest() as (bench, guest):
        joiner = a_joiner(guest, [bench.gateway.url], "a-token-that-is-wrong")
        joiner.start()
        try:
            await until(lambda: "401" in joiner.problems.get(bench.gateway.url, ""), within_s=15)
        finally:
            await joiner.leave()
        assert "set join.token on the node" in caplog.text
        assert "a-token-that-is-wrong" not in caplog.text


async def test_what_is_no_gateway_is_said_to_be_none() -> None:
    """A URL of something else is a mistake in the configuration."""
    async with with_guest() as (_, guest):

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=orjson.dumps({"hello": 1}))

        guest.extra_routes.append(web.post(JOIN_PATH, answer))
        await guest.stop()
        await guest.start()
        joiner = a_joiner(guest, [guest.url])
        joiner.start()
        try:
            await until(lambda: "no gateway" in joiner.problems.get(guest.url, ""), within_s=15)
        finally:
            await joiner.leave()
