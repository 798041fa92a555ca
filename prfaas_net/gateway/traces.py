"""The spans of a request, made from its record when it is over.

request                    the whole answer; child of the client's span, if it sent a traceparent
  tokenize
  attempt                  one for each pair of nodes that was tried; the nodes' own spans are its children
    route                  the router's decision
    reserve                until the decode node has given a ticket
    prefill                until the first token is on its way
    transfer               the KVCache over the link, most of it beside the prefill
    decode                 until the last token
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas_net.errors import PrfaasError
from prfaas_net.gateway.api_errors import status_of
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.logs import about
from prfaas_net.tracing.context import HEADER, TraceContext
from prfaas_net.tracing.tracer import Attribute, SpanRecord, Tracer

__all__ = ["Traces", "begin_attempt", "trace_headers"]

# What is answered by nodes.
TRACED_PATHS = ("/v1/completions", "/v1/chat/completions")
# Stages of an attempt: name, the stage of the record that it begins after, and the one that it ends with.
STAGES = (
    ("route", None, "decided"),
    ("reserve", "decided", "reserved"),
    ("prefill", "reserved", "prefilled"),
    ("transfer", "prefill_started", "landed"),
    ("decode", "landed", "finished"),
)
_NO_HEADERS: Mapping[str, str] = {}


@dataclass
class _AttemptTrace:
    context: TraceContext
    start_s: float
    stages_s: Mapping[str, float]


class _RequestTrace:
    """One choice of one request, while it is served. Times are seconds since its arrival."""

    def __init__(self, context: TraceContext, started_ns: int) -> None:
        self.context = context
        self.started_ns = started_ns
        self.attempts: list[_AttemptTrace] = []

    def now_s(self) -> float:
        return (time.time_ns() - self.started_ns) / 1e9


@dataclass
class _Traced:
    """A request that came in: its choices by the id of their records."""

    context: TraceContext
    started_ns: int
    choices: dict[str, _RequestTrace]

    def choice(self, request_id: str) -> _RequestTrace:
        return self.choices.setdefault(request_id, _RequestTrace(self.context, self.started_ns))


_request: ContextVar[_Traced | None] = ContextVar("traced_request", default=None)
_attempt: ContextVar[TraceContext | None] = ContextVar("traced_attempt", default=None)


def begin_attempt(record: RequestRecord) -> None:
    """Another attempt at a request begins: what nodes are called for from here on belongs to it."""
    traced = _request.get()
    if traced is None:
        return
    trace = traced.choice(record.request_id)
    if trace.attempts:
        trace.attempts[-1].stages_s = dict(record.stages_s)
    context = trace.context.child()
    start_s = trace.now_s() if trace.attempts else record.stages_s.get("tokenized", 0.0)
    trace.attempts.append(_AttemptTrace(context, start_s, {}))
    _attempt.set(context)


def trace_headers() -> Mapping[str, str]:
    """What a call to a node should carry besides; nothing where nothing is traced."""
    context = _attempt.get()
    return _NO_HEADERS if context is None else {HEADER: context.header}


class Traces:
    """Makes spans of the requests of a gateway."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @property
    def middleware(self) -> Middleware:
        """For :class:`aiohttp.web.Application`, inside the one that gives every request its id."""

        @web.middleware
        async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in TRACED_PATHS or request.method != "POST":
                return await handler(request)
            return await self._traced(request, handler)

        return trace

    async def _traced(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        context, parent = self._tracer.enter(request.headers.get(HEADER))
        traced = _Traced(context, time.time_ns(), {})
        tokens = _request.set(traced), _attempt.set(None)
        error: str | None = "the client left"
        attributes: dict[str, Attribute] = {"http.request.method": "POST", "http.route": request.path}
        try:
            with about(**({"trace_id": f"{context.trace_id:032x}"} if context.sampled else {})):
                response = await handler(request)
            attributes["http.response.status_code"] = response.status
            error = None if response.status < 500 else f"status {response.status}"
            return response
        except (PrfaasError, web.HTTPException) as failure:
            # The middleware around this one makes an answer of it.
            status = status_of(failure) if isinstance(failure, PrfaasError) else failure.status
            attributes["http.response.status_code"] = status
            error = None if status < 500 else str(failure)
            raise
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            _request.reset(tokens[0])
            _attempt.reset(tokens[1])
            end_ns = time.time_ns()
            self._tracer.record(
                SpanRecord("request", context, parent, traced.started_ns, end_ns, attributes, error, server=True)
            )

    def served(self, record: RequestRecord) -> None:
        """A request that was decided on is over: tell where its time went."""
        traced = _request.get()
        if traced is None or not traced.context.sampled:
            return
        trace = traced.choice(record.request_id)
        tokenized_s = record.stages_s.get("tokenized")
        if tokenized_s is not None:
            self._record(
                trace, "tokenize", trace.context, 0.0, tokenized_s, {"prfaas.prompt_tokens": record.prompt_tokens}
            )
        end_s = trace.now_s()
        for number, attempt in enumerate(trace.attempts):
            last = number == len(trace.attempts) - 1
            attempt_end_s = end_s if last else trace.attempts[number + 1].start_s
            stages_s = record.stages_s if last else attempt.stages_s
            self._attempt(trace, record, number, attempt, stages_s, attempt_end_s)

    def _attempt(
        self,
        trace: _RequestTrace,
        record: RequestRecord,
        number: int,
        attempt: _AttemptTrace,
        stages_s: Mapping[str, float],
        end_s: float,
    ) -> None:
        last = number == len(trace.attempts) - 1
        error = record.error if last else "another attempt followed"
        attributes = _attributes(record, number) if last else {"prfaas.attempt": number}
        start_ns, end_ns = _ns(trace, attempt.start_s), _ns(trace, end_s)
        self._tracer.record(SpanRecord("attempt", attempt.context, trace.context, start_ns, end_ns, attributes, error))
        for name, after, until in STAGES:
            start_s = attempt.start_s if after is None else stages_s.get(after)
            if start_s is None:
                continue
            stop_s = stages_s.get(until)
            whole_s = end_s if stop_s is None else max(start_s, stop_s)
            self._record(trace, name, attempt.context, start_s, whole_s, {}, error if stop_s is None else None)

    def _record(
        self,
        trace: _RequestTrace,
        name: str,
        parent: TraceContext,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute],
        error: str | None = None,
    ) -> None:
        start_ns, end_ns = _ns(trace, start_s), _ns(trace, end_s)
        self._tracer.record(SpanRecord(name, parent.child(), parent, start_ns, end_ns, attributes, error))


def _ns(trace: _RequestTrace, at_s: float) -> int:
    return trace.started_ns + round(at_s * 1e9)


def _attributes(record: RequestRecord, number: int) -> dict[str, Attribute]:
    """What people look for in a trace; whatever is not known is left out."""
    told: dict[str, Attribute | None] = {
        "prfaas.request_id": record.request_id,
        "prfaas.attempt": number,
        "prfaas.policy": record.policy,
        "prfaas.prefill_cluster": record.prefilled_in,
        "prfaas.prefill_node": record.prefill_node,
        "prfaas.decode_node": record.decode_node,
        "prfaas.cached_tokens": record.cached_tokens,
        "prfaas.incremental_tokens": record.incremental_tokens,
        "prfaas.output_tokens": record.output_tokens,
        "prfaas.ttft_s": record.ttft_s,
        "prfaas.finish_reason": record.finish_reason,
    }
    return {name: value for name, value in told.items() if value is not None}
