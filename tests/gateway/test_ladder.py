"""A node or a link that fails costs no request its answer while somebody else can take over; each rung is told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from prfaas_net.errors import (
    AuthError,
    BusyError,
    CancelledByPeer,
    CorruptionError,
    DeadlineError,
    IncompatibleError,
    InternalError,
    InvalidRequest,
    LinkError,
    PeerError,
    PrfaasError,
    RefusedError,
)
from prfaas_net.gateway.ladder import WaitingRoom

from .conftest import THRESHOLD_TOKENS, Bench, open_bench
from .fakes import FakeFleet, FakeNode, Gate, Script

ANSWER = "Hello, world"
LONG = "x" * (THRESHOLD_TOKENS + 20)
FAILURES: dict[str, Callable[[], Script]] = {
    "reports an error": lambda: Script(fail_at=0, error=PeerError("the engine broke")),
    "reports a bug": lambda: Script(fail_at=0, error=InternalError("the node failed")),
    "reports a broken link": lambda: Script(fail_at=0, error=LinkError("every connection died")),
    "reports corruption": lambda: Script(fail_at=0, error=CorruptionError("a chunk is not what was sent")),
    "breaks the connection": lambda: Script(fail_at=0, die=True),
    "ends its answer": lambda: Script(fail_at=0, end=True),
    "refuses": lambda: Script(refuse=PeerError("no")),
    "does not trust us": lambda: Script(refuse=AuthError("who are you?")),
    "has another model": lambda: Script(refuse=IncompatibleError("another layout")),
    "has no room": lambda: Script(refuse=BusyError("the arena is full")),
}


def spare_nodes(fleet: FakeFleet) -> None:
    """A second decode node, which ``more[0]`` is."""
    fleet.add("decode", "pd", "pd-decode-1")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A gateway before two nodes of each role; at the end of the test nothing may be held anywhere."""
    async with open_bench(prepare=spare_nodes) as bench:
        yield bench
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


async def rungs(bench: Bench) -> dict[str, float]:
    """What was counted."""
    names = ("prefill_node", "local_prefill", "decode_node", "no_room", "error")
    counts = {rung: await bench.metric("prfaas_fallbacks_total", rung=rung) for rung in names}
    return {rung: count for rung, count in counts.items() if count}


async def explained(bench: Bench, **body: Any) -> Any:
    """The record of a request that must be answered whole."""
    answer = await bench.complete(explain=True, **body)
    assert answer["choices"][0]["text"] == ANSWER
    assert answer["usage"]["completion_tokens"] == len(ANSWER)
    return answer["prfaas"]


