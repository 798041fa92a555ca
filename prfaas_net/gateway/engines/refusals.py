"""What an engine's HTTP refusal, or an error in the middle of its stream, means for the request."""

from __future__ import annotations

from typing import Any

import orjson

from prfaas_net.errors import AuthError, BusyError, IncompatibleError, InvalidRequest, PeerError, PrfaasError

__all__ = ["refusal", "told"]

_TEXT = 300
# vLLM and SGLang answer 503 while they start, sleep or shut down; proxies before them 429 and 502 to 504.
BUSY = (408, 425, 429, 502, 503, 504)


def refusal(status: int, body: bytes, node: str) -> PrfaasError:
    """The error for an HTTP status other than 200."""
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError:
        tree = None
    return told(tree if isinstance(tree, dict) else {"message": body[:_TEXT].decode(errors="replace")}, status, node)


def told(body: dict[str, Any], status: int, node: str) -> PrfaasError:
    """The error that an engine's body describes.

    Bodies in use: ``{"error": {"message", "type", "param", "code"}}`` (vLLM, SGLang), the same without the outer
    object (vLLM until 0.10), ``{"error": "text"}``, ``{"detail": ...}`` (FastAPI).
    """
    inner = body.get("error", body)
    message, code = inner, None
    if isinstance(inner, dict):
        message = inner.get("message") or inner.get("detail") or ""
        code = inner.get("code") if isinstance(inner.get("code"), int) else inner.get("status_code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    text = message if isinstance(message, str) else orjson.dumps(message, default=str).decode()
    found = f"status {status} {' '.join(text.split())[:_TEXT]}".strip()
    if status in (400, 413, 422):
        return InvalidRequest("the engine refuses the request", found=found, node=node)
    if status in (401, 403):
        return AuthError("the engine did not accept our key", found=found, do="set api_key of the node", node=node)
    if status in (404, 405):
        return IncompatibleError(
            "the engine does not know the model or the call",
            found=found,
            do="set model and kind of the node",
            node=node,
        )
    if status in BUSY:
        return BusyError("the engine takes no request now", found=found, node=node)
    return PeerError("the engine failed", found=found, node=node)
