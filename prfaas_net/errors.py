"""Every failure that prfaas-net reports, as one tree.

    PrfaasError
    ├── LocalError              this side was used or configured wrongly
    │   ├── ConfigError         a file, flag or environment variable
    │   ├── UsageError          a call out of order, an argument out of range
    │   └── InvalidRequest      a request that no node could serve
    ├── RemoteError             the other side, or the path to it, is at fault
    │   ├── ProtocolError       it broke the KV stream protocol
    │   ├── IncompatibleError   versions, layouts or models do not match
    │   ├── AuthError           it could not prove who it is
    │   ├── CorruptionError     bytes arrived that were not the bytes sent
    │   ├── LinkError           it cannot be reached, or the connections died
    │   └── PeerError           it failed and said so
    ├── ResourceError           refused for want of room, time or patience
    │   ├── BusyError           no room now; trying again later can help
    │   ├── RefusedError        it will never fit here
    │   ├── DeadlineError       the time given ran out
    │   └── CancelledByPeer     the other side no longer wants it
    └── InternalError           our bug; all bets are off

Each error says what was *expected*, what was *found* and what to *do*, names the things it concerns
(request, transfer, chunk) and has a stable wire code, so that the same failure reads the same on both
sides of a link, in a log and in an HTTP body.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AuthError",
    "BusyError",
    "CancelledByPeer",
    "ConfigError",
    "CorruptionError",
    "DeadlineError",
    "IncompatibleError",
    "InternalError",
    "InvalidRequest",
    "LinkError",
    "LocalError",
    "PeerError",
    "PrfaasError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "ResourceError",
    "UsageError",
    "error_from_wire",
]


# Characters of each text of an error on the wire: what was found may be as large as its sender liked.
MAX_TEXT = 500


class PrfaasError(Exception):
    """Root of all errors; never raised itself.

    Attributes:
        code: stable number on the wire (``docs/protocol.md``).
        http_status: the status a gateway answers with.
        retryable: whether the same request may succeed elsewhere or later.
        ids: what the failure concerns, for example ``{"request": ..., "transfer": ..., "chunk": 7}``.
    """

    code: ClassVar[int] = 0
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        do: str | None = None,
        **ids: object,
    ) -> None:
        if type(self).code == 0:
            raise TypeError(f"{type(self).__name__} is a branch of the error tree; raise one of its leaves")
        self.message = message
        self.expected = expected
        self.found = found
        self.do = do
        self.ids = {name: value for name, value in ids.items() if value is not None}
        super().__init__(self.line())

    def line(self) -> str:
        """The whole error on one line: what, expected, found, what to do, and the ids."""
        parts = [self.message]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.do:
            parts.append(self.do)
        text = "; ".join(parts)
        if self.ids:
            text += " (" + ", ".join(f"{name} {value}" for name, value in self.ids.items()) + ")"
        return " ".join(text.split())

    def to_wire(self) -> dict[str, Any]:
        """A JSON-ready body of bounded size; :func:`error_from_wire` is its inverse."""
        return {
            "code": self.code,
            "error": type(self).__name__,
            "message": self.message[:MAX_TEXT],
            "expected": None if self.expected is None else str(self.expected)[:MAX_TEXT],
            "found": None if self.found is None else str(self.found)[:MAX_TEXT],
            "do": None if self.do is None else self.do[:MAX_TEXT],
            "ids": {name: str(value)[:MAX_TEXT] for name, value in self.ids.items()},
        }


class LocalError(PrfaasError):
    """This side was used or configured wrongly."""


class ConfigError(LocalError):
    """A configuration file, flag or environment variable cannot be used."""

    code = 10


class UsageError(LocalError):
    """A call out of order or an argument out of range."""

    code = 11


class InvalidRequest(LocalError):
    """A request that no node could serve, however much room it had."""

    code = 12
    http_status = 400


class RemoteError(PrfaasError):
    """The other side, or the path to it, is at fault."""

    http_status = 502
    retryable = True


class ProtocolError(RemoteError):
    """The peer broke the KV stream protocol."""

    code = 20


class IncompatibleError(RemoteError):
    """Versions, layouts or models of the two sides do not match."""

    code = 21
    retryable = False


class AuthError(RemoteError):
    """The peer could not prove who it is, or what it is allowed to do."""

    code = 22
    retryable = False


class CorruptionError(RemoteError):
    """Bytes arrived that are not the bytes that were sent."""

    code = 23


class LinkError(RemoteError):
    """The peer cannot be reached, or the connections to it died."""

    code = 24


class PeerError(RemoteError):
    """The peer failed and said so."""

    code = 25


class ResourceError(PrfaasError):
    """Refused for want of room, time or patience."""

    http_status = 503
    retryable = True


class BusyError(ResourceError):
    """No room now; trying again later can help."""

    code = 30


class RefusedError(ResourceError):
    """It will never fit here."""

    code = 31
    retryable = False


class DeadlineError(ResourceError):
    """The time given ran out."""

    code = 32
    http_status = 504


class CancelledByPeer(ResourceError):
    """The other side no longer wants it."""

    code = 33
    retryable = False


class InternalError(PrfaasError):
    """Our bug; all bets are off."""

    code = 40


_LEAVES: dict[int, type[PrfaasError]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        UsageError,
        InvalidRequest,
        ProtocolError,
        IncompatibleError,
        AuthError,
        CorruptionError,
        LinkError,
        PeerError,
        BusyError,
        RefusedError,
        DeadlineError,
        CancelledByPeer,
        InternalError,
    )
}


def error_from_wire(body: object) -> PrfaasError:
    """Rebuild an error that a peer reported.

    A body that is not one of ours becomes a :class:`PeerError` that carries what could be read of it: a
    failure is never lost because its description was bad.
    """
    if not isinstance(body, dict):
        return PeerError("the peer failed without a readable reason", found=repr(body)[:200])
    cls = _LEAVES.get(body.get("code", 0) if isinstance(body.get("code"), int) else 0, PeerError)

    def text(name: str) -> str | None:
        value = body.get(name)
        return str(value)[:MAX_TEXT] if value is not None else None

    ids = body.get("ids")
    safe_ids = {str(k): str(v)[:200] for k, v in list(ids.items())[:16]} if isinstance(ids, dict) else {}
    for reserved in ("message", "expected", "found", "do", "self"):
        safe_ids.pop(reserved, None)
    return cls(
        text("message") or "the peer failed without a reason",
        expected=text("expected"),
        found=text("found"),
        do=text("do"),
        **safe_ids,
    )
