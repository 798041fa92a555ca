"""However a vLLM or SGLang server fails, a request gets its answer where another server can give it, and nothing stays
behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import THRESHOLD_TOKENS
from tests.gateway.engine_fakes import (
    ANSWER,
    EngineBench,
    EngineScript,
    FakeEngine,
    FakeSglang,
    FakeVllm,
    Handovers,
    engine_bench,
    eventually,
)

LONG = "x" * (THRESHOLD_TOKENS + 20)
KINDS: list[type[FakeEngine]] = [FakeVllm, FakeSglang]
# How each kind of pair hands over: after the prefill, or both at once.
FLEETS = ["vllm", "vllm-connector", "sglang"]

VLLM_ERROR = {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": 500}}
SGLANG_ERROR = {"error": {"message": "the scheduler died"}}
OVERLOADED = {"object": "error", "message": "server overloaded", "type": "ServiceUnavailable", "code": 503}
FAILURES: dict[str, Callable[[], EngineScript]] = {
    "refuses with 500": lambda: EngineScript(refuse=(500, VLLM_ERROR)),
    "refuses in text": lambda: EngineScript(refuse=(500, "Internal Server Error")),
    "does not know us": lambda: EngineScript(refuse=(401, {"error": "Unauthorized"})),
    "knows no such model": lambda: EngineScript(refuse=(404, {"error": {"message": "no model", "code": 404}})),
    "is a proxy without a server": lambda: EngineScript(refuse=(502, "<html>Bad Gateway</html>")),
    "has no room": lambda: EngineScript(refuse=(503, OVERLOADED)),
}
FEW = ["refuses with 500", "has no room"]
# Of servers that stream their answer.
DEATHS: dict[str, Callable[[], EngineScript]] = {
    "reports an error": lambda: EngineScript(fail_at=0, error=SGLANG_ERROR),
    "breaks the connection": lambda: EngineScript(fail_at=0, die=True),
    "ends its answer": lambda: EngineScript(fail_at=0, end=True),
    "sends no tokens": lambda: EngineScript(no_tokens=True),
    "gives up": lambda: EngineScript(tokens=tuple(b"H"), finish="abort"),
}


def fleet_of(name: str, prefills: int = 2, decodes: int = 2) -> list[FakeEngine]:
    """Prefill servers ``p0`` and on in a cluster of their own, decode servers ``d0`` and on."""
    kind = FakeSglang if name == "sglang" else FakeVllm
    handovers = Handovers()
    engines: list[FakeEngine] = [kind(handovers, f"p{i}", "prefill", "prfaas") for i in range(prefills)]
    for i, engine in enumerate(engines):
        if kind is FakeSglang:
            engine.settings["bootstrap"] = f"10.0.0.{i + 1}:8998"
        elif name == "vllm-connector":
            engine.settings["connector"] = f"10.0.0.{i + 1}:7700"
    return engines + [kind(handovers, f"d{i}", "decode", "pd") for i in range(decodes)]


@asynccontextmanager
async def bench_of(name: str, **settings: Any) -> AsyncIterator[EngineBench]:
    async with engine_bench(*fleet_of(name), **settings) as bench:
        yield bench


async def counted(bench: EngineBench) -> dict[str, float]:
    names = ("prefill_node", "local_prefill", "decode_node", "no_room", "error")
    counts = {rung: await bench.metric("prfaas_fallbacks_total", rung=rung) for rung in names}
    return {rung: count for rung, count in counts.items() if count}


def text_of(events: list[Any]) -> str:
    assert events[-1] == "[DONE]", events[-1]
    return "".join(event["choices"][0]["text"] for event in events[:-1])


# -- before the first token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "failure"), [*(("vllm", failure) for failure in FAILURES), *((fleet, FEW[0]) for fleet in FLEETS[1:])]
)
async def test_another_server_prefills(fleet: str, failure: str) -> None:
    async with bench_of(fleet) as bench:
        bench.engines["p0"].script = FAILURES[failure]()
        record = await bench.record(prompt=LONG)
        (step,) = record["fallbacks"]
        rung = "no_room" if failure in ("has no room", "is a proxy without a server") else "prefill_node"
        assert (step["rung"], step["prefill_node"], step["failed"]) == (rung, "p1", "prefill node p0")
        assert record["output_tokens"] == 12
        assert await counted(bench) == {rung: 1}


@pytest.mark.parametrize("failure", [*FEW, *DEATHS])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_another_server_decodes(fleet: str, failure: str) -> None:
    """What a decode server tells before its first token may be the handover's fault: another sender tries before."""
    async with bench_of(fleet) as bench:
        bench.engines["d0"].script = {**FAILURES, **DEATHS}[failure]()
        record = await bench.record(prompt=LONG)
        assert record["decode_node"] == "d1" and record["output_tokens"] == 12


