"""The sending end of a session: transfers opened by ticket, chunks pulled by connections, acknowledgements in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prfaas_net.errors import (
    AuthError,
    BusyError,
    DeadlineError,
    LinkError,
    PrfaasError,
    ProtocolError,
    UsageError,
    error_from_wire,
)
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.wire.events import Delivered, LaneGivenUp, SendFailed
from prfaas_net.wire.frames import Flags, Frame, FrameType, Header
from prfaas_net.wire.outgoing import OutgoingTransfer
from prfaas_net.wire.send_queue import SendQueue
from prfaas_net.wire.session import Session, Timers
from prfaas_net.wire.states import Tx, TxEvent
from prfaas_net.wire.tickets import Ticket

__all__ = ["SendOrder", "SendingSession"]

# Plain numbers: an enumeration's arithmetic costs more than the rest of a header.
NONE, MORE, FOLLOWS = int(Flags.NONE), int(Flags.MORE), int(Flags.FOLLOWS)
# How soon a ticket that was refused because of its own old session is presented again.
REOPEN_AFTER_S = 0.05


@dataclass(frozen=True, slots=True)
class SendOrder:
    """One chunk for one connection.

    ``checksum`` is None when the chunk has not been hashed yet: the connection hashes it and reports the result
    with :meth:`SendingSession.hashed` before it sends.
    """

    transfer: OutgoingTransfer
    chunk: int
    checksum: int | None
    more: bool

    @property
    def n_bytes(self) -> int:
        """The chunk's size."""
        return self.transfer.table.lengths[self.chunk]

    def header(
        self, checksum: int, *, codec: int = 0, payload_bytes: int | None = None, follows: bool = False
    ) -> bytes:
        """The frame's header.

        Args:
            checksum: of the chunk's bytes, whatever is sent for them.
            payload_bytes: what is sent, if it is encoded.
            follows: another frame is sent right behind, on the same connection.
        """
        table, flags = self.transfer.table, MORE if self.more else NONE
        if follows:
            flags |= FOLLOWS
        n_bytes = table.lengths[self.chunk] if payload_bytes is None else payload_bytes
        return Header(
            FrameType.DATA, flags, self.transfer.handle, n_bytes, table.offsets[self.chunk], self.chunk, checksum,
            codec=codec,
        ).pack()  # fmt: skip


