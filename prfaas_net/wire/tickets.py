"""Tickets: the right to send one transfer to a receiver that has reserved the memory for it.

A receiver signs its tickets with a key that it never shares (new at every start), so only it can check them, a
forged or altered ticket is worth nothing, and one that was issued before a restart is recognised as stale.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

from prfaas_net.errors import AuthError, ProtocolError

__all__ = ["Ticket", "TicketSigner"]


@dataclass(frozen=True)
class Ticket:
    """What a receiver promises to take.

    Attributes:
        transfer_id: 128 random bits, hex; unlike the request id it is unique for ever.
        boot_id: of the receiver; a restarted receiver has another.
        endpoints: where to dial, in order of preference.
        table: fingerprint of the chunk table.
        manifest: for the receiver's user; the wire does not look into it.
        lifetime_s: counted by the receiver from the moment of issue.
        signature: hex HMAC-SHA256 over all the rest.
    """

    transfer_id: str
    boot_id: str
    endpoints: tuple[tuple[str, int], ...]
    total_bytes: int
    n_chunks: int
    table: str
    lifetime_s: float
    manifest: dict[str, Any] = field(default_factory=dict)
    signature: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: object) -> Ticket:
        """Rebuild a ticket, checking its form (only its issuer can check its signature).

        Raises:
            ProtocolError: a field is missing or has the wrong type.
        """
        if not isinstance(body, dict):
            raise ProtocolError("a ticket is an object", found=type(body).__name__)
        kinds = {
            "transfer_id": str, "boot_id": str, "endpoints": (list, tuple), "total_bytes": int, "n_chunks": int,
            "table": str, "lifetime_s": (int, float), "manifest": dict, "signature": str,
        }  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(body.get(name), kind):  # type: ignore[arg-type]
                raise ProtocolError(f"bad ticket: {name}", expected=kind, found=repr(body.get(name))[:80])
        try:
            endpoints = tuple((str(host), int(port)) for host, port in body["endpoints"])
            if not all(0 <= port <= 0xFFFF for _, port in endpoints):
                raise ValueError("a port is out of range")
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError("bad ticket: endpoints", expected="[[host, port], ...]") from error
        return cls(**{**{name: body[name] for name in kinds}, "endpoints": endpoints})


class TicketSigner:
    """Issues and checks tickets.

    Args:
        key: at least 32 random bytes, known to this process alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _signature(self, ticket: Ticket) -> str:
        body = ticket.to_json()
        del body["signature"]
        return hmac.new(self._key, orjson.dumps(body, option=orjson.OPT_SORT_KEYS), hashlib.sha256).hexdigest()

    def sign(self, ticket: Ticket) -> Ticket:
        """The same ticket, signed."""
        return replace(ticket, signature=self._signature(ticket))

    def check(self, ticket: Ticket) -> None:
        """
        Raises:
            AuthError: this process did not issue it, or it was altered.
        """
        if not hmac.compare_digest(self._signature(ticket), ticket.signature):
            raise AuthError(
                "the ticket is not one of ours",
                do="ask the receiver for a new one; tickets die with the process that issued them",
                transfer=ticket.transfer_id,
            )
