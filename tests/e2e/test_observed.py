"""What operators see of real processes: one trace through all of them, and logs that name the request and no secret."""

from __future__ import annotations

import json
from dataclasses import replace

import aiohttp
import pytest

from engine.engine import Engine
from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.localfleet.fleet import ClusterPlace, LocalFleet
from tests.e2e.conftest import PLAN, Bench
from tests.tracing.collector import Collector, Span, collecting

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEYS = {"api": "an-api-key-for-clients", "node": "a-key-between-the-nodes", "kv": "a-key-of-the-kv-stream"}
GATEWAY = {"request", "tokenize", "attempt", "route", "reserve", "prefill", "transfer", "decode"}
NODES = {"prefill_node", "queue", "decode_node", "land"}


def environ(collector: Collector) -> dict[str, str]:
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PRFAAS_GATEWAY__API_KEYS": KEYS["api"]}
    for role in ("GATEWAY", "PREFILL", "DECODE"):
        told |= {f"PRFAAS_{role}__LOG__FORMAT": "json", f"PRFAAS_{role}__LOG__LEVEL": "debug"}
        told[f"PRFAAS_{role}__NODE_KEY"] = KEYS["node"]
    return told | {f"PRFAAS_{role}__KV__SHARED_KEY": KEYS["kv"] for role in ("PREFILL", "DECODE")}


async def ask(fleet: LocalFleet, prompt: object, request_id: str, key: str = KEYS["api"]) -> int:
    """The status of one request, within the trace of its client."""
    headers = {
        "Authorization": f"Bearer {key}", "X-Request-ID": request_id, "traceparent": f"00-{TRACE}-{SPAN}-01",
    }  # fmt: skip
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{fleet.url}/v1/completions", json=body) as answer,
    ):
        await answer.read()
        return answer.status


async def test_a_request_is_one_trace_and_one_name_in_every_log(engine: Engine) -> None:
    """Gateway, prefill node in the other cluster, decode node: one trace; its id is in the lines of each of them."""
    async with collecting() as collector:
        place = ClusterPlace(environ=environ(collector))
        async with LocalFleet(replace(PLAN, prfaas=place, pd=place)) as fleet:
            async with GatewayClient(fleet.url, api_key=KEYS["api"]) as client:
                await client.wait_healthy(within_s=20)
            ids = Bench(fleet, engine).tokenizer.encode("The early days of the Internet " * 100)
            assert await ask(fleet, ids, "client-id-1") == 200
            await collector.holds(TRACE, GATEWAY | NODES)
            assert await ask(fleet, ids, "client-id-2", key=KEYS["api"] + "-wrong") == 401
            assert await ask(fleet, KEYS["api"], "client-id-3") == 200
            assert await ask(fleet, {"no": KEYS["node"]}, "client-id-4") == 400
            processes = dict(fleet.processes)
        check_trace(collector)
    check_logs({name: process.last_lines for name, process in processes.items() if "shaper" not in name})


def check_trace(collector: Collector) -> None:
    """The first request's spans hang together, and each process says who it is."""
    attempt = next(span for span in collector.of(TRACE) if span.attributes.get("prfaas.prefill_cluster") == "prfaas")
    children = [span for span in collector.of(TRACE) if span.parent == attempt.span]
    spans = {span.name: span for child in children for span in (child, *_children(collector, child))}
    (request,) = [span for span in collector.of(TRACE) if span.span == attempt.parent]
    assert (request.name, request.parent) == ("request", SPAN)
    assert spans["prefill_node"].parent == spans["decode_node"].parent == attempt.span
    assert (spans["prefill_node"].service, spans["prefill_node"].instance) == ("prfaas-prefill", "prfaas-prefill-0")
    assert (spans["decode_node"].service, spans["decode_node"].instance) == ("prfaas-decode", "pd-decode-0")
    assert request.service == "prfaas-gateway"
    assert spans["queue"].parent == spans["prefill_node"].span
    assert spans["land"].parent == spans["decode_node"].span
    assert not [span.name for span in spans.values() if span.failed]
    # On one machine, and so on one clock.
    for name in ("prefill_node", "decode_node"):
        assert attempt.start_ns <= spans[name].start_ns <= spans[name].end_ns


def _children(collector: Collector, parent: Span) -> list[Span]:
    return [span for span in collector.of(TRACE) if span.parent == parent.span and parent.server]


def check_logs(lines: dict[str, list[str]]) -> None:
    """Every line is JSON; those about a request name it, in each process; no key is in any of them."""
    named: dict[str, set[str]] = {}
    for name, written in lines.items():
        for line in written:
            assert not [key for key in KEYS.values() if key in line], line
            event = json.loads(line)
            assert {"ts", "level", "logger", "message", "service"} <= set(event)
            if "token" in event["message"]:
                assert "request_id" in event, line
            if event.get("request_id", "").startswith("client-id-1"):
                named.setdefault(event["request_id"], set()).add(name)
                assert event["trace_id"] == TRACE
    (processes,) = named.values()
    assert processes == {"gateway", "PrfaaS prefill node", "PD decode node"}