def text_of(events: list[Any]) -> str:
    """Of a stream that must be whole."""
    assert events[-1] == "[DONE]", events[-1]
    return "".join(event["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("prompt", "first", "second", "rung"),
    [(LONG, "far", "near", "local_prefill"), ("Hi", "near", "far", "prefill_node")],
    ids=["prfaas", "pd"],
)
async def test_another_node_prefills(
    bench: Bench, failure: str, prompt: str, first: str, second: str, rung: str
) -> None:
    """However a prefill node fails, the prompt is computed by another one, and the record says so."""
    failing: FakeNode = getattr(bench.fleet, first)
    helping: FakeNode = getattr(bench.fleet, second)
    failing.script = FAILURES[failure]()
    record = await explained(bench, prompt=prompt)
    (step,) = record["fallbacks"]
    if "no room" in failure:
        rung = "no_room"
    assert (step["rung"], step["answered_tokens"], step["times"]) == (rung, 0, 1)
    assert step["prefill_node"] == record["prefill_node"] == helping.info["node_id"]
    assert failing.info["node_id"] in step["failed"]
    assert "reserved" in step["stages_s"] and "tokenized" in record["stages_s"]
    assert any(reason.startswith(f"fallback to {rung}: ") for reason in record["reasons"])
    assert (len(failing.calls), len(helping.calls)) == (1, 1)
    assert await rungs(bench) == {rung: 1}


@pytest.mark.parametrize("failure", FAILURES)
async def test_another_node_decodes(bench: Bench, failure: str) -> None:
    """However a decode node fails before its first token, nobody notices but the counters.

    A KV stream that breaks is the sender's or the link's failure first: another sender tries before that.
    """
    bench.fleet.decode.script = FAILURES[failure]()
    record = await explained(bench)
    assert record["fallbacks"][-1]["rung"] == ("no_room" if "no room" in failure else "decode_node")
    assert record["decode_node"] == "pd-decode-1"
    assert record["error"] is None


@pytest.mark.parametrize("kind", ["error", "die", "end"])
@pytest.mark.parametrize("answered", range(1, len(ANSWER)))
async def test_a_stream_goes_on_over_the_death_of_its_decode_node(bench: Bench, kind: str, answered: int) -> None:
    """No token twice, none missing: what the client has becomes part of the prompt of the next node."""
    error = PeerError("the engine broke") if kind == "error" else None
    first, second = bench.fleet.decode, bench.fleet.more[0]
    first.script = Script(fail_at=answered, error=error, die=kind == "die", end=kind == "end")
    second.script = Script(tokens=tuple(ANSWER[answered:].encode()))
    events = await bench.stream(max_tokens=100, min_tokens=3, seed=7, stream_options={"include_usage": True})
    assert text_of([event for event in events if event == "[DONE]" or event["choices"]]) == ANSWER
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, len(ANSWER))
    (call,) = second.calls
    assert call["prompt_tokens"] == 2 + answered
    assert call["sampling"]["max_tokens"] == 100 - answered
    assert call["sampling"]["min_tokens"] == max(0, 3 - answered)
    assert call["sampling"]["seed"] == first.calls[0]["sampling"]["seed"] == 7
    assert bytes(bench.fleet.near.calls[-1]["token_ids"]).decode() == "Hi" + ANSWER[:answered]
    assert await rungs(bench) == {"decode_node": 1}


async def test_an_answer_goes_on_over_two_deaths() -> None:
    """Each of them where the one before had come to."""

    def prepare(fleet: FakeFleet) -> None:
        for name in ("pd-decode-1", "pd-decode-2"):
            fleet.add("decode", "pd", name)

    async with open_bench(prepare=prepare) as bench:
        first, (second, third) = bench.fleet.decode, bench.fleet.more
        first.script = Script(fail_at=3, die=True)
        second.script = Script(tokens=tuple(b"lo, world"), fail_at=4, die=True)
        third.script = Script(tokens=tuple(b"world"))
        record = await explained(bench)
        assert [step["answered_tokens"] for step in record["fallbacks"]] == [3, 7]
        assert all(step["resumed"] for step in record["fallbacks"])
        assert (record["prompt_tokens"], record["output_tokens"]) == (2, len(ANSWER))
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_an_answer_that_is_counted_is_generated_once_more(bench: Bench, penalty: str) -> None:
    """Where sampling depends on the answer so far, that is made again and compared, and not sent twice."""
    bench.fleet.decode.script = Script(fail_at=4, die=True)
    body: dict[str, Any] = {penalty: 0.5}
    assert text_of(await bench.stream(**body)) == ANSWER
    (call,) = bench.fleet.more[0].calls
    assert call["prompt_tokens"] == 2
    assert call["sampling"] == bench.fleet.decode.calls[0]["sampling"]


@pytest.mark.parametrize("other", ["Help", "He", "Hel"])
async def test_an_answer_that_comes_out_differently_is_an_error(bench: Bench, other: str) -> None:
    """A client is never given a mixture of two answers."""
    bench.fleet.decode.script = Script(fail_at=4, die=True)
    bench.fleet.more[0].script = Script(tokens=tuple(other.encode()))
    events = await bench.stream(presence_penalty=0.5)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hell"
    assert "comes out differently" in events[-1]["error"]["message"]


async def test_the_repetition_penalty_needs_no_counting(bench: Bench) -> None:
    """It is over prompt and answer alike, so the answer can be resumed with its tokens in the prompt's set."""
    bench.fleet.decode.script = Script(fail_at=4, die=True)
    second = bench.fleet.more[0]
    second.script = Script(tokens=tuple(ANSWER[4:].encode()))
    assert text_of(await bench.stream(repetition_penalty=1.1)) == ANSWER
    assert second.calls[0]["prompt_token_set"] == sorted(set(b"HiHell"))