@pytest.mark.parametrize("failure", [*FEW, *DEATHS])
@pytest.mark.parametrize("kind", KINDS)
async def test_another_server_serves_end_to_end(kind: type[FakeEngine], failure: str) -> None:
    a, b = (kind(Handovers(), name, "both", "pd") for name in "ab")
    async with engine_bench(a, b) as bench:
        a.script = {**FAILURES, **DEATHS}[failure]()
        record = await bench.record()
        assert (record["prefill_node"], record["decode_node"], record["output_tokens"]) == ("b", "b", 12)


@pytest.mark.parametrize("connector", [False, True])
async def test_a_decode_server_computes_the_prompt_where_nobody_else_can(connector: bool) -> None:
    """The fallback of a vLLM fleet whose prefill servers are gone."""
    engines = fleet_of("vllm-connector" if connector else "vllm", prefills=1, decodes=1)
    async with engine_bench(*engines) as bench:
        bench.engines["p0"].script = EngineScript(refuse=(500, VLLM_ERROR))
        record = await bench.record(prompt=LONG)
        assert (record["prefill_node"], record["fallbacks"][0]["rung"]) == ("d0", "local_prefill")
        assert "kv_transfer_params" not in bench.engines["d0"].calls[-1]


async def test_a_prefill_answer_without_params_is_the_prefill_servers_fault() -> None:
    async with bench_of("vllm") as bench:
        bench.engines["p0"].script = EngineScript(no_params=True)
        record = await bench.record(prompt=LONG)
        assert record["prefill_node"] == "p1" and "--kv-transfer-config" in record["fallbacks"][0]["error"]


@pytest.mark.parametrize("fleet", FLEETS)
async def test_what_an_engine_refuses_for_the_requests_own_sake_is_final(fleet: str) -> None:
    """Its words reach the client, and no other server is asked."""
    refusal = {"error": {"message": "token id 999 is out of vocabulary", "type": "BadRequestError", "code": 400}}
    async with bench_of(fleet) as bench:
        bench.engines["p0"].script = EngineScript(refuse=(400, refusal))
        status, body, _ = await bench.post("/v1/completions", {"prompt": LONG})
        assert status == 400 and "token id 999 is out of vocabulary" in body["error"]["message"]
        assert not bench.engines["p1"].calls
        assert await counted(bench) == {}


@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_pair_that_has_no_room_now_is_asked_again(fleet: str) -> None:
    async with engine_bench(*fleet_of(fleet, prefills=1, decodes=1)) as bench:
        decode = bench.engines["d0"]
        decode.script = EngineScript(refuse=(503, OVERLOADED))
        posting = asyncio.create_task(bench.record(prompt=LONG))
        async with asyncio.timeout(30):
            await eventually(lambda: len(decode.calls) > 1)
            decode.script = EngineScript()
            record = await posting
        assert [step["rung"] for step in record["fallbacks"]] == ["no_room"]


async def test_every_server_fails() -> None:
    """One clear error, in the client's shape."""
    async with bench_of("vllm") as bench:
        for engine in bench.engines.values():
            engine.script = EngineScript(refuse=(500, VLLM_ERROR))
        status, body, _ = await bench.post("/v1/completions", {"prompt": LONG})
        assert status == 502 and "EngineCore died" in body["error"]["message"]


