"""Where spans go, and whether they go anywhere."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field

from prfaas_net.config import Duration, Section
from prfaas_net.errors import ConfigError
from prfaas_net.tracing.context import TraceContext

__all__ = ["Sink", "SpanRecord", "Tracer", "TracingSection", "open_tracer"]

log = logging.getLogger(__name__)

Attribute = str | int | float | bool


class TracingSection(Section):
    """``[tracing]``: OpenTelemetry traces over OTLP/HTTP (the extra ``otel``).

    Attributes:
        endpoint: base URL of a collector, such as ``http://127.0.0.1:4318``. Without it, the environment variables
            ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` and ``OTEL_EXPORTER_OTLP_ENDPOINT`` count.
        sample: share of the requests that are traced, where the client has not decided it.
        queue_spans: that wait for the collector at most; more are dropped.
        timeout: seconds that the collector may take for a batch.
    """

    endpoint: str | None = Field(None, pattern=r"^https?://[^/]+")
    sample: float = Field(1.0, ge=0, le=1)
    queue_spans: int = Field(4096, ge=1, le=1 << 20)
    timeout: Duration = Field(5.0, gt=0, le=60)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One stage that is over.

    Attributes:
        parent: None for the first span of a trace.
        start_ns, end_ns: since the epoch.
        error: why it failed, if it did.
        server: whether it answers a call from another process.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    server: bool = False


class Sink(Protocol):
    """Takes spans without ever blocking or failing."""

    def take(self, span: SpanRecord) -> None: ...

    async def close(self) -> None:
        """Send what waits, within a second or two."""
        ...


class Tracer:
    """Decides what is traced.

    Args:
        sample: share of the requests whose caller has not decided it.
    """

    def __init__(self, sink: Sink, sample: float = 1.0) -> None:
        self.sink = sink
        self._sample = sample

    def enter(self, header: str | None) -> tuple[TraceContext, TraceContext | None]:
        """The span that answers a call with this ``traceparent``, and its parent."""
        parent = TraceContext.parse(header)
        if parent is not None:
            return parent.child(), parent
        return TraceContext.begin(sampled=random.random() < self._sample), None

    def record(self, span: SpanRecord) -> None:
        """A span is over."""
        if span.context.sampled:
            self.sink.take(span)

    async def close(self) -> None:
        """Send what waits, within a second or two."""
        await self.sink.close()


def open_tracer(
    section: TracingSection, service: str, instance: str, environ: Mapping[str, str] = os.environ
) -> Tracer | None:
    """The tracer of this process; None if no endpoint is configured.

    Args:
        service: ``service.name`` of its spans, unless ``OTEL_SERVICE_NAME`` says otherwise; ``instance``:
            ``service.instance.id``.

    Raises:
        ConfigError: an endpoint is configured, and OpenTelemetry is not installed.
    """
    endpoint = section.endpoint and _traces_url(section.endpoint)
    if endpoint is None:
        endpoint = _from_environment(environ)
    if endpoint is None:
        return None
    try:
        from prfaas_net.tracing.otlp import OtlpSink
    except ImportError as error:
        if section.endpoint is None:
            # The variable may be there for others: no reason not to serve.
            log.warning("no traces are exported: %s; pip install 'prfaas-net[otel]'", error)
            return None
        raise ConfigError(
            "tracing.endpoint needs OpenTelemetry", found=str(error), do="pip install 'prfaas-net[otel]'"
        ) from error
    name = environ.get("OTEL_SERVICE_NAME") or service
    sink = OtlpSink(endpoint, name, instance, queue_spans=section.queue_spans, timeout_s=section.timeout)
    return Tracer(sink, section.sample)


def _traces_url(base: str) -> str:
    return base if base.rstrip("/").endswith("/v1/traces") else f"{base.rstrip('/')}/v1/traces"


def _from_environment(environ: Mapping[str, str]) -> str | None:
    """The endpoint as OpenTelemetry's own variables give it; only OTLP over HTTP is spoken."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    whole, base = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if off or not (whole or base):
        return None
    generic = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", generic)
    if protocol != "http/protobuf":
        log.warning("no traces are exported: expected the protocol http/protobuf, found %s", protocol)
        return None
    return whole or _traces_url(base or "")
