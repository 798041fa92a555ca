"""Two ends of a session joined by a fake link: the fixture of the protocol's tests.

No socket, no thread, no clock: control bytes and data frames are moved by hand, in order or not, and time is a
number. The helpers have the names of what they do to the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prfaas_net.kv import ChunkTable, checksum
from prfaas_net.wire import (
    Event,
    Header,
    IncomingTransfer,
    OutgoingTransfer,
    ReceivingSession,
    Reservations,
    SendingSession,
    SendOrder,
    Ticket,
    TicketSigner,
    Timers,
)

TIMERS = Timers(ping_interval_s=1.0, dead_after_s=10.0, lane_stall_s=2.0, stall_after_s=5.0)
KEY = b"k" * 32


class Pair:
    """A sender and a receiver, and everything that is between them."""

    def __init__(
        self, *, link_grace_s: float = 0.0, reservations: Reservations | None = None, peer: str = "p0"
    ) -> None:
        self.now = 100.0
        self.reservations = Reservations(TicketSigner(KEY)) if reservations is None else reservations
        self.sender = SendingSession(timers=TIMERS, now=self.now, resumable=link_grace_s > 0)
        self.receiver = ReceivingSession(
            self.reservations, peer=peer, timers=TIMERS, now=self.now, link_grace_s=link_grace_s
        )
        self.sender_events: list[Event] = []
        self.receiver_events: list[Event] = []
        self.sources: dict[int, Sequence[memoryview]] = {}

    def reserve(self, table: ChunkTable, *, lifetime_s: float = 60.0) -> tuple[IncomingTransfer, np.ndarray]:
        """A reservation over fresh memory; returns the memory too."""
        memory = np.zeros(table.total_bytes, dtype=np.uint8)
        ticket = Ticket(
            transfer_id=f"{len(self.reservations) + 1:032x}",
            boot_id="b",
            endpoints=(("127.0.0.1", 1),),
            total_bytes=table.total_bytes,
            n_chunks=len(table),
            table=table.fingerprint,
            lifetime_s=lifetime_s,
        )
        ticket = self.reservations.signer.sign(ticket)
        transfer = IncomingTransfer(ticket, table, cut(memory, table), deadline=self.now + lifetime_s)
        self.reservations.add(transfer)
        return transfer, memory

    def open(self, incoming: IncomingTransfer, source: np.ndarray, *, lifetime_s: float = 60.0) -> OutgoingTransfer:
        """Present the ticket of a reservation."""
        outgoing = self.sender.open(incoming.ticket, incoming.table, deadline=self.now + lifetime_s, now=self.now)
        self.sources[outgoing.handle] = cut(source, incoming.table)
        return outgoing

    def make_ready(self, outgoing: OutgoingTransfer, chunks: Sequence[int] | None = None) -> None:
        """Declare chunks ready (all by default), hashed."""
        for chunk in range(len(outgoing.table)) if chunks is None else chunks:
            self.sender.ready(outgoing, chunk, checksum(self.sources[outgoing.handle][chunk]))

    def exchange_control(self) -> None:
        """Carry control bytes both ways until nobody has anything to say."""
        while True:
            forward = b"".join(self.sender.take_output(now=self.now))
            backward = b"".join(self.receiver.take_output(now=self.now))
            if not forward and not backward:
                break
            if forward:
                self.receiver.receive(forward, now=self.now)
            if backward:
                self.sender.receive(backward, now=self.now)
        self.sender_events += self.sender.take_events()
        self.receiver_events += self.receiver.take_events()

    def pull(self, lane: int = 1) -> SendOrder | None:
        """What a free connection would send next."""
        return self.sender.next_chunk(lane, now=self.now)

    def carry(self, order: SendOrder, lane: int = 1, *, damage: Callable[[np.ndarray], None] | None = None) -> bool:
        """Carry one chunk across a data connection; False if the receiver drained it."""
        payload = self.sources[order.transfer.handle][order.chunk]
        known = order.checksum
        if known is None:
            known = checksum(payload)
            self.sender.hashed(order, known)
        landing = self.receiver.admit(Header.unpack(order.header(known)), lane)
        if landing is None:
            return False
        data = np.frombuffer(payload, dtype=np.uint8).copy()
        if damage is not None:
            damage(data)
        landing.view[:] = data.tobytes()
        self.receiver.landed(landing, checksum(landing.view), now=self.now)
        return True

    def run(self) -> None:
        """Carry everything until nothing moves any more."""
        self.exchange_control()
        while (order := self.pull()) is not None:
            self.carry(order)
            self.exchange_control()

    def advance(self, by_s: float) -> None:
        """Let time pass; timers that are due fire on both sides."""
        end = self.now + by_s
        while True:
            deadlines = [d for d in (self.sender.next_deadline(), self.receiver.next_deadline()) if d is not None]
            if not deadlines or min(deadlines) > end:
                break
            self.now = max(self.now, min(deadlines))
            self.sender.handle_timeout(now=self.now)
            self.receiver.handle_timeout(now=self.now)
            self.exchange_control()
        self.now = end

    def advance_cut_off(self, by_s: float) -> None:
        """Let time pass while nothing that is said arrives."""
        self.now += by_s
        for session in (self.sender, self.receiver):
            session.handle_timeout(now=self.now)
            session.take_output(now=self.now)
        self.sender_events += self.sender.take_events()
        self.receiver_events += self.receiver.take_events()


def cut(memory: np.ndarray, table: ChunkTable) -> list[memoryview]:
    """Views of each chunk in a flat buffer."""
    flat = memoryview(memory).cast("B")  # type: ignore[arg-type]
    return [flat[start : start + length] for start, length in zip(table.offsets, table.lengths, strict=True)]


def random_bytes(n_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def of_type(events: Sequence[Event], kind: type) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]
