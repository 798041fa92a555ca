"""All transfers that a receiver has promised to take and that have not ended, shared by its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prfaas_net.errors import AuthError, BusyError, PrfaasError
from prfaas_net.wire.incoming import IncomingTransfer
from prfaas_net.wire.tickets import Ticket, TicketSigner

__all__ = ["Epitaph", "Owner", "Reservations"]


@dataclass(frozen=True)
class Epitaph:
    """What is remembered of a transfer that has ended.

    Attributes:
        error: why it failed; None if it was completed.
        forget_at: end of its ticket's life, on the receiver's clock.
    """

    error: PrfaasError | None
    n_chunks: int
    forget_at: float


class Owner(Protocol):
    """A session that may hold transfers.

    Attributes:
        peer: the sender's name; only a sender of the same name may take a transfer over.
    """

    peer: str

    def give_up(self, transfer: IncomingTransfer) -> None:
        """Let go of a transfer that its sender has opened on another session."""
        ...


class Reservations:
    """By transfer id; guarded by the same lock as the sessions."""

    def __init__(self, signer: TicketSigner) -> None:
        self.signer = signer
        self._by_id: dict[str, IncomingTransfer] = {}
        # Transfers that have ended, until their tickets' time is up: a sender that lost the last word of a session
        # asks again, and must hear what became of its transfer.
        self._ended: dict[str, Epitaph] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(tuple(self._by_id.values()))

    def add(self, transfer: IncomingTransfer) -> None:
        self._by_id[transfer.transfer_id] = transfer

    def remove(self, transfer: IncomingTransfer) -> None:
        """The transfer has ended."""
        if self._by_id.pop(transfer.transfer_id, None) is not None:
            self._ended[transfer.transfer_id] = Epitaph(transfer.error, len(transfer.table), transfer.deadline)

    def epitaph(self, ticket: Ticket) -> Epitaph | None:
        """What became of a ticket's transfer, if it has ended.

        Raises:
            AuthError: the ticket is not ours.
        """
        self.signer.check(ticket)
        return self._ended.get(ticket.transfer_id)

    def fail(self, transfer: IncomingTransfer, error: PrfaasError) -> bool:
        """End a reservation that no session holds; False if one does, or if it has ended."""
        if transfer.owner is not None or transfer.transfer_id not in self._by_id:
            return False
        transfer.fail(error)
        self.remove(transfer)
        return True

    def expire(self, *, now: float) -> list[IncomingTransfer]:
        """End the reservations whose time passed while no session held them."""
        ended = []
        for transfer_id in [name for name, epitaph in self._ended.items() if now >= epitaph.forget_at]:
            del self._ended[transfer_id]
        for transfer in self:
            error = transfer.overdue(now=now) if transfer.owner is None else None
            if error is not None:
                self.fail(transfer, error)
                ended.append(transfer)
        return ended

    def claim(self, ticket: Ticket, owner: Owner) -> IncomingTransfer:
        """The reservation behind a ticket, from now on ``owner``'s.

        A sender that has lost its link, or has restarted, may be back before this side notices that the old session
        is dead: the ticket then moves to the new session.

        Raises:
            AuthError: the ticket is not ours, or its reservation has ended.
            BusyError: another sender holds it, or the old session's connections still write into its memory.
        """
        self.signer.check(ticket)
        transfer = self._by_id.get(ticket.transfer_id)
        if transfer is None:
            raise AuthError("the ticket's reservation has ended", do="reserve again", transfer=ticket.transfer_id)
        holder: Owner | None = transfer.owner
        if holder is not None:
            if holder.peer != owner.peer:
                raise BusyError(f"the ticket is in use by {holder.peer}", transfer=ticket.transfer_id)
            holder.give_up(transfer)
        if transfer.landing:
            raise BusyError("an old connection still writes into the transfer", transfer=ticket.transfer_id)
        transfer.owner = transfer.last_owner = owner
        transfer.wait_until = None
        return transfer
