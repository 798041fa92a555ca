"""A transfer as its receiver sees it: memory reserved, chunks landing, complete or failed.

The reservation outlives any connection: it exists before the sender dials and, when a link dies, it waits
with all that has landed until its deadline or until the same ticket is presented again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prfaas_net.errors import CorruptionError, DeadlineError, LinkError, PrfaasError, UsageError
from prfaas_net.kv.chunks import ChunkTable, transfer_digest
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.states import RECEIVER, Machine, Rx, RxEvent
from prfaas_net.wire.tickets import Ticket

__all__ = ["IncomingTransfer"]


class IncomingTransfer:
    """State only; :class:`~prfaas_net.wire.receiving.ReceivingSession` moves it.

    Args:
        destinations: where each chunk's bytes go, one writable view a chunk.
        deadline: on the receiver's clock; the transfer fails when it passes.

    Attributes:
        landing: chunks that a connection is writing into memory right now. While it is not empty the memory
            must not be given to anybody else.
        seal: what the sender said when its last chunk was made, once it has.
        error: why the transfer failed, once it has.
    """

    def __init__(
        self, ticket: Ticket, table: ChunkTable, destinations: Sequence[memoryview], *, deadline: float
    ) -> None:
        if [view.nbytes for view in destinations] != list(table.lengths):
            raise UsageError("the destinations do not fit the chunks", expected=repr(table))
        self.ticket = ticket
        self.table = table
        self.destinations = destinations
        self.deadline = deadline
        self.machine = Machine("receiver", RECEIVER, Rx.RESERVED)
        self.landed = ChunkBitmap(len(table))
        self.landing: dict[int, int] = {}
        self.checksums: list[int] = [0] * len(table)
        self.seal: dict[str, Any] | None = None
        self.error: PrfaasError | None = None
        self.landed_bytes = 0
        self.corrupt_chunks = 0
        self.corrupt: dict[int, int] = {}
        self.discarded_chunks = 0
        # The session that presented the ticket; a second one may not present it at the same time.
        self.owner: Any = None
        # Whose connections may still write into the destinations after it has ended.
        self.last_owner: Any = None
        # After a lost link: how long the sender may take to come back, and what happened.
        self.wait_until: float | None = None
        self.link_error: PrfaasError | None = None

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id

    @property
    def state(self) -> Rx:
        return self.machine.state

    def check_digest(self) -> None:
        """
        Raises:
            CorruptionError: what has landed is not what the seal describes.
        """
        assert self.seal is not None
        found = f"{transfer_digest(self.checksums):016x}"
        if self.seal.get("digest") != found:
            raise CorruptionError(
                "the transfer does not match its digest", expected=self.seal.get("digest"), found=found,
                transfer=self.transfer_id,
            )  # fmt: skip

    def lose_link(self, error: PrfaasError, *, wait_until: float) -> None:
        """The session died; what has landed stays, a seal has to be said again."""
        self.owner = None
        self.link_error = error
        self.wait_until = wait_until
        self.seal = None
        self.machine.advance(RxEvent.LOSE_LINK)

    def overdue(self, *, now: float) -> PrfaasError | None:
        """Why nobody should wait for it any longer, if so. For a transfer that no session holds."""
        if now >= self.deadline:
            return DeadlineError("the ticket's time is up", transfer=self.transfer_id)
        if self.wait_until is not None and now >= self.wait_until:
            found = None if self.link_error is None else self.link_error.line()
            return LinkError("the link died and its sender did not come back", found=found, transfer=self.transfer_id)
        return None

    def fail(self, error: PrfaasError) -> None:
        """The transfer will not complete."""
        self.machine.advance(RxEvent.FAIL)
        self.error = error
        self.owner = None

    def __repr__(self) -> str:
        return (
            f"<IncomingTransfer {self.transfer_id[:8]} {self.state.value}: "
            f"{self.landed.count} of {len(self.table)} landed>"
        )
