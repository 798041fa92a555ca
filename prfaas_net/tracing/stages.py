"""The stages of a call on a node, as spans.

with call_span(tracer, "prefill_node", header):        # what the control port does for every call
    with stage("queue"):                               # what the node does; nothing, where there is no tracer
        ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from prfaas_net.errors import PrfaasError
from prfaas_net.tracing.context import TraceContext
from prfaas_net.tracing.tracer import Attribute, SpanRecord, Tracer

__all__ = ["call_span", "stage", "trace_names"]

_current: ContextVar[tuple[Tracer, TraceContext] | None] = ContextVar("current_span", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


def stage(name: str, **attributes: Attribute) -> AbstractContextManager[None]:
    """This block is a stage of the call that is traced here, if one is."""
    current = _current.get()
    if current is None or not current[1].sampled:
        return _NOTHING
    tracer, parent = current
    return _span(tracer, name, parent.child(), parent, attributes, server=False)


@contextmanager
def call_span(tracer: Tracer, name: str, header: str | None, **attributes: Attribute) -> Iterator[None]:
    """This block answers a call that came with this ``traceparent``.

    A call without one is not traced: what begins a trace is a request, at the gateway.
    """
    parent = TraceContext.parse(header)
    if parent is None or not parent.sampled:
        yield
        return
    with _span(tracer, name, parent.child(), parent, attributes, server=True):
        yield


def trace_names() -> dict[str, str]:
    """For log lines: which trace this belongs to, if one is made of it."""
    current = _current.get()
    return {} if current is None else {"trace_id": f"{current[1].trace_id:032x}"}


@contextmanager
def _span(
    tracer: Tracer,
    name: str,
    context: TraceContext,
    parent: TraceContext,
    attributes: dict[str, Attribute],
    *,
    server: bool,
) -> Iterator[None]:
    token = _current.set((tracer, context))
    start_ns, error = time.time_ns(), None
    try:
        yield
    except BaseException as failure:
        error = failure.line() if isinstance(failure, PrfaasError) else type(failure).__name__
        raise
    finally:
        _current.reset(token)
        tracer.record(SpanRecord(name, context, parent, start_ns, time.time_ns(), attributes, error, server))
