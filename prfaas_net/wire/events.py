"""What a session tells its user. Failures carry the error and the transfer; nothing is only logged."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas_net.errors import PrfaasError
from prfaas_net.wire.incoming import IncomingTransfer
from prfaas_net.wire.outgoing import OutgoingTransfer

__all__ = [
    "Completed",
    "Delivered",
    "Event",
    "LaneGivenUp",
    "PeerDraining",
    "ReceiveFailed",
    "SealArrived",
    "SendFailed",
    "SessionLost",
    "TakenOver",
    "TransferOpened",
]


@dataclass(frozen=True)
class TransferOpened:
    """Receiver: the ticket was presented; chunks may come."""

    transfer: IncomingTransfer


@dataclass(frozen=True)
class SealArrived:
    """Receiver: everything has been made; ``transfer.seal`` says what comes with it (the first token)."""

    transfer: IncomingTransfer


@dataclass(frozen=True)
class Completed:
    """Receiver: every chunk has landed, each verified, and the digest agrees."""

    transfer: IncomingTransfer


@dataclass(frozen=True)
class ReceiveFailed:
    """Receiver: the transfer will not complete."""

    transfer: IncomingTransfer
    error: PrfaasError


@dataclass(frozen=True)
class LaneGivenUp:
    """Both: a data connection makes no progress, and its chunks go on others; it must be shut down."""

    lane: int


@dataclass(frozen=True)
class TakenOver:
    """Receiver: the sender has opened the transfer on another session. ``lanes`` of this one still write into its
    memory and must be shut down."""

    transfer: IncomingTransfer
    lanes: frozenset[int]


@dataclass(frozen=True)
class Delivered:
    """Sender: the receiver has confirmed the whole transfer."""

    transfer: OutgoingTransfer


@dataclass(frozen=True)
class SendFailed:
    """Sender: the transfer will not complete."""

    transfer: OutgoingTransfer
    error: PrfaasError


@dataclass(frozen=True)
class PeerDraining:
    """The peer takes no new transfers on this session."""

    reason: str


@dataclass(frozen=True)
class SessionLost:
    """The session is over.

    Attributes:
        final: its transfers have failed. Otherwise the connections died under it, and the transfers may go on with
            another session: the receiver waits for a while, the sender has them as orphans.
    """

    error: PrfaasError
    final: bool


Event = (
    TransferOpened
    | SealArrived
    | Completed
    | ReceiveFailed
    | TakenOver
    | LaneGivenUp
    | Delivered
    | SendFailed
    | PeerDraining
    | SessionLost
)