async def test_a_link_that_breaks_behind_the_first_token(bench: Bench) -> None:
    """The seal has overtaken the data, and the client has its token; that one is not sent again."""
    decode = bench.fleet.decode
    script = decode.script = Script(no_landed=True, hold_at=1, fail_at=1, error=LinkError("every connection died"))
    streaming = asyncio.create_task(bench.stream())
    async with asyncio.timeout(5):
        await script.gate.reached.wait()
        decode.script = Script(tokens=tuple(ANSWER[1:].encode()))
        script.gate.go_on.set()
        assert text_of(await streaming) == ANSWER
    assert [call["prompt_tokens"] for call in decode.calls] == [2, 3]
    assert [len(node.calls) for node in (bench.fleet.near, bench.fleet.far)] == [1, 1]
    assert await rungs(bench) == {"prefill_node": 1}


async def test_an_answer_that_lacks_only_its_end_needs_nobody_else(bench: Bench) -> None:
    """All tokens were there: the decode node dies before it says so."""
    bench.fleet.decode.script = Script(tokens=tuple(b"Hello"), no_finish=True)
    answer = await bench.complete(max_tokens=5)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert await rungs(bench) == {}
    assert not bench.fleet.more[0].calls


@pytest.mark.parametrize("where", ["near", "decode"])
async def test_a_node_that_restarts_hands_its_requests_on(bench: Bench, where: str) -> None:
    """A new boot id is enough, even if the connections still look alive."""
    node: FakeNode = getattr(bench.fleet, where)
    script = node.script = Script(hold_at=0)
    posting = asyncio.create_task(bench.complete())
    async with asyncio.timeout(5):
        await script.gate.reached.wait()
        node.info["boot_id"] = "boot-2"
        assert (await posting)["choices"][0]["text"] == ANSWER
    assert await rungs(bench) == {"prefill_node" if where == "near" else "decode_node": 1}


@pytest.mark.parametrize("where", ["near", "decode"])
async def test_a_node_that_falls_silent_is_left(where: str) -> None:
    """Its connections stay open and nothing comes over them: a request waits no longer than the watch takes."""
    watch = {"poll_interval": 0.02, "poll_timeout": 0.5, "down_after": 2}
    async with open_bench(prepare=spare_nodes, fleet=watch) as bench:
        node: FakeNode = getattr(bench.fleet, where)
        script = node.script = Script(hold_at=0)
        posting = asyncio.create_task(bench.complete())
        async with asyncio.timeout(10):
            await script.gate.reached.wait()
            node.silent = True
            assert (await posting)["choices"][0]["text"] == ANSWER
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


async def test_a_silent_node_is_not_left_where_there_is_no_other() -> None:
    """It may only have been held up: when it speaks again, the answer goes on."""
    watch = {"poll_interval": 0.02, "poll_timeout": 0.5, "down_after": 2}
    async with open_bench(fleet=watch) as bench:
        decode = bench.fleet.decode
        script = decode.script = Script(hold_at=3)
        streaming = asyncio.create_task(bench.stream())
        async with asyncio.timeout(10):
            await script.gate.reached.wait()
            decode.silent = True
            while (await bench.get("/health"))[1]["missing"] != ["decode node"]:
                pass
            script.gate.go_on.set()
            assert text_of(await streaming) == ANSWER
        assert await rungs(bench) == {}


async def test_a_prefill_node_that_is_lost_before_it_is_even_called_is_replaced(bench: Bench) -> None:
    """While the decode node reserves, the prefill node that was chosen falls silent."""
    gate = bench.fleet.decode.queue_gate = Gate()
    posting = asyncio.create_task(explained(bench))
    async with asyncio.timeout(20):
        await gate.reached.wait()
        assert bench.gateway._lifecycle is not None
        bench.gateway._lifecycle.abandon_node("pd-prefill-0")
        bench.fleet.decode.queue_gate = None
        gate.go_on.set()
        record = await posting
    assert [step["rung"] for step in record["fallbacks"]] == ["prefill_node"]
    assert record["prefill_node"] == "prfaas-0"


