"""A request's record, told as spans."""

from __future__ import annotations

import asyncio

import orjson

from prfaas_net.errors import PeerError
from tests.tracing.collector import Collector, Span, collecting
from tests.waiting import until

from .conftest import THRESHOLD_TOKENS, open_bench
from .fakes import Script
from .test_ladder import ANSWER

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
LONG = "x" * (THRESHOLD_TOKENS + 20)
STAGES = {"route", "reserve", "prefill", "transfer", "decode"}


async def spans_of(collector: Collector, n_attempts: int) -> list[Span]:
    """All of the one trace, once it is whole: the request's span is the last one that is made."""
    await until(lambda: any(span.name == "request" for span in collector.of(TRACE)), within_s=15.0)
    spans = collector.of(TRACE)
    assert len([span for span in spans if span.name == "attempt"]) == n_attempts
    return spans


async def test_every_stage_is_a_span_of_the_clients_trace() -> None:
    """In order, inside of each other, with what was decided."""
    async with collecting() as collector, open_bench(tracing={"endpoint": collector.url}) as bench:
        await bench.post("/v1/completions", {"prompt": LONG, "max_tokens": len(ANSWER)}, headers=HEADERS)
        await bench.get("/v1/models")
        spans = {span.name: span for span in await spans_of(collector, 1)}
    assert set(spans) == STAGES | {"request", "tokenize", "attempt"}
    request, attempt = spans["request"], spans["attempt"]
    assert request.parent == SPAN and request.server
    assert spans["tokenize"].parent == attempt.parent == request.span
    assert {spans[name].parent for name in STAGES} == {attempt.span}
    assert not [span for span in spans.values() if span.failed]
    assert all(request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns for span in spans.values())
    starts = [spans[name].start_ns for name in ("tokenize", "route", "reserve", "prefill", "decode")]
    assert starts == sorted(starts)
    assert attempt.attributes["prfaas.prefill_node"] == "prfaas-0"
    assert attempt.attributes["prfaas.output_tokens"] == len(ANSWER)
    assert request.attributes["http.response.status_code"] == 200
    assert {span.service for span in spans.values()} == {"prfaas-gateway"}


async def test_another_attempt_is_another_span() -> None:
    """The first one says how far it came, and that it failed."""
    async with collecting() as collector, open_bench(tracing={"endpoint": collector.url}) as bench:
        bench.fleet.far.script = Script(fail_at=0, error=PeerError("the engine broke"))
        await bench.post("/v1/completions", {"prompt": LONG}, headers=HEADERS)
        spans = await spans_of(collector, 2)
    first, second = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns)
    assert (first.failed, second.failed) == (True, False)
    assert first.end_ns <= second.start_ns
    failed = {span.name for span in spans if span.parent == first.span and span.failed}
    assert "prefill" in failed and not failed & {"route", "reserve"}
    assert {span.name for span in spans if span.parent == second.span and not span.failed} == STAGES


async def test_what_goes_wrong_is_told() -> None:
    """A refusal and a client that left have a span too."""
    async with collecting() as collector, open_bench(tracing={"endpoint": collector.url}) as bench:
        await bench.post("/v1/completions", b"no JSON", headers=HEADERS)
        (refused,) = await spans_of(collector, 0)
        assert not refused.failed
        bench.fleet.decode.script = Script(hold_at=2)
        ask = orjson.dumps({"prompt": "Hi", "stream": True})
        async with bench.http.post(f"{bench.gateway.url}/v1/completions", data=ask, headers=HEADERS) as answer:
            await answer.content.readline()
        await bench.fleet.all_idle()
        await until(lambda: len([s for s in collector.spans if s.name == "request"]) == 2, within_s=15.0)
    assert [span.failed for span in collector.spans if span.name == "request"] == [False, True]


async def test_a_share_of_requests_is_traced_where_the_client_does_not_say() -> None:
    """None here; a client that asks for it is traced all the same."""
    async with collecting() as collector, open_bench(tracing={"endpoint": collector.url, "sample": 0.0}) as bench:
        await bench.complete()
        await bench.post("/v1/completions", {"prompt": "Hi"}, headers=HEADERS)
        await spans_of(collector, 1)
    assert {span.trace for span in collector.spans} == {TRACE}


async def test_requests_do_not_care_whether_the_collector_is_there() -> None:
    """It refuses connections; all is answered, and the gateway stops in time."""
    async with open_bench(tracing={"endpoint": "http://127.0.0.1:9", "timeout": 1}) as bench:
        for _ in range(20):
            assert (await bench.complete(max_tokens=5))["choices"][0]["text"] == "Hello"
        async with asyncio.timeout(10):
            await bench.gateway.stop()
