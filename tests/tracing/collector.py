"""A small OTLP/HTTP collector: what was exported, as plain data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import until

__all__ = ["Collector", "Span", "collecting"]


@dataclass(frozen=True)
class Span:
    """One span, with its ids in hexadecimal digits; ``parent`` is empty for the first one of a trace."""

    service: str
    instance: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    failed: bool
    server: bool
    attributes: dict[str, object]


@dataclass
class Collector:
    """
    Attributes:
        go_on: cleared, it answers nobody.
    """

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.go_on.wait()
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
                    self.spans.append(
                        Span(
                            names["service.name"], names["service.instance.id"], span.name, span.trace_id.hex(),
                            span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano,
                            span.end_time_unix_nano, span.status.code == 2, span.kind == 2, told,
                        )
                    )  # fmt: skip
        return web.Response()

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    async def holds(self, trace: str, names: set[str], *, within_s: float = 15.0) -> dict[str, Span]:
        """The spans of a trace by name, once all of these are there."""
        await until(lambda: names <= {span.name for span in self.of(trace)}, within_s=within_s)
        return {span.name: span for span in self.of(trace)}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    collector.go_on.set()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        await runner.cleanup()
