"""Which trace something belongs to, as W3C Trace Context writes it (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

__all__ = ["HEADER", "TraceContext"]

HEADER = "traceparent"
# version 00; a later version may append fields that we do not know.
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of one trace.

    Attributes:
        trace_id: 128 bits; ``span_id``: 64 bits; neither is 0.
        sampled: whether it is recorded at all; decided where the trace begins.
    """

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def begin(cls, *, sampled: bool) -> TraceContext:
        """The first span of a trace of its own."""
        return cls(_identifier(128), _identifier(64), sampled)

    @classmethod
    def parse(cls, header: str | None) -> TraceContext | None:
        """The caller's span; None if there is none, or what there is cannot be read."""
        match = _FORM.fullmatch(header.strip()) if header is not None else None
        if match is None or (match[4] is not None and header is not None and header.startswith("00")):
            return None
        trace_id, span_id = int(match[1], 16), int(match[2], 16)
        return cls(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED)) if trace_id and span_id else None

    def child(self) -> TraceContext:
        """Another span of the same trace."""
        return replace(self, span_id=_identifier(64))

    @property
    def header(self) -> str:
        """As the value of a ``traceparent`` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"


def _identifier(bits: int) -> int:
    return random.getrandbits(bits) or 1
