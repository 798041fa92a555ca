"""Spans to a collector, by OpenTelemetry's own SDK and OTLP/HTTP exporter. Imported only where they are wanted.

The SDK's batch processor holds spans in a queue of bounded length, which drops the oldest when it is full, and sends
them from a thread of its own; a collector that is slow or gone costs spans, never a request.
"""

from __future__ import annotations

import asyncio
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from prfaas_net import __version__
from prfaas_net.tracing.context import TraceContext
from prfaas_net.tracing.tracer import SpanRecord

__all__ = ["OtlpSink"]

# Spans wait this long for company, and no more than so many go at once.
BATCH_EVERY_S, BATCH_SPANS = 1.0, 512
# What closing waits for the last batch.
CLOSE_WITHIN_S = 2.0


class OtlpSink:
    """See :class:`~prfaas_net.tracing.tracer.Sink`.

    Args:
        endpoint: whole URL, with ``/v1/traces``.
        queue_spans: that wait at most.
        timeout_s: of a batch, with all its repetitions.
    """

    def __init__(self, endpoint: str, service: str, instance: str, *, queue_spans: int, timeout_s: float) -> None:
        self._resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._scope = InstrumentationScope("prfaas-net", __version__)
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s),
            max_queue_size=queue_spans,
            schedule_delay_millis=BATCH_EVERY_S * 1000,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )

    def take(self, span: SpanRecord) -> None:
        """Into the queue."""
        status = Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error)
        parent = span.parent
        remote = parent is not None and span.server
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_otel(span.context, remote=False),
                parent=None if parent is None else _otel(parent, remote=remote),
                resource=self._resource,
                attributes=dict(span.attributes),
                kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
                instrumentation_scope=self._scope,
                status=status,
                start_time=span.start_ns,
                end_time=span.end_ns,
            )
        )

    async def close(self) -> None:
        """Send what waits; a collector that does not answer is not waited for."""
        # Not in the loop's pool, whose threads are waited for at the end of the process.
        sending = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, CLOSE_WITHIN_S)


def _otel(context: TraceContext, *, remote: bool) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, remote, flags)
