"""Traces: who decides what is traced, where spans go, and that they cost requests nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from prfaas_net.errors import ConfigError, LinkError
from prfaas_net.tracing.context import TraceContext
from prfaas_net.tracing.otlp import OtlpSink
from prfaas_net.tracing.stages import call_span, stage
from prfaas_net.tracing.tracer import SpanRecord, Tracer, TracingSection, open_tracer
from tests.tracing.collector import collecting
from tests.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Kept:
    """A sink that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    def take(self, span: SpanRecord) -> None:
        self.spans.append(span)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_traceparent_is_read_as_w3c_says(header: str | None, sampled: bool | None) -> None:
    """Bad ones are as none; our own can be read again."""
    context = TraceContext.parse(header)
    assert (context.sampled if context else None) is sampled
    if context is not None:
        assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE, SPAN)
        assert TraceContext.parse(context.header) == context
        assert context.child().trace_id == context.trace_id and context.child().span_id != context.span_id


def test_the_client_decides_what_is_traced_and_else_a_share_of_requests_is() -> None:
    """What is not sampled is not told, and says so to the nodes."""
    sink = Kept()
    context, parent = Tracer(sink, 0.0).enter(f"00-{TRACE}-{SPAN}-01")
    assert context.sampled and parent is not None and parent.header.endswith(f"{SPAN}-01")
    context, parent = Tracer(sink, 1.0).enter(f"00-{TRACE}-{SPAN}-00")
    assert context.header.endswith("-00")
    assert [Tracer(sink, share).enter(None)[0].sampled for share in (0.0, 1.0)] == [False, True]
    Tracer(sink).record(SpanRecord("request", context, parent, 0, 1))
    assert not sink.spans


def test_stages_of_a_call_are_its_children() -> None:
    """Nested as the blocks are; a failure is told at every block that it leaves; outside nothing is made."""
    sink = Kept()

    def call() -> None:
        with call_span(Tracer(sink), "prefill_node", f"00-{TRACE}-{SPAN}-01", node="p0"):
            with stage("queue"):
                pass
            with stage("transfer"), stage("prefill"):
                raise LinkError("it broke")

    with pytest.raises(LinkError):
        call()
    queue, prefill, transfer, whole = sink.spans
    assert [span.name for span in sink.spans] == ["queue", "prefill", "transfer", "prefill_node"]
    assert whole.parent == TraceContext.parse(f"00-{TRACE}-{SPAN}-01") and whole.server
    assert queue.parent == transfer.parent == whole.context and prefill.parent == transfer.context
    assert [span.error for span in sink.spans] == [None, "it broke", "it broke", "it broke"]
    assert dict(whole.attributes) == {"node": "p0"}
    with stage("nowhere"), call_span(Tracer(sink), "x", None), call_span(Tracer(sink), "x", f"00-{TRACE}-{SPAN}-00"):
        pass
    assert len(sink.spans) == 4


@pytest.mark.parametrize(
    ("endpoint", "environ", "expected"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:1"}, "http://c:4318/v1/traces"),
        ("https://c/base/v1/traces", {}, "https://c/base/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:1"}, "http://d:1/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d:1/x"}, "http://d:1/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:1", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:1", "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
    ],
)
def test_the_endpoint_is_a_setting_or_opentelemetrys_own_variables(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, environ: Mapping[str, str], expected: str | None
) -> None:
    """The setting comes first; only OTLP over HTTP is spoken."""
    opened: list[tuple[str, str]] = []

    def sink(endpoint: str, service: str, instance: str, **settings: object) -> Kept:
        opened.append((endpoint, service))
        return Kept()

    monkeypatch.setattr("prfaas_net.tracing.otlp.OtlpSink", sink)
    tracer = open_tracer(TracingSection(endpoint=endpoint), "ours", "i", environ)
    assert (tracer is None) == (expected is None)
    assert [url for url, _ in opened] == ([] if expected is None else [expected])
    if expected is not None:
        open_tracer(TracingSection(endpoint="http://c"), "ours", "i", {"OTEL_SERVICE_NAME": "theirs"})
        assert [name for _, name in opened] == ["ours", "theirs"]


def test_without_opentelemetry_a_setting_is_an_error_and_a_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable may be there for other programs of the host."""
    monkeypatch.setitem(sys.modules, "prfaas_net.tracing.otlp", None)
    with pytest.raises(ConfigError, match=r"pip install 'prfaas-net\[otel\]'"):
        open_tracer(TracingSection(endpoint="http://c:4318"), "ours", "i", {})
    assert open_tracer(TracingSection(), "ours", "i", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:1"}) is None


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    """OpenTelemetry costs half a second and 20 MB."""
    code = (
        "import sys, prfaas_net.cli.main as m; from prfaas_net.tracing.tracer import *;"
        "assert open_tracer(TracingSection(), 'a', 'b', {}) is None;"
        "assert not [n for n in sys.modules if n.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def sink_for(url: str, queue_spans: int = 64) -> OtlpSink:
    return OtlpSink(f"{url}/v1/traces", "service", "instance", queue_spans=queue_spans, timeout_s=1.0)


def span(number: int) -> SpanRecord:
    at_ns = time.time_ns()
    return SpanRecord(f"s{number}", TraceContext.begin(sampled=True), None, at_ns, at_ns + 1)


async def test_spans_reach_the_collector_and_the_last_ones_at_the_end() -> None:
    """With the service, and the times to the nanosecond."""
    async with collecting() as collector:
        sink = sink_for(collector.url)
        sent = span(0)
        sink.take(sent)
        await sink.close()
        await until(lambda: collector.spans)
        (got,) = collector.spans
        assert (got.service, got.instance, got.name) == ("service", "instance", "s0")
        assert (got.start_ns, got.end_ns) == (sent.start_ns, sent.end_ns)


async def test_a_collector_that_does_not_answer_costs_spans_and_nothing_else() -> None:
    """Taking is never more than a place in a queue of bounded length; closing is bounded."""
    async with collecting() as collector:
        collector.go_on.clear()
        sink = sink_for(collector.url, queue_spans=64)
        for number in range(1000):
            sink.take(span(number))
        async with asyncio.timeout(10):
            await sink.close()
        collector.go_on.set()
    assert len(collector.spans) <= 3 * 64


async def test_a_collector_that_is_not_there_costs_nothing() -> None:
    """Nothing listens on the port."""
    sink = sink_for("http://127.0.0.1:9")
    sink.take(span(0))
    async with asyncio.timeout(10):
        await sink.close()