async def test_a_decode_node_that_dies_while_the_prompt_waits_in_a_queue(bench: Bench) -> None:
    """The queued prefill is given up with it, and the prompt queues for another decode node."""
    near, decode = bench.fleet.near, bench.fleet.decode
    gate = near.queue_gate = Gate()
    decode.script = Script(hold_at=0, fail_at=0, die=True)
    posting = asyncio.create_task(bench.complete())
    async with asyncio.timeout(5):
        await gate.reached.wait()
        near.queue_gate = None
        decode.script.gate.go_on.set()
        assert (await posting)["choices"][0]["text"] == ANSWER


async def test_every_stream_outlives_a_node_that_is_killed(bench: Bench) -> None:
    """Four at once, the node gone with all of its connections."""
    first, second = bench.fleet.decode, bench.fleet.more[0]
    second.script = Script(refuse=BusyError("not yet"))
    script = first.script = Script(hold_at=2)
    streams = [asyncio.create_task(bench.stream()) for _ in range(4)]
    async with asyncio.timeout(10):
        while first.open_calls < 4:
            await first.next_polls(1)
        await script.gate.reached.wait()
        second.script = Script(tokens=tuple(ANSWER[2:].encode()))
        await first.stop()
        for events in await asyncio.gather(*streams):
            assert text_of(events) == ANSWER
    assert (await rungs(bench))["decode_node"] == 4


