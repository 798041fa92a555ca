"""Admission: whoever cannot be served in time is told so at once, and when to come back."""

from __future__ import annotations

from typing import ClassVar

from prfaas_net.errors import BusyError

__all__ = ["OverloadedError", "overloaded"]

# Bounds of what a client is asked to wait: less than a second is a busy loop, more than a minute is a guess.
RETRY_AFTER_RANGE_S = (1.0, 60.0)


class OverloadedError(BusyError):
    """No candidate can meet the request's limit; HTTP 429.

    Attributes:
        retry_after_s: when the backlog that stands in the way will be gone, as predicted now.
    """

    http_status: ClassVar[int] = 429
    retry_after_s: float = RETRY_AFTER_RANGE_S[0]


def overloaded(request_id: str, *, limit_s: float, soonest_s: float) -> OverloadedError:
    """The refusal of a request whose first token would come ``soonest_s`` from now at best."""
    error = OverloadedError(
        "no candidate can meet the time that was asked for",
        expected=f"a first token within {limit_s:.1f} s",
        found=f"{soonest_s:.1f} s at best",
        do="try again later",
        request=request_id,
    )
    low, high = RETRY_AFTER_RANGE_S
    error.retry_after_s = min(high, max(low, soonest_s - limit_s))
    return error
