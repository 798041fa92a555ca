"""Failures in the shape that OpenAI clients know."""

from __future__ import annotations

import math
import re
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.errors import BusyError, InvalidRequest, PrfaasError
from prfaas_net.scheduling import OverloadedError

__all__ = ["ApiError", "error_body", "error_response", "status_of"]

# What a client is asked to wait before it tries again: about one long prefill.
RETRY_AFTER_S = 1

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(InvalidRequest):
    """A request that was refused at the HTTP boundary.

    Attributes:
        status: of the HTTP answer.
        param: the field at fault.
        api_code: a stable word for programs, such as ``context_length_exceeded``.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        api_code: str | None = None,
        expected: object = None,
        found: object = None,
        do: str | None = None,
    ) -> None:
        super().__init__(message, expected=expected, found=found, do=do)
        self.status = status
        self.param = param
        self.api_code = api_code


def status_of(error: PrfaasError) -> int:
    """The HTTP status for a failure."""
    return error.status if isinstance(error, ApiError) else error.http_status


def error_body(error: PrfaasError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    param, code = None, _snake(type(error).__name__)
    if isinstance(error, ApiError):
        param, code = error.param, error.api_code or "invalid_request"
    kind = _TYPES.get(status_of(error), "server_error")
    return {"error": {"message": error.line(), "type": kind, "param": param, "code": code}}


def error_response(error: PrfaasError) -> web.Response:
    """The whole HTTP answer for a failure."""
    status = status_of(error)
    headers = {}
    if status == 429 or isinstance(error, BusyError):
        wait_s = error.retry_after_s if isinstance(error, OverloadedError) else RETRY_AFTER_S
        headers["Retry-After"] = str(math.ceil(wait_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=orjson.dumps(error_body(error)), status=status, headers=headers, content_type="application/json"
    )


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
