"""Where nobody else can do a node's work, its failure is one clear error, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prfaas_net.errors import BusyError, CancelledByPeer, DeadlineError, InvalidRequest, PeerError, PrfaasError

from .conftest import Bench, open_bench
from .fakes import FakeFleet, FakeNode, Gate, Script


def one_of_each(fleet: FakeFleet) -> None:
    """Whoever fails, nobody else can do its work."""
    fleet.far.healthy = False


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A gateway before one prefill and one decode node; at the end of the test nothing may be held anywhere."""
    async with open_bench(prepare=one_of_each) as bench:
        yield bench
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


def broken(kind: str, at: int | None) -> Script:
    """A script that fails in one of the ways a node can fail."""
    return Script(
        fail_at=at,
        error=PeerError("the engine broke") if kind == "error" else None,
        die=kind == "die",
        end=kind == "end",
    )


async def expect(bench: Bench, status: int, words: str, **body: Any) -> Any:
    """A request that must fail before its first token, streamed or not, leaving nothing on any node."""
    answers = []
    for stream in (False, True):
        found, answer, headers = await bench.post("/v1/completions", {"prompt": "Hi", "stream": stream, **body})
        assert found == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert words in answer["error"]["message"]
        assert headers["X-Request-ID"] in answer["error"]["message"]
        answers.append((answer["error"], headers))
        await bench.fleet.all_idle()
    return answers[0]


@pytest.mark.parametrize("kind", ["error", "die", "end"])
async def test_prefill_node_fails(bench: Bench, kind: str) -> None:
    """A prefill that fails ends the decode call too, and the error names the prefill node."""
    bench.fleet.near.script = broken(kind, 0)
    error, _ = await expect(bench, 502, "pd-prefill-0")
    assert error["type"] == "upstream_error"


@pytest.mark.parametrize("kind", ["error", "die", "end"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_decode_node_fails_in_the_middle(bench: Bench, kind: str, streamed: bool) -> None:
    """The tokens so far, then an error event and no [DONE]; or an error status if nothing was sent."""
    bench.fleet.decode.script = broken(kind, 3)
    if not streamed:
        await asyncio.wait_for(bench.post("/v1/completions", {"prompt": "Hi"}), 5)
        return
    events = await bench.stream()
    assert [e["choices"][0]["text"] for e in events[:-1]] == list("Hel")
    error = events[-1]["error"]
    assert error["type"] == "upstream_error" and "pd-decode-0" in error["message"]
    name = {"error": "peer_error"}.get(kind, "link_error")
    assert error["code"] == name
    assert await bench.metric("prfaas_requests_total", route="/v1/completions", status="502") == 1


@pytest.mark.parametrize("kind", ["error", "die", "end"])
async def test_decode_node_fails_before_the_first_token(bench: Bench, kind: str) -> None:
    """Before anything was streamed, the failure has a status of its own."""
    bench.fleet.decode.script = broken(kind, 0)
    await expect(bench, 502, "pd-decode-0")


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (InvalidRequest("the prompt does not fit"), 400),
        (DeadlineError("too late"), 504),
        (PeerError("no"), 502),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PrfaasError) else "",
)
@pytest.mark.parametrize("where", ["near", "decode"])
async def test_refusals_keep_their_meaning(bench: Bench, refusal: PrfaasError, status: int, where: str) -> None:
    """A node's refusal reaches the client with its words and the status that fits."""
    node: FakeNode = getattr(bench.fleet, where)
    node.script = Script(refuse=refusal)
    _, headers = await expect(bench, status, refusal.message)
    assert "Retry-After" not in headers
    if where == "decode":
        assert not bench.fleet.near.calls, "nothing is prefilled for a node that has not reserved"


@pytest.mark.parametrize("where", ["near", "decode"])
async def test_a_node_without_room_is_asked_until_there_is_no_time_left(where: str) -> None:
    """Then the client is told, and when to come back."""
    async with open_bench(prepare=one_of_each, request_deadline="400ms") as bench:
        node: FakeNode = getattr(bench.fleet, where)
        node.script = Script(refuse=BusyError("the arena is full"))
        _, headers = await expect(bench, 503, "the arena is full")
        assert "Retry-After" in headers
        assert len(node.calls) > 2
        bench.assert_nothing_held()


async def test_root_cause_wins_over_its_consequence(bench: Bench) -> None:
    """The decode node says 'the sender gave up'; the client is told why the sender did."""
    bench.fleet.near.script = Script(fail_at=0, error=PeerError("out of GPU memory"))
    await expect(bench, 502, "out of GPU memory")


async def test_consequence_alone_is_still_reported(bench: Bench) -> None:
    """If no cause follows, what is known is told."""
    bench.fleet.decode.script = Script(fail_at=0, error=CancelledByPeer("the other side left"))
    bench.fleet.near.script = Script(hold_at=0)
    await expect(bench, 503, "the other side left")


