"""Every state and every legal transition of the protocol, as literal tables.

Two rules. All transitions stand in this file and nowhere else. A table does not know who uses it: it maps a state
and an event to the next state, and anything it does not list is an error that names both.

The four machines:

* ``DIALER`` and ``ACCEPTOR``: the handshake of one connection (see :mod:`prfaas_net.wire.handshake`).
* ``SENDER``: a transfer as its sender sees it. Chunks are queued from the first moment, but none leaves before
  the receiver has said that the ticket is good (``OPENED``). A lost link takes it back to ``opening``: the same
  ticket is presented on the next one. If the last word of a session was lost, the answer may be that the transfer
  was complete already (``recall``: DONE to an OPEN that is not the ticket's first).
* ``RECEIVER``: a transfer as its receiver sees it, from the reservation on. It can be *complete* only when every
  chunk has landed **and** the seal has come, in either order.

``docs/protocol.md`` shows them as diagrams made from these tables (``tools/state_diagrams.py``).
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Generic, TypeVar

from prfaas_net.errors import ProtocolError

__all__ = [
    "ACCEPTOR",
    "DIALER",
    "RECEIVER",
    "SENDER",
    "TABLES",
    "Hand",
    "HandEvent",
    "Machine",
    "Tx",
    "TxEvent",
]
__all__ += ["Rx", "RxEvent", "Table"]


class Hand(StrEnum):
    """States of a handshake."""

    START = "start"
    HELLO_SENT = "hello-sent"
    CONFIRM_SENT = "confirm-sent"
    AWAIT_HELLO = "await-hello"
    AWAIT_CONFIRM = "await-confirm"
    ESTABLISHED = "established"
    FAILED = "failed"


class HandEvent(StrEnum):
    """What moves a handshake."""

    BEGIN = "begin"
    HELLO = "hello"
    WELCOME = "welcome"
    CONFIRM = "confirm"
    READY = "ready"
    FAIL = "fail"


class Tx(StrEnum):
    """States of a transfer at its sender."""

    OPENING = "opening"
    STREAMING = "streaming"
    SEALED = "sealed"
    DONE = "done"
    FAILED = "failed"


class TxEvent(StrEnum):
    """What moves a sender."""

    OPENED = "opened"
    READY = "ready"
    ACK = "ack"
    NACK = "nack"
    SEAL = "seal"
    DONE = "done"
    RECALL = "recall"
    LOSE_LINK = "lose-link"
    FAIL = "fail"


class Rx(StrEnum):
    """States of a transfer at its receiver."""

    RESERVED = "reserved"
    STREAMING = "streaming"
    SEALED = "sealed"
    COMPLETE = "complete"
    FAILED = "failed"


class RxEvent(StrEnum):
    """What moves a receiver."""

    OPEN = "open"
    LAND = "land"
    SEAL = "seal"
    FINISH = "finish"
    LOSE_LINK = "lose-link"
    FAIL = "fail"


_State = TypeVar("_State", bound=Enum)
_Event = TypeVar("_Event", bound=Enum)
Table = dict[_State, dict[_Event, _State]]

DIALER: Table[Hand, HandEvent] = {
    Hand.START: {HandEvent.BEGIN: Hand.HELLO_SENT, HandEvent.FAIL: Hand.FAILED},
    Hand.HELLO_SENT: {HandEvent.WELCOME: Hand.CONFIRM_SENT, HandEvent.FAIL: Hand.FAILED},
    Hand.CONFIRM_SENT: {HandEvent.READY: Hand.ESTABLISHED, HandEvent.FAIL: Hand.FAILED},
    Hand.ESTABLISHED: {},
    Hand.FAILED: {HandEvent.FAIL: Hand.FAILED},
}

ACCEPTOR: Table[Hand, HandEvent] = {
    Hand.AWAIT_HELLO: {HandEvent.HELLO: Hand.AWAIT_CONFIRM, HandEvent.FAIL: Hand.FAILED},
    Hand.AWAIT_CONFIRM: {HandEvent.CONFIRM: Hand.ESTABLISHED, HandEvent.FAIL: Hand.FAILED},
    Hand.ESTABLISHED: {},
    Hand.FAILED: {HandEvent.FAIL: Hand.FAILED},
}

SENDER: Table[Tx, TxEvent] = {
    Tx.OPENING: {
        TxEvent.READY: Tx.OPENING,
        TxEvent.OPENED: Tx.STREAMING,
        TxEvent.RECALL: Tx.DONE,
        TxEvent.LOSE_LINK: Tx.OPENING,
        TxEvent.FAIL: Tx.FAILED,
    },
    Tx.STREAMING: {
        TxEvent.READY: Tx.STREAMING,
        TxEvent.ACK: Tx.STREAMING,
        TxEvent.NACK: Tx.STREAMING,
        TxEvent.SEAL: Tx.SEALED,
        TxEvent.LOSE_LINK: Tx.OPENING,
        TxEvent.FAIL: Tx.FAILED,
    },
    Tx.SEALED: {
        TxEvent.ACK: Tx.SEALED,
        TxEvent.NACK: Tx.SEALED,
        TxEvent.DONE: Tx.DONE,
        TxEvent.LOSE_LINK: Tx.OPENING,
        TxEvent.FAIL: Tx.FAILED,
    },
    Tx.DONE: {},
    Tx.FAILED: {},
}

RECEIVER: Table[Rx, RxEvent] = {
    Rx.RESERVED: {RxEvent.OPEN: Rx.STREAMING, RxEvent.FAIL: Rx.FAILED},
    Rx.STREAMING: {
        RxEvent.LAND: Rx.STREAMING,
        RxEvent.SEAL: Rx.SEALED,
        RxEvent.LOSE_LINK: Rx.RESERVED,
        RxEvent.FAIL: Rx.FAILED,
    },
    Rx.SEALED: {
        RxEvent.LAND: Rx.SEALED,
        RxEvent.FINISH: Rx.COMPLETE,
        RxEvent.LOSE_LINK: Rx.RESERVED,
        RxEvent.FAIL: Rx.FAILED,
    },
    Rx.COMPLETE: {},
    Rx.FAILED: {},
}

TABLES = {"dialer": DIALER, "acceptor": ACCEPTOR, "sender": SENDER, "receiver": RECEIVER}


class Machine(Generic[_State, _Event]):
    """A state that moves along a table."""

    __slots__ = ("name", "state", "table")

    def __init__(self, name: str, table: Table[_State, _Event], state: _State) -> None:
        self.name = name
        self.table = table
        self.state = state

    def advance(self, event: _Event) -> _State:
        """Move.

        Raises:
            ProtocolError: the table has no such transition.
        """
        try:
            self.state = self.table[self.state][event]
        except KeyError:
            allowed = ", ".join(e.value for e in self.table[self.state]) or "nothing"
            raise ProtocolError(
                f"{event.value} is not possible for a {self.name} that is {self.state.value}",
                expected=allowed,
            ) from None
        return self.state

    @property
    def ended(self) -> bool:
        """No transition leads out of this state."""
        return not self.table[self.state]
