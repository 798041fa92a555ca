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


async def test_several_choices_are_runs_of_their_own(bench: Bench) -> None:
    """Each with its index and seed; their tokens are added up, the prompt counts once."""
    answer = await bench.complete(n=3, seed=7, max_tokens=4, explain=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == ["Hell"] * 3
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 12
    calls = bench.fleet.decode.calls
    assert [call["sampling"]["seed"] for call in calls] == [7, 8, 9]
    assert len({call["request_id"] for call in calls}) == 3
    assert [record["request_id"] for record in answer["prfaas"]] == [call["request_id"] for call in calls]


async def test_other_choices_wait_for_the_first_token_of_the_first(bench: Bench) -> None:
    """Until its prompt is in the cache they would only compute it again."""
    bench.fleet.near.script = script = Script(hold_at=0)
    asking = asyncio.create_task(bench.complete(n=2, max_tokens=2))
    await asyncio.wait_for(script.gate.reached.wait(), 5)
    await bench.fleet.decode.next_polls(2)
    assert len(bench.fleet.decode.calls) == 1
    script.gate.go_on.set()
    assert len((await asking)["choices"]) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streamed_choices_are_told_apart(bench: Bench, path: str) -> None:
    """One chunk a token and choice, under one id; one usage chunk, one end."""
    body = {"messages": [USER]} if path.endswith("chat/completions") else {}
    events = await bench.stream(path, n=2, max_tokens=3, stream_options={"include_usage": True}, **body)
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    chunks = [event["choices"][0] for event in events[:-2]]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(c["text"] if "text" in c else c["delta"]["content"] for c in own) == "Hel"
        assert [c["finish_reason"] for c in own] == [None, None, "length"]
        assert "delta" not in own[0] or [c["delta"].get("role") for c in own] == ["assistant", None, None]
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_one_choice_that_fails_fails_them_all(bench: Bench) -> None:
    """Nobody gets fewer choices than were asked for, and nothing is left running."""
    bench.fleet.decode.script = Script(fail_at=2, error=PeerError("no luck"))
    status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi", "n": 3})
    assert status >= 500 and "no luck" in answer["error"]["message"]


async def test_choices_count_against_the_bound_on_requests() -> None:
    async with open_bench(max_concurrent_requests=3) as bench:
        status, _, headers = await bench.post("/v1/completions", {"prompt": "Hi", "n": 4})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert len((await bench.complete(n=3, max_tokens=1))["choices"]) == 3