# -- in the middle of an answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answered", "how"), [(1, "die"), (5, "error"), (11, "end")])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_stream_goes_on_over_the_death_of_its_server(fleet: str, answered: int, how: str) -> None:
    """No token twice, none missing; draws go on where they were."""
    async with bench_of(fleet) as bench:
        error = VLLM_ERROR if how == "error" else None
        first, second = bench.engines["d0"], bench.engines["d1"]
        first.script = EngineScript(fail_at=answered, error=error, die=how == "die", end=how == "end")
        second.script = EngineScript(tokens=tuple(ANSWER[answered:]))
        assert text_of(await bench.stream(prompt=LONG, max_tokens=50, seed=7)) == ANSWER.decode()
        (call,) = second.calls
        prompt = call.get("prompt") or call["input_ids"]
        assert bytes(prompt).decode() == LONG + ANSWER[:answered].decode()
        params = call.get("sampling_params") or call
        assert params.get("max_tokens", params.get("max_new_tokens")) == 50 - answered
        assert params.get("seed", params.get("sampling_seed")) == 7 + answered
        assert await counted(bench) == {"decode_node": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_hangs_is_left(kind: type[FakeEngine]) -> None:
    """It answers to its health check, and sends no more tokens."""
    a, b = (kind(Handovers(), name, "both", "pd") for name in "ab")
    a.settings["stall_timeout"] = 0.3
    async with engine_bench(a, b) as bench:
        a.script = EngineScript(hang_at=5)
        b.script = EngineScript(tokens=tuple(ANSWER[5:]))
        (step,) = (await bench.record())["fallbacks"]
        assert (step["decode_node"], step["answered_tokens"]) == ("b", 5) and "no more tokens" in step["error"]


@pytest.mark.parametrize(("fleet", "where"), [("vllm", "p0"), ("vllm-connector", "d0"), ("sglang", "d0")])
async def test_a_server_that_falls_silent_is_left(fleet: str, where: str) -> None:
    """Its connections stay open and nothing comes over them: the watch over servers ends the wait."""
    watch = {"poll_interval": 0.05, "poll_timeout": 1.0, "down_after": 2}
    async with bench_of(fleet, fleet=watch, request_deadline=50) as bench:
        engine = bench.engines[where]
        engine.script = EngineScript(hold=True)
        posting = asyncio.create_task(bench.record(prompt=LONG))
        async with asyncio.timeout(45):
            await engine.script.gate.reached.wait()
            engine.silent = True
            record = await posting
        assert where not in (record["prefill_node"], record["decode_node"])


async def test_a_server_that_restarts_hands_its_requests_on() -> None:
    """Its process has another start time: its calls are lost, even if the connections look alive."""
    a, b = (FakeVllm(Handovers(), name, "both", "pd") for name in "ab")
    async with engine_bench(a, b) as bench:
        a.script = EngineScript(hang_at=5)
        b.script = EngineScript(tokens=tuple(ANSWER[5:]))
        posting = asyncio.create_task(bench.record())
        async with asyncio.timeout(30):
            await a.script.gate.reached.wait()
            a.started_s += 100
            (step,) = (await posting)["fallbacks"]
        assert (step["decode_node"], step["answered_tokens"]) == ("b", 5) and "restarted" in step["error"]


# -- nothing stays behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["p0", "d0"])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_client_that_leaves_frees_both_servers(fleet: str, where: str) -> None:
    """In whatever stage it leaves. SGLang servers are told, too."""
    async with bench_of(fleet) as bench:
        engine = bench.engines[where]
        engine.script = EngineScript(hold=True)
        body = b'{"prompt": "' + LONG.encode() + b'", "stream": true}'
        posting = asyncio.create_task(bench.post("/v1/completions", body))
        async with asyncio.timeout(30):
            await engine.script.gate.reached.wait()
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting
            await bench.all_idle()
            if fleet == "sglang":
                await eventually(lambda: engine.calls[0]["rid"] in engine.aborted)
        await eventually(lambda: not bench.gateway.router.state.assignments)


@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_client_that_leaves_in_the_middle_of_a_stream(fleet: str) -> None:
    async with bench_of(fleet) as bench:
        decode = bench.engines["d0"]
        decode.script = EngineScript(hang_at=3)
        async with aiohttp.ClientSession() as http:
            body = {"prompt": LONG, "stream": True}
            async with http.post(f"{bench.gateway.url}/v1/completions", json=body) as answer:
                await answer.content.readline()
                await decode.script.gate.reached.wait()
        await bench.all_idle()
        await eventually(lambda: not bench.gateway.router.state.assignments)


@pytest.mark.parametrize("where", ["p0", "d0"])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_the_deadline_ends_a_request_on_both_servers(fleet: str, where: str) -> None:
    async with bench_of(fleet, request_deadline=0.5) as bench:
        bench.engines[where].script = EngineScript(hold=True)
        status, body, _ = await bench.post("/v1/completions", {"prompt": LONG})
        assert status == 504 and "deadline" in body["error"]["message"]
        await bench.all_idle()


@pytest.mark.parametrize("fleet", FLEETS[1:])
async def test_the_prefill_server_is_freed_when_the_decode_server_dies(fleet: str) -> None:
    """It waits in a queue there; the answer comes from elsewhere, and the queue has one less."""
    async with engine_bench(*fleet_of(fleet, prefills=1, decodes=2)) as bench:
        prefill = bench.engines["p0"]
        gate = EngineScript(hold=True)
        prefill.script = gate
        bench.engines["d0"].script = EngineScript(refuse=(500, VLLM_ERROR))
        posting = asyncio.create_task(bench.record(prompt=LONG))
        async with asyncio.timeout(30):
            await eventually(lambda: bench.engines["d1"].calls)
            prefill.script = EngineScript()
            gate.gate.go_on.set()
            assert (await posting)["decode_node"] == "d1"
