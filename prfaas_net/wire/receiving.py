"""The receiving end of a session: where each chunk may land, and what its sender is told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prfaas_net.errors import (
    AuthError,
    BusyError,
    CorruptionError,
    DeadlineError,
    LinkError,
    PrfaasError,
    ProtocolError,
    RefusedError,
    error_from_wire,
)
from prfaas_net.kv.chunks import MAX_CHUNK_BYTES, MAX_CHUNKS, ChunkTable
from prfaas_net.kv.codecs import Codec
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.events import Completed, LaneGivenUp, ReceiveFailed, SealArrived, TakenOver, TransferOpened
from prfaas_net.wire.frames import Frame, FrameType, Header
from prfaas_net.wire.incoming import IncomingTransfer
from prfaas_net.wire.reservations import Epitaph, Reservations
from prfaas_net.wire.session import Session, Timers
from prfaas_net.wire.states import Rx, RxEvent
from prfaas_net.wire.tickets import Ticket

__all__ = ["Landing", "ReceivingSession"]

# TCP lets about one packet in 300 million through damaged; the same chunk four times over is something else.
MAX_CORRUPT_ATTEMPTS = 4
# A probe costs its receiver nothing but reading; a gigabyte measures any path up to 10 Gbps for a second.
MAX_PROBE_BYTES = 1 << 30
MAX_PROBES = 1


@dataclass(frozen=True, slots=True)
class Landing:
    """Leave to write one chunk's payload into ``view``; end it with ``landed`` or ``aborted``."""

    transfer: IncomingTransfer
    handle: int
    chunk: int
    view: memoryview
    checksum: int