class SendingSession(Session):
    """Sans-IO; see :class:`~prfaas_net.wire.session.Session` for how a shell drives it.

    Args:
        resumable: when the connections die, transfers become ``orphans`` for the next session to :meth:`adopt`
            instead of failing.
    """

    def __init__(self, *, timers: Timers, now: float, resumable: bool = False) -> None:
        super().__init__(timers=timers, now=now)
        self._resumable = resumable
        self.orphans: list[OutgoingTransfer] = []
        self._reopen_at: dict[OutgoingTransfer, float] = {}
        # Chunks under way on each connection, and when it last got one acknowledged.
        self._lane_load: dict[int, int] = {}
        self._lane_progress: dict[int, float] = {}
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._queue = SendQueue()
        self._last_handle = 0

    @property
    def transfers(self) -> tuple[OutgoingTransfer, ...]:
        """Transfers that have not ended."""
        return tuple(self._transfers.values())

    @property
    def waiting(self) -> bool:
        """Whether :meth:`next_chunk` would return a chunk."""
        return self.error is None and self._queue.waiting()

    # -- for the user -------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, table: ChunkTable, *, deadline: float, now: float) -> OutgoingTransfer:
        """Present a ticket. Chunks may be declared ready at once; they leave when the receiver agrees.

        Raises:
            LinkError: the session is over.
            BusyError: the peer is draining.
            UsageError: the ticket is for another chunk table.
        """
        if self.error is not None:
            raise LinkError("the link is down", found=self.error.line(), transfer=ticket.transfer_id)
        if self.draining:
            raise BusyError("the receiver is draining", do="use another decode node", transfer=ticket.transfer_id)
        transfer = OutgoingTransfer(0, ticket, table, deadline=deadline, now=now)
        self._present(transfer)
        return transfer

    def probe(self, table: ChunkTable, *, deadline: float, now: float) -> OutgoingTransfer:
        """A transfer into nowhere: the receiver reads it, counts it and forgets it. For measuring a path.

        Raises:
            LinkError: the session is over.
        """
        if self.error is not None:
            raise LinkError("the link is down", found=self.error.line())
        ticket = Ticket("probe", "", (), table.total_bytes, len(table), table.fingerprint, deadline - now)
        transfer = OutgoingTransfer(0, ticket, table, deadline=deadline, now=now)
        self._enlist(transfer)
        body = {"chunks": len(table), "chunk_bytes": table.lengths[0]}
        self._write_json(FrameType.PROBE, body, transfer=transfer.handle)
        return transfer

    def adopt(self, transfer: OutgoingTransfer) -> None:
        """Go on with an orphan of an earlier session: present its ticket again, send what has not landed."""
        self._present(transfer)
        for chunk in range(len(transfer.table)):
            if chunk in transfer.ready and chunk not in transfer.acked:
                self._queue.push(transfer.handle, chunk)

    def ready(self, transfer: OutgoingTransfer, chunk: int, checksum: int | None) -> None:
        """A chunk's bytes are final. Ignored once the transfer has ended."""
        if transfer.machine.ended:
            return
        if chunk >= len(transfer.table) or not transfer.ready.add(chunk):
            raise UsageError("a chunk is ready once", found=chunk, transfer=transfer.transfer_id)
        if checksum is not None:
            transfer.set_checksum(chunk, checksum)
        if self._holds(transfer) and chunk not in transfer.acked:
            self._queue.push(transfer.handle, chunk)

    def seal(self, transfer: OutgoingTransfer, body: dict[str, Any], *, now: float) -> None:
        """Every chunk is ready, and this goes with them. Ignored once the transfer has ended.

        Raises:
            UsageError: some chunk is not ready, or it was sealed before.
        """
        if transfer.machine.ended:
            return
        if not transfer.ready.full or transfer.seal_body is not None:
            raise UsageError(
                "seal once, when every chunk is ready",
                found=f"{transfer.ready.count} of {len(transfer.table)} ready",
                transfer=transfer.transfer_id,
            )
        transfer.seal_body = body
        transfer.stats.sealed_s = now
        self._try_seal(transfer)

    def abort(self, transfer: OutgoingTransfer, error: PrfaasError, *, now: float) -> None:
        """Give the transfer up and tell the receiver why. Harmless once it has ended."""
        if transfer.machine.ended:
            return
        if self._holds(transfer):
            self._write_json(FrameType.ABORT, error.to_wire(), transfer=transfer.handle)
        self._finish(transfer, error, now=now)

    # -- for the connections ------------------------------------------------------------------------------------

    def next_chunk(self, lane: int, *, now: float) -> SendOrder | None:
        """The next chunk for a free connection, or None if nothing is ready."""
        popped = self._queue.pop() if self.error is None else None
        if popped is None:
            return None
        handle, chunk = popped
        transfer = self._transfers[handle]
        if not transfer.in_flight and transfer.sent_before.count <= transfer.acked.count:
            transfer.progress_at = now
        self._start_flight(transfer, chunk, lane, now=now)
        transfer.stats.lanes.add(lane)
        if transfer.stats.first_sent_s is None:
            transfer.stats.first_sent_s = now
        if not transfer.sent_before.add(chunk):
            transfer.stats.resent_chunks += 1
        return SendOrder(transfer, chunk, transfer.checksums[chunk], self._queue.waiting())

    def hashed(self, order: SendOrder, checksum: int) -> bool:
        """The checksum of a chunk that was not hashed before it was pulled; True if the seal can be written now."""
        if order.transfer.machine.ended:
            return False
        order.transfer.set_checksum(order.chunk, checksum)
        return order.transfer.n_hashed == len(order.transfer.table) and self._try_seal(order.transfer)

    def lane_lost(self, lane: int) -> None:
        """A connection died: whatever it carried and was not acknowledged goes again on the others."""
        for transfer in self._transfers.values():
            for chunk in [c for c, carrier in transfer.in_flight.items() if carrier == lane]:
                self._end_flight(transfer, chunk)
                self._queue.push(transfer.handle, chunk, front=True)

    # -- frames from the receiver -------------------------------------------------------------------------------

    def _receive_transfer_frame(self, frame: Frame, *, now: float) -> None:
        transfer = self._transfers.get(frame.header.transfer)
        if transfer is None:
            if 0 < frame.header.transfer <= self._last_handle:
                return  # it has ended on this side; the receiver will learn
            raise self._unexpected(frame)
        match frame.type:
            case FrameType.OPENED:
                transfer.machine.advance(TxEvent.OPENED)
                transfer.progress_at = now
                self._acknowledge(transfer, frame, now=now)
                self._queue.release(transfer.handle)
                self._try_seal(transfer)
            case FrameType.ACK:
                transfer.machine.advance(TxEvent.ACK)
                self._acknowledge(transfer, frame, now=now)
            case FrameType.NACK:
                transfer.machine.advance(TxEvent.NACK)
                self._send_again(transfer, frame.header.chunk)
            case FrameType.DONE:
                self._done(transfer, frame, now=now)
            case FrameType.ABORT:
                self._refused(transfer, error_from_wire(frame.json()), now=now)
            case _:
                raise self._unexpected(frame)

    def _acknowledge(self, transfer: OutgoingTransfer, frame: Frame, *, now: float) -> None:
        for chunk in transfer.acked.merge(frame.header.chunk, frame.payload):
            lane = self._end_flight(transfer, chunk)
            if lane in self._lane_load:
                self._lane_progress[lane] = now
            self._queue.discard(transfer.handle, chunk)
            transfer.stats.acked_bytes += transfer.table.lengths[chunk]
            transfer.progress_at = now

    def _send_again(self, transfer: OutgoingTransfer, chunk: int) -> None:
        if chunk >= len(transfer.table) or chunk not in transfer.ready:
            raise ProtocolError("the receiver asks for a chunk that was never sent", found=chunk)
        if chunk not in transfer.acked:
            self._end_flight(transfer, chunk)
            self._queue.push(transfer.handle, chunk, front=True)

    def _done(self, transfer: OutgoingTransfer, frame: Frame, *, now: float) -> None:
        for _ in transfer.acked.merge(frame.header.chunk, frame.payload):
            pass
        if not transfer.acked.full:
            raise self._unexpected(frame)
        recalled = transfer.state is Tx.OPENING
        if recalled and not transfer.reopened:
            # Not by this sender, at least not by this process of it: what it holds may be something else.
            used = AuthError("the ticket was used before, and its transfer is complete", transfer=transfer.transfer_id)
            self._finish(transfer, used, now=now)
            return
        transfer.machine.advance(TxEvent.RECALL if recalled else TxEvent.DONE)
        transfer.stats.acked_bytes = transfer.table.total_bytes
        transfer.stats.done_s = now
        self._forget(transfer)
        self._events.append(Delivered(transfer))

    # -- inside -------------------------------------------------------------------------------------------------

    def _holds(self, transfer: OutgoingTransfer) -> bool:
        return self._transfers.get(transfer.handle) is transfer

    def _enlist(self, transfer: OutgoingTransfer) -> None:
        self._last_handle += 1
        transfer.handle = self._last_handle
        self._transfers[transfer.handle] = transfer
        self._queue.add_transfer(transfer.handle, transfer.table.lengths, deadline=transfer.deadline)

    def _present(self, transfer: OutgoingTransfer) -> None:
        self._enlist(transfer)
        self._write_json(FrameType.OPEN, {"ticket": transfer.ticket.to_json()}, transfer=transfer.handle)

    def _refused(self, transfer: OutgoingTransfer, error: PrfaasError, *, now: float) -> None:
        """ABORT. A ticket that is presented again may be refused for a moment: the old session's connections have to
        be off the memory first."""
        if transfer.state is Tx.OPENING and transfer.reopened and isinstance(error, BusyError):
            self._forget(transfer)
            self._reopen_at[transfer] = now + REOPEN_AFTER_S
        else:
            self._finish(transfer, error, now=now)

    def _try_seal(self, transfer: OutgoingTransfer) -> bool:
        """The seal carries the digest, so it waits for the last checksum; and for the receiver's consent."""
        digest = transfer.digest()
        if (
            transfer.state is Tx.STREAMING
            and transfer.seal_body is not None
            and digest is not None
            and self._holds(transfer)
        ):
            transfer.machine.advance(TxEvent.SEAL)
            body = {"digest": f"{digest:016x}", "bytes": transfer.table.total_bytes, "body": transfer.seal_body}
            self._write_json(FrameType.SEAL, body, transfer=transfer.handle)
            return True
        return False

    def _forget(self, transfer: OutgoingTransfer) -> None:
        if self._holds(transfer):
            del self._transfers[transfer.handle]
            self._queue.drop(transfer.handle)
        self._reopen_at.pop(transfer, None)
        for chunk in tuple(transfer.in_flight):
            self._end_flight(transfer, chunk)

    def _finish(self, transfer: OutgoingTransfer, error: PrfaasError, *, now: float) -> None:
        transfer.fail(error, now=now)
        self._forget(transfer)
        self._events.append(SendFailed(transfer, error))

    def _overdue_at(self, transfer: OutgoingTransfer) -> float:
        # Chunks that went and were given up wait in the queue; the receiver has said nothing of them either.
        if transfer.in_flight or transfer.sent_before.count > transfer.acked.count:
            return min(transfer.deadline, transfer.progress_at + self.timers.stall_after_s)
        return transfer.deadline

    def _before_output(self) -> None:
        """Nothing is held back: opens, seals and aborts are urgent."""

    def _start_flight(self, transfer: OutgoingTransfer, chunk: int, lane: int, *, now: float) -> None:
        transfer.in_flight[chunk] = lane
        load = self._lane_load[lane] = self._lane_load.get(lane, 0) + 1
        if load == 1:
            self._lane_progress[lane] = now

    def _end_flight(self, transfer: OutgoingTransfer, chunk: int) -> int | None:
        """The chunk is no longer under way; returns the connection that carried it."""
        lane = transfer.in_flight.pop(chunk, None)
        if lane is not None:
            self._lane_load[lane] -= 1
            if not self._lane_load[lane]:
                del self._lane_load[lane], self._lane_progress[lane]
        return lane

    def _transfer_deadline(self) -> float | None:
        stalls = (self._lane_progress[lane] + self.timers.lane_stall_s for lane in self._lane_load)
        return min([*map(self._overdue_at, self._transfers.values()), *self._reopen_at.values(), *stalls], default=None)

    def _give_up_stalled_lanes(self, *, now: float) -> None:
        for lane in tuple(self._lane_load):
            if now >= self._lane_progress[lane] + self.timers.lane_stall_s:
                self.lane_lost(lane)
                self._events.append(LaneGivenUp(lane))

    def _end_overdue(self, *, now: float) -> None:
        for transfer, at in tuple(self._reopen_at.items()):
            if now >= at:
                del self._reopen_at[transfer]
                self.adopt(transfer)
        self._give_up_stalled_lanes(now=now)
        for transfer in self.transfers:
            if now >= transfer.deadline:
                error: PrfaasError = DeadlineError("the transfer's time is up", transfer=transfer.transfer_id)
            elif now >= self._overdue_at(transfer):
                error = LinkError(
                    f"no chunk was acknowledged for {self.timers.stall_after_s:g} s",
                    found=repr(transfer),
                    transfer=transfer.transfer_id,
                )
            else:
                continue
            self.abort(transfer, error, now=now)

    def _lose_transfers(self, error: PrfaasError, *, now: float, final: bool) -> None:
        for transfer in (*self.transfers, *self._reopen_at):
            if final or not self._resumable:
                self._finish(transfer, error, now=now)
            else:
                self._forget(transfer)
                transfer.lose_link()
                self.orphans.append(transfer)
