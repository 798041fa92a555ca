"""The KV stream protocol, sans-IO: no socket, no clock, no randomness in here.

``frames`` are what is written, ``handshake`` binds connections to a session, ``SendingSession`` and
``ReceivingSession`` are the two ends of one, and ``states`` has every legal transition as tables.
"""

from prfaas_net.wire.events import (
    Completed,
    Delivered,
    Event,
    LaneGivenUp,
    PeerDraining,
    ReceiveFailed,
    SealArrived,
    SendFailed,
    SessionLost,
    TakenOver,
    TransferOpened,
)
from prfaas_net.wire.frames import HEADER_BYTES, Flags, Frame, FrameParser, FrameType, Header
from prfaas_net.wire.handshake import MAX_LANES, Acceptor, Dialer, Hello, PeerIdentity
from prfaas_net.wire.incoming import IncomingTransfer
from prfaas_net.wire.outgoing import OutgoingTransfer, SenderStats
from prfaas_net.wire.receiving import Landing, ReceivingSession
from prfaas_net.wire.reservations import Reservations
from prfaas_net.wire.sending import SendingSession, SendOrder
from prfaas_net.wire.session import Session, Timers
from prfaas_net.wire.tickets import Ticket, TicketSigner

__all__ = [
    "HEADER_BYTES",
    "MAX_LANES",
    "Acceptor",
    "Completed",
    "Delivered",
    "Dialer",
    "Event",
    "Flags",
    "Frame",
    "FrameParser",
    "FrameType",
    "Header",
    "Hello",
    "IncomingTransfer",
    "Landing",
    "LaneGivenUp",
    "OutgoingTransfer",
    "PeerDraining",
    "PeerIdentity",
    "ReceiveFailed",
    "ReceivingSession",
    "Reservations",
    "SealArrived",
    "SendFailed",
    "SendOrder",
    "SenderStats",
    "SendingSession",
    "Session",
    "SessionLost",
    "TakenOver",
    "Ticket",
    "TicketSigner",
    "Timers",
    "TransferOpened",
]