@pytest.mark.parametrize(
    "refusal",
    [InvalidRequest("the prompt does not fit"), RefusedError("never fits"), DeadlineError("too late")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["near", "decode"])
async def test_what_is_no_nodes_fault_is_not_tried_elsewhere(bench: Bench, refusal: PrfaasError, where: str) -> None:
    """The same answer would come from everybody."""
    node: FakeNode = getattr(bench.fleet, where)
    node.script = Script(refuse=refusal)
    status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
    assert status == refusal.http_status and refusal.message in answer["error"]["message"]
    assert not bench.fleet.far.calls and not bench.fleet.more[0].calls
    assert await rungs(bench) == {}


async def test_a_broken_link_is_not_tried_from_the_node_next_door() -> None:
    """Whoever sits behind the same link is left out while somebody else can do it."""

    def prepare(fleet: FakeFleet) -> None:
        fleet.add("prefill", "prfaas", "prfaas-1")

    async with open_bench(prepare=prepare) as bench:
        bench.fleet.far.script = Script(fail_at=0, error=LinkError("every connection died"))
        record = await explained(bench, prompt=LONG)
        assert [step["rung"] for step in record["fallbacks"]] == ["local_prefill"]
        assert record["fallbacks"][0]["failed"] == "link from prfaas-0"
        assert not bench.fleet.more[0].calls
        # A node that failed by itself says nothing of its neighbour.
        bench.fleet.far.script = Script(fail_at=0, error=PeerError("the engine broke"))
        record = await explained(bench, prompt=LONG)
        assert record["prefill_node"] == "prfaas-1"


async def test_a_link_that_nobody_gets_through_ends_at_the_other_decode_node(bench: Bench) -> None:
    """When every sender fails, the receiver is what they have in common."""
    bench.fleet.decode.script = Script(fail_at=0, error=LinkError("nobody dialled"))
    record = await explained(bench)
    assert [step["rung"] for step in record["fallbacks"]] == ["prefill_node", "decode_node"]


async def test_field_59_a_missing_prefill_node_is_told_and_never_made_up_for_by_a_decode_node(bench: Bench) -> None:
    """Another cluster's does the work, with a reason; without any there is an error, and no decode node is asked."""
    bench.fleet.near.healthy = False
    await bench.fleet.near.next_polls(8)
    record = await explained(bench)
    assert any("no PD prefill node is up" in reason for reason in record["reasons"])
    bench.fleet.far.healthy = False
    await bench.fleet.far.next_polls(8)
    calls = len(bench.fleet.decode.calls)
    status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
    assert status == 503 and "no prefill node is up" in answer["error"]["message"]
    assert len(bench.fleet.decode.calls) == calls


async def test_the_error_when_nobody_is_left_is_that_of_the_last_node(bench: Bench) -> None:
    """And the record tells of every node before it."""
    bench.fleet.near.script = Script(fail_at=0, error=PeerError("the first broke"))
    bench.fleet.far.script = Script(fail_at=0, error=PeerError("the second broke"))
    status, answer, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
    assert status == 502
    assert "the second broke" in answer["error"]["message"] and "prfaas-0" in answer["error"]["message"]
    assert await rungs(bench) == {"prefill_node": 1, "error": 1}


async def test_field_60_a_prompt_that_breaks_everybody_does_not_break_the_whole_fleet() -> None:
    """It is given up after some nodes, however many are left."""

    def prepare(fleet: FakeFleet) -> None:
        for number in range(1, 9):
            fleet.add("decode", "pd", f"pd-decode-{number}")
        for node in (fleet.decode, *fleet.more):
            node.script = Script(fail_at=0, error=PeerError("poison"))

    async with open_bench(prepare=prepare) as bench:
        status, _, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
        assert status == 502
        assert sum(len(node.calls) for node in bench.fleet.nodes if node.role == "decode") == 5


async def test_field_60_no_room_is_asked_for_again_and_never_computed_around(bench: Bench) -> None:
    """No room anywhere is no error: it is asked again, and the wait is in the record."""
    nodes = (bench.fleet.decode, bench.fleet.more[0])
    for node in nodes:
        node.script = Script(refuse=BusyError("the arena is full"))
    posting = asyncio.create_task(explained(bench))
    async with asyncio.timeout(10):
        while len(nodes[0].calls) < 3:
            await nodes[0].next_polls(1)
        for node in nodes:
            node.script = Script()
        record = await posting
    (step,) = record["fallbacks"]
    assert step["rung"] == "no_room" and step["times"] >= 5
    assert not bench.fleet.near.calls[1:], "nothing is prefilled before somebody has reserved"


async def test_waiting_for_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many wait already, the next one is told so at once."""
    monkeypatch.setattr("prfaas_net.gateway.lifecycle.WaitingRoom", lambda: WaitingRoom(0))
    async with open_bench() as bench:
        bench.fleet.decode.script = Script(refuse=BusyError("the arena is full"))
        status, answer, headers = await bench.post("/v1/completions", {"prompt": "Hi"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "the arena is full" in answer["error"]["message"]
        assert len(bench.fleet.decode.calls) == 1


async def test_who_waits_longest_is_called_first() -> None:
    """A room is a queue; nobody is called twice, and those who gave up are gone."""
    room, order = WaitingRoom(), []

    async def wait(name: str, pause_s: float) -> None:
        await room.wait(pause_s)
        order.append(name)

    tasks = [asyncio.create_task(wait(name, 60)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    for _ in range(2):
        room.freed()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*tasks[1:]), 5)
    assert order == ["b", "c"]
    room.freed()
    await asyncio.wait_for(room.wait(0.001), 5)


@pytest.mark.parametrize("where", ["far", "more"])
async def test_a_client_that_leaves_after_a_fallback_frees_everything(bench: Bench, where: str) -> None:
    """Also while it is the second node that works for it."""
    helping = bench.fleet.far if where == "far" else bench.fleet.more[0]
    (bench.fleet.near if where == "far" else bench.fleet.decode).script = Script(fail_at=0, die=True)
    script = helping.script = Script(hold_at=0)
    posting = asyncio.create_task(bench.post("/v1/completions", {"prompt": "Hi"}))
    async with asyncio.timeout(5):
        await script.gate.reached.wait()
        posting.cancel()
        await bench.fleet.all_idle()


async def test_a_consequence_is_not_taken_for_a_cause(bench: Bench) -> None:
    """The decode node only says that its sender gave up; the sender says why, and is the one to be replaced."""
    bench.fleet.near.script = Script(fail_at=0, error=PeerError("out of GPU memory"))
    bench.fleet.decode.script = Script(fail_at=0, error=CancelledByPeer("the sender gave up"), hold_at=0)
    posting = asyncio.create_task(explained(bench))
    async with asyncio.timeout(5):
        await bench.fleet.decode.script.gate.reached.wait()
        bench.fleet.decode.script.gate.go_on.set()
        bench.fleet.decode.script = Script()
        record = await posting
    assert "out of GPU memory" in record["fallbacks"][0]["error"]
    assert record["decode_node"] == "pd-decode-0"
