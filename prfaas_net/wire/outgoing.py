"""A transfer as its sender sees it: what is ready, what is under way, what has landed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prfaas_net.errors import PrfaasError, UsageError
from prfaas_net.kv.chunks import ChunkTable, transfer_digest
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.states import SENDER, Machine, Tx, TxEvent
from prfaas_net.wire.tickets import Ticket

__all__ = ["OutgoingTransfer", "SenderStats"]


@dataclass
class SenderStats:
    """What a transfer cost, in seconds of the link's clock and in chunks.

    Attributes:
        lanes: data connections that carried at least one chunk.
        resent_chunks: chunks that had to go more than once.
    """

    opened_s: float
    first_sent_s: float | None = None
    sealed_s: float | None = None
    done_s: float | None = None
    acked_bytes: int = 0
    resent_chunks: int = 0
    lanes: set[int] = field(default_factory=set)


class OutgoingTransfer:
    """State only; :class:`~prfaas_net.wire.sending.SendingSession` moves it.

    Attributes:
        codec: how connections may encode its chunks where that pays; 0 sends them as they are.
        handle: number of the transfer within its session.
        deadline: on the session's clock; the transfer fails when it passes.
        error: why it failed, once it has.
    """

    def __init__(self, handle: int, ticket: Ticket, table: ChunkTable, *, deadline: float, now: float) -> None:
        if ticket.table != table.fingerprint:
            raise UsageError(
                "the ticket is for another chunk table", expected=ticket.table, found=table.fingerprint,
                transfer=ticket.transfer_id,
            )  # fmt: skip
        self.handle = handle
        self.codec = 0
        self.ticket = ticket
        self.table = table
        self.deadline = deadline
        self.machine = Machine("sender", SENDER, Tx.OPENING)
        self.acked = ChunkBitmap(len(table))
        self.ready = ChunkBitmap(len(table))
        # Chunks handed to a connection and not acknowledged: chunk -> lane.
        self.in_flight: dict[int, int] = {}
        self.sent_before = ChunkBitmap(len(table))
        self.checksums: list[int | None] = [None] * len(table)
        self.n_hashed = 0
        self.seal_body: dict[str, Any] | None = None
        self.progress_at = now
        # Whether the ticket was presented on an earlier session.
        self.reopened = False
        self.stats = SenderStats(opened_s=now)
        self.error: PrfaasError | None = None

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id

    @property
    def state(self) -> Tx:
        return self.machine.state

    def set_checksum(self, chunk: int, checksum: int) -> None:
        """The chunk's xxh3_64 is known; it never changes."""
        if self.checksums[chunk] is None:
            self.n_hashed += 1
        self.checksums[chunk] = checksum

    def lose_link(self) -> None:
        """The session died. What has landed stays landed; the ticket has to be presented again."""
        self.machine.advance(TxEvent.LOSE_LINK)
        self.reopened = True

    def fail(self, error: PrfaasError, *, now: float) -> None:
        """The transfer will not complete."""
        self.machine.advance(TxEvent.FAIL)
        self.error = error
        self.stats.done_s = now

    def digest(self) -> int | None:
        """Digest over all chunks, or None while some checksum is unknown."""
        if self.n_hashed < len(self.table):
            return None
        return transfer_digest(c for c in self.checksums if c is not None)

    def __repr__(self) -> str:
        return (
            f"<OutgoingTransfer {self.transfer_id[:8]} {self.state.value}: {self.ready.count} ready, "
            f"{len(self.in_flight)} in flight, {self.acked.count} of {len(self.table)} landed>"
        )