@pytest.mark.parametrize(
    "line",
    [b"not json\n", b"[1]\n", b'{"event":"token","token":"x","index":0}\n', b'{"event":"token","token":1,"index":7}\n',
     b'{"event":"finish","reason":"stop"}\n', b"x" * (300 << 10) + b"\n",
     b'{"event":"token","token":1,"index":0,"finish":"bored"}\n'],
    ids=["no json", "no object", "no token", "gap", "finish without token", "too long", "odd reason"],
)  # fmt: skip
async def test_node_that_talks_nonsense(bench: Bench, line: bytes) -> None:
    """A node that breaks the protocol costs a clear 502, not a hang or a crash."""
    bench.fleet.decode.script = Script(raw=line)
    error, _ = await expect(bench, 502, "pd-decode-0" if len(line) < 1000 else "too long")
    assert error["code"] == "protocol_error"


async def test_decode_node_dies_while_the_prefill_waits_in_its_queue(bench: Bench) -> None:
    """The decode node is listened to even before the prefill node has said a word."""
    near, decode = bench.fleet.near, bench.fleet.decode
    near.queue_gate = Gate()
    decode.script = Script(hold_at=0, fail_at=0, error=PeerError("the arena is gone"))
    posting = asyncio.create_task(bench.post("/v1/completions", {"prompt": "Hi"}))
    async with asyncio.timeout(5):
        await near.queue_gate.reached.wait()
        decode.script.gate.go_on.set()
        status, answer, _ = await posting
        assert status == 502 and "the arena is gone" in answer["error"]["message"]
        await bench.fleet.all_idle()


@pytest.mark.parametrize("where", ["near", "decode"])
async def test_deadline(where: str) -> None:
    """A node that does nothing costs the client no more than the deadline."""
    async with open_bench(request_deadline="300ms") as bench:
        node: FakeNode = getattr(bench.fleet, where)
        node.script = Script(hold_at=0)
        error, _ = await expect(bench, 504, "deadline")
        assert error["type"] == "timeout_error"
        assert "last stage reached: " in error["message"]
        call = bench.fleet.decode.calls[0]
        assert 0 < call["deadline_s"] <= 0.3
        bench.assert_nothing_held()


async def test_deadline_in_the_middle_of_a_stream() -> None:
    """Tokens, then the error event."""
    async with open_bench(request_deadline="300ms") as bench:
        bench.fleet.decode.script = Script(hold_at=2)
        events = await bench.stream()
        assert len(events) == 3
        assert events[-1]["error"]["code"] == "deadline_error"
        await bench.fleet.all_idle()


async def test_node_killed_under_load(bench: Bench) -> None:
    """Every stream on a node that dies ends in an error, none hangs, and the node is taken out at once."""
    script = bench.fleet.decode.script = Script(hold_at=2)
    streams = [asyncio.create_task(bench.stream()) for _ in range(4)]
    async with asyncio.timeout(5):
        while len(bench.fleet.decode.calls) < 4:
            await bench.fleet.decode.next_polls(1)
        await script.gate.reached.wait()
        await bench.fleet.decode.stop()
        for events in await asyncio.gather(*streams):
            assert "error" in events[-1]
    status, health = await bench.get("/health")
    assert (status, health["missing"]) == (503, ["decode node"])
    status, answer, headers = await bench.post("/v1/completions", {"prompt": "Hi"})
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "no decode node is up" in answer["error"]["message"]


async def test_node_that_restarts_loses_its_requests(bench: Bench) -> None:
    """A new boot id ends the requests of the old one, even if their connections still look alive."""
    script = bench.fleet.near.script = Script(hold_at=0)
    posting = asyncio.create_task(bench.post("/v1/completions", {"prompt": "Hi"}))
    async with asyncio.timeout(5):
        await script.gate.reached.wait()
        bench.fleet.near.info["boot_id"] = "boot-2"
        status, answer, _ = await posting
    assert status == 502
    assert "restarted" in answer["error"]["message"] and "pd-prefill-0" in answer["error"]["message"]


async def test_stop_tells_its_clients(bench: Bench) -> None:
    """A gateway that stops ends every request with an error, within a second."""
    decode, near = bench.fleet.decode, bench.fleet.near
    decode.script = Script(hold_at=2)
    streaming = asyncio.create_task(bench.stream(prompt="stream"))
    await decode.script.gate.reached.wait()
    near.script = Script(hold_at=0)
    waiting = asyncio.create_task(bench.post("/v1/completions", {"prompt": "wait"}))
    await near.script.gate.reached.wait()
    async with asyncio.timeout(1):
        await bench.gateway.stop()
    events = await streaming
    assert len(events) == 3 and "stopping" in events[-1]["error"]["message"]
    status, answer, _ = await waiting
    assert status == 503 and "stopping" in answer["error"]["message"]


async def test_prefill_failure_after_landing_is_survived(bench: Bench) -> None:
    """Once everything has landed, the answer no longer depends on the prefill node."""
    script = bench.fleet.decode.script = Script(hold_at=2)
    async with bench.http.post(
        f"{bench.gateway.url}/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 4}
    ) as answer:
        await script.gate.reached.wait()
        await bench.fleet.near.stop()
        script.gate.go_on.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
