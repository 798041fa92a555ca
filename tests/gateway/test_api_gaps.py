"""What people who run vLLM and its routers also ask a gateway: tokens of a prompt, readiness, signs of life."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from prfaas_net.errors import PeerError
from prfaas_net.gateway import pings
from tests.gateway.conftest import Bench, open_bench
from tests.gateway.fakes import Script
from tests.waiting import until

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"model": "fake", "prompt": "é"}, "é"),
        ({"messages": [USER]}, "<user>Hi<assistant>"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "<user>Hi<assistant>"),
    ],
)
async def test_tokenize_says_what_the_nodes_would_be_given(bench: Bench, body: Any, text: str) -> None:
    """vLLM's shape; no node is asked."""
    status, answer, _ = await bench.post("/tokenize", body)
    tokens = list(text.encode())
    assert status == 200
    assert answer == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}
    assert not any(node.calls for node in bench.fleet.nodes)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": 3}, 400, "prompt"),
        ({"messages": "Hi"}, 400, "messages"),
        ({"prompt": "Hi", "model": "other"}, 404, "model"),
        (b"{", 400, None),
    ],
)
async def test_tokenize_refuses_what_it_cannot_read(bench: Bench, body: Any, status: int, param: str | None) -> None:
    found, answer, _ = await bench.post("/tokenize", body)
    assert (found, answer["error"]["param"]) == (status, param)


async def test_tokenize_costs_work_and_asks_for_the_key() -> None:
    async with open_bench(api_keys=["long-enough"]) as bench:
        assert (await bench.post("/tokenize", {"prompt": "Hi"}))[0] == 401
        headers = {"Authorization": "Bearer long-enough"}
        assert (await bench.post("/tokenize", {"prompt": "Hi"}, headers=headers))[0] == 200


async def test_ready_follows_the_nodes() -> None:
    """Ready while both roles have a node; probes need no key."""
    async with open_bench(api_keys=["long-enough"]) as bench:
        assert await bench.get("/ready") == (200, {"status": "ready", "healthy_nodes": 3, "total_nodes": 3})
        await bench.fleet.decode.stop()
        await until(lambda: bench.gateway.fleet.missing_roles())
        assert await bench.get("/ready") == (503, {"status": "not_ready", "healthy_nodes": 2, "total_nodes": 3})
        assert (await bench.get("/live"))[0] == 200


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pings, "PING_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_waits_long_is_pinged_until_its_first_token(bench: Bench) -> None:
    """Headers leave with the first comment; after the first token there are no more, and the answer is whole."""
    bench.fleet.near.script = script = Script(hold_at=0)
    body = {"prompt": "Hi", "stream": True, "max_tokens": 3}
    async with bench.http.post(f"{bench.gateway.url}/v1/completions", json=body) as answer, asyncio.timeout(5):
        assert answer.status == 200
        for _ in range(2):
            assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
        script.gate.go_on.set()
        rest = [part for part in (await answer.read()).split(b"\n\n") if part != b": ping"]
    *chunks, done, end = rest
    assert (done, end) == (b"data: [DONE]", b"")
    assert "".join(orjson.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks) == "Hel"


@pytest.mark.usefixtures("impatient")
async def test_a_failure_after_a_ping_is_an_event_of_the_stream(bench: Bench) -> None:
    """Its status has left already; the count has the real one."""
    for node in (bench.fleet.near, bench.fleet.far):
        node.script = Script(hold_at=0, fail_at=0, error=PeerError("no luck"))
    body = {"prompt": "Hi", "stream": True}
    async with bench.http.post(f"{bench.gateway.url}/v1/completions", json=body) as answer, asyncio.timeout(10):
        assert answer.status == 200
        assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
        for node in (bench.fleet.near, bench.fleet.far):
            node.script.gate.go_on.set()
        *_, last, end = (await answer.read()).split(b"\n\n")
    assert end == b""
    assert "no luck" in orjson.loads(last[6:])["error"]["message"]
    count = await bench.metric("prfaas_requests_total", route="/v1/completions", status="502")
    assert count == 1


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_leaves_while_it_is_pinged_frees_everything(bench: Bench) -> None:
    bench.fleet.near.script = script = Script(hold_at=0)
    body = {"prompt": "Hi", "stream": True}
    async with bench.http.post(f"{bench.gateway.url}/v1/completions", json=body) as answer, asyncio.timeout(5):
        await answer.content.readuntil(b"\n\n")
        answer.close()
    await until(lambda: not bench.gateway.router.state.assignments)
    script.gate.go_on.set()


async def test_a_stream_that_waits_little_keeps_its_status(bench: Bench) -> None:
    """Nothing leaves early: what fails before the first token is an HTTP status."""
    bench.fleet.decode.script = Script(refuse=PeerError("no luck"))
    status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi", "stream": True})
    assert (status, answer["error"]["type"]) == (502, "upstream_error")