class ReceivingSession(Session):
    """Sans-IO; see :class:`~prfaas_net.wire.session.Session` for how a shell drives it.

    Args:
        reservations: shared with the other sessions of the same receiver.
        peer: the sender's name.
        link_grace_s: how long a transfer whose session died waits for the sender to come back. 0: it fails.
        codecs: that the handshake agreed on.
    """

    def __init__(
        self,
        reservations: Reservations,
        *,
        peer: str,
        timers: Timers,
        now: float,
        link_grace_s: float = 0.0,
        codecs: Collection[int] = (),
    ) -> None:
        super().__init__(timers=timers, now=now)
        self.peer = peer
        self._codecs = frozenset(codecs)
        self._reservations = reservations
        self._link_grace_s = link_grace_s
        self._transfers: dict[int, IncomingTransfer] = {}
        self._sinks: dict[int, tuple[ChunkTable, ChunkBitmap]] = {}
        self._highest_handle = 0

    # -- for the user -------------------------------------------------------------------------------------------

    def abort(self, transfer: IncomingTransfer, error: PrfaasError) -> None:
        """Give a transfer of this session up and tell the sender why. Harmless once it has ended."""
        for handle, known in self._transfers.items():
            if known is transfer:
                self._write_json(FrameType.ABORT, error.to_wire(), transfer=handle)
                self._finish(handle, error)
                return

    def give_up(self, transfer: IncomingTransfer) -> None:
        """The sender has opened the transfer on another session; connections that still write into it must end."""
        for handle, known in tuple(self._transfers.items()):
            if known is transfer:
                del self._transfers[handle]
                moved = LinkError("the sender has moved to another session")
                transfer.lose_link(moved, wait_until=transfer.deadline)
                self._events.append(TakenOver(transfer, frozenset(transfer.landing.values())))

    # -- for the connections ------------------------------------------------------------------------------------

    def admit(self, header: Header, lane: int) -> Landing | None:
        """Where a data frame's payload goes, or None: drain it, nobody wants it.

        Raises:
            ProtocolError: the frame lies outside what was granted; the session should end.
        """
        if header.type != FrameType.DATA:
            raise ProtocolError("only data frames travel on a data connection", found=header.type)
        transfer = self._transfers.get(header.transfer)
        if transfer is None:
            if header.transfer in self._sinks:
                return None  # see drained()
            if not 0 < header.transfer <= self._highest_handle:
                raise ProtocolError("data for a transfer that was never opened", found=header.transfer)
            return None
        chunk, table = header.chunk, transfer.table
        if (
            chunk >= len(table)
            or header.offset != table.offsets[chunk]
            or not self._size_fits(header, table.lengths[chunk])
        ):
            raise ProtocolError(
                "a chunk outside the grant",
                expected=repr(table),
                found=f"chunk {chunk}, {header.payload_bytes} bytes at {header.offset}",
                transfer=transfer.transfer_id,
            )
        if chunk in transfer.landed:
            transfer.discarded_chunks += 1  # verified bytes are never written again
            return None
        if chunk in transfer.landing:
            # The sender has given the other connection up, or it would not send the chunk again.
            transfer.discarded_chunks += 1
            self._events.append(LaneGivenUp(transfer.landing[chunk]))
            return None
        transfer.landing[chunk] = lane
        return Landing(transfer, header.transfer, chunk, transfer.destinations[chunk], header.payload_xxh3)

    def _size_fits(self, header: Header, length: int) -> bool:
        """A raw payload has the chunk's size; an encoded one is smaller, and of a codec that was agreed on."""
        if header.codec == Codec.RAW:
            return header.payload_bytes == length
        return header.codec in self._codecs and 0 < header.payload_bytes < length

    def landed(self, landing: Landing, checksum: int, *, now: float) -> None:
        """A chunk's payload is in memory and hashes to ``checksum``."""
        transfer = landing.transfer
        transfer.landing.pop(landing.chunk, None)
        if self._transfers.get(landing.handle) is not transfer:
            return
        self._heard_at = now
        if checksum != landing.checksum:
            self._corrupt(landing, checksum)
            return
        transfer.machine.advance(RxEvent.LAND)
        transfer.checksums[landing.chunk] = checksum
        if transfer.landed.add(landing.chunk):
            transfer.landed_bytes += transfer.table.lengths[landing.chunk]
        self._try_complete(landing.handle)

    def _corrupt(self, landing: Landing, found: int) -> None:
        """Ask for the chunk again; a chunk that keeps coming wrong is not the network's doing."""
        transfer, chunk = landing.transfer, landing.chunk
        transfer.corrupt_chunks += 1
        attempts = transfer.corrupt[chunk] = transfer.corrupt.get(chunk, 0) + 1
        if attempts < MAX_CORRUPT_ATTEMPTS:
            self._write(FrameType.NACK, transfer=landing.handle, chunk=chunk)
            return
        error = CorruptionError(
            f"a chunk came wrong {attempts} times",
            expected=f"{landing.checksum:016x}",
            found=f"{found:016x}",
            do="check the memory and the network card of both hosts",
            transfer=transfer.transfer_id,
            chunk=chunk,
        )
        self.abort(transfer, error)

    def drained(self, header: Header, *, now: float) -> None:
        """A payload that :meth:`admit` did not want was read to its end; for a probe that is all there is to it."""
        sink = self._sinks.get(header.transfer)
        if sink is None:
            return
        self._heard_at = now
        table, counted = sink
        if header.chunk >= len(table):
            raise ProtocolError("a probe's chunk does not exist", found=header.chunk)
        counted.add(header.chunk)
        if counted.full:
            del self._sinks[header.transfer]
            _, bits = counted.take_report(whole=True) or (0, b"")
            self._write(FrameType.DONE, bits, transfer=header.transfer)

    def aborted(self, landing: Landing) -> None:
        """The connection died in the middle of a chunk; ask for it again."""
        landing.transfer.landing.pop(landing.chunk, None)
        if self._transfers.get(landing.handle) is landing.transfer and self.error is None:
            self._write(FrameType.NACK, transfer=landing.handle, chunk=landing.chunk)

    # -- frames from the sender ---------------------------------------------------------------------------------

    def _receive_transfer_frame(self, frame: Frame, *, now: float) -> None:
        handle = frame.header.transfer
        if frame.type in (FrameType.OPEN, FrameType.PROBE):
            if handle <= self._highest_handle:
                raise ProtocolError("transfer handles must grow", expected=f"> {self._highest_handle}", found=handle)
            self._highest_handle = handle
            (self._open if frame.type is FrameType.OPEN else self._probe)(handle, frame)
            return
        if handle in self._sinks:
            if frame.type is FrameType.ABORT:
                del self._sinks[handle]
            return
        transfer = self._transfers.get(handle)
        if transfer is None:
            if 0 < handle <= self._highest_handle:
                return  # it has ended on this side; the sender will learn
            raise self._unexpected(frame)
        if frame.type is FrameType.SEAL:
            transfer.machine.advance(RxEvent.SEAL)
            transfer.seal = frame.json()
            self._events.append(SealArrived(transfer))
            self._try_complete(handle)
        elif frame.type is FrameType.ABORT:
            error = error_from_wire(frame.json())
            self._finish(handle, error)
        else:
            raise self._unexpected(frame)

    def _open(self, handle: int, frame: Frame) -> None:
        ticket = Ticket.from_json(frame.json().get("ticket"))
        try:
            epitaph = self._reservations.epitaph(ticket)
            if epitaph is not None:
                self._recall(handle, epitaph)
                return
            transfer = self._reservations.claim(ticket, self)
        except (AuthError, BusyError) as error:
            self._write_json(FrameType.ABORT, error.to_wire(), transfer=handle)
            return
        transfer.machine.advance(RxEvent.OPEN)
        self._transfers[handle] = transfer
        _, bits = transfer.landed.take_report(whole=True) or (0, b"")
        self._write(FrameType.OPENED, bits, transfer=handle)
        self._events.append(TransferOpened(transfer))

    def _probe(self, handle: int, frame: Frame) -> None:
        """Chunks that will be counted and forgotten; bounded, since anybody who may connect may ask for it."""
        body = frame.json()
        n_chunks, chunk_bytes = body.get("chunks"), body.get("chunk_bytes")
        if not isinstance(n_chunks, int) or not isinstance(chunk_bytes, int):
            raise ProtocolError("bad PROBE", expected="integers for chunks and chunk_bytes")
        if (
            not 1 <= n_chunks <= MAX_CHUNKS
            or not 1 <= chunk_bytes <= MAX_CHUNK_BYTES
            or n_chunks * chunk_bytes > MAX_PROBE_BYTES
            or len(self._sinks) >= MAX_PROBES
        ):
            refused = RefusedError("the probe is too large", expected=f"at most {MAX_PROBE_BYTES} bytes, one at a time")
            self._write_json(FrameType.ABORT, refused.to_wire(), transfer=handle)
            return
        self._sinks[handle] = ChunkTable([chunk_bytes] * n_chunks), ChunkBitmap(n_chunks)
        self._write(FrameType.OPENED, transfer=handle)

    def _recall(self, handle: int, epitaph: Epitaph) -> None:
        """The transfer has ended, and its sender has not heard of it."""
        if epitaph.error is not None:
            self._write_json(FrameType.ABORT, epitaph.error.to_wire(), transfer=handle)
            return
        whole = ChunkBitmap(epitaph.n_chunks)
        for chunk in range(epitaph.n_chunks):
            whole.add(chunk)
        _, bits = whole.take_report(whole=True) or (0, b"")
        self._write(FrameType.DONE, bits, transfer=handle)

    # -- inside -------------------------------------------------------------------------------------------------

    def _try_complete(self, handle: int) -> None:
        transfer = self._transfers[handle]
        if transfer.state is not Rx.SEALED or not transfer.landed.full:
            return
        try:
            transfer.check_digest()
        except PrfaasError as error:
            self.abort(transfer, error)
            return
        transfer.machine.advance(RxEvent.FINISH)
        _, bits = transfer.landed.take_report(whole=True) or (0, b"")
        self._write(FrameType.DONE, bits, transfer=handle)
        self._release(handle)
        self._events.append(Completed(transfer))

    def _release(self, handle: int) -> None:
        transfer = self._transfers.pop(handle)
        transfer.owner = None
        self._reservations.remove(transfer)

    def _finish(self, handle: int, error: PrfaasError) -> None:
        transfer = self._transfers[handle]
        transfer.fail(error)
        self._release(handle)
        self._events.append(ReceiveFailed(transfer, error))

    def _before_output(self) -> None:
        if self.error is not None:
            return
        maps = [(handle, transfer.landed) for handle, transfer in self._transfers.items()]
        maps += [(handle, counted) for handle, (_, counted) in self._sinks.items()]
        for handle, bitmap in maps:
            report = bitmap.take_report()
            if report is not None:
                first, bits = report
                self._write(FrameType.ACK, bits, transfer=handle, chunk=first)

    def _transfer_deadline(self) -> float | None:
        return min((transfer.deadline for transfer in self._transfers.values()), default=None)

    def _end_overdue(self, *, now: float) -> None:
        for transfer in tuple(self._transfers.values()):
            if now >= transfer.deadline:
                found = f"{transfer.landed.count} of {len(transfer.table)} chunks"
                error = DeadlineError("the ticket's time is up", found=found, transfer=transfer.transfer_id)
                self.abort(transfer, error)

    def _lose_transfers(self, error: PrfaasError, *, now: float, final: bool) -> None:
        for handle, transfer in tuple(self._transfers.items()):
            if final or self._link_grace_s <= 0:
                self._finish(handle, error)
            else:
                del self._transfers[handle]
                transfer.lose_link(error, wait_until=now + self._link_grace_s)
