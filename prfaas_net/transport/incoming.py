"""Reserved transfers, for their users; the part of a receiver that is the same whatever carries the bytes."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from prfaas_net.clock import Clock
from prfaas_net.errors import CancelledByPeer, PrfaasError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.wire import (
    Completed,
    Event,
    IncomingTransfer,
    ReceiveFailed,
    ReceivingSession,
    Reservations,
    SealArrived,
    Ticket,
    TicketSigner,
    TransferOpened,
)
from prfaas_net.wire.states import Rx

__all__ = ["Inbox", "Incoming", "Writers"]

# A connection that is still writing into the memory of an ended transfer after this long is shut down.
FENCE_S = 1.0
EXPIRE_EVERY_S = 0.05


class Writers(Protocol):
    """What carries the bytes."""

    def pump(self, session: ReceivingSession) -> None:
        """The session has something to say."""
        ...

    def shut_lanes(self, session: ReceivingSession, numbers: set[int]) -> None:
        """End these connections of a session."""
        ...


class Incoming:
    """One reserved transfer."""

    def __init__(self, inbox: Inbox, transfer: IncomingTransfer) -> None:
        self.transfer = transfer
        self._inbox = inbox
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._sealed: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._landed: asyncio.Future[None] = loop.create_future()
        for future in (self._opened, self._sealed, self._landed):
            # Each of them may be the one that nobody waits for.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def ticket(self) -> Ticket:
        return self.transfer.ticket

    async def sealed(self) -> dict[str, Any]:
        """What the sender sent with its seal.

        Raises:
            PrfaasError: the transfer failed. The ticket's lifetime bounds the wait.
        """
        return await asyncio.shield(self._sealed)

    async def landed(self) -> None:
        """Until every chunk is in its destination, verified, and the digest agrees.

        Raises:
            PrfaasError: the transfer failed. The ticket's lifetime bounds the wait.
        """
        await asyncio.shield(self._landed)

    async def abort(self, error: PrfaasError | None = None) -> None:
        """End the transfer if it has not ended, and wait until no connection writes into its memory any more.

        After this the destinations may be used for something else.
        """
        await self._inbox.abort(self, error or CancelledByPeer("the receiver no longer wants the transfer"))

    def tell(self, event: Event) -> None:
        """For the receiver: something happened to the transfer. On the loop."""
        match event:
            case TransferOpened():
                _resolve(self._opened, None)
            case SealArrived():
                body = (event.transfer.seal or {}).get("body")
                _resolve(self._sealed, body if isinstance(body, dict) else {})
            case Completed():
                _resolve(self._landed, None)
            case ReceiveFailed():
                self.fail(event.error)

    def fail(self, error: PrfaasError) -> None:
        """For the receiver: it will not complete. On the loop."""
        for future in (self._opened, self._sealed, self._landed):
            if not future.done():
                future.set_exception(error)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


class Inbox:
    """All of a receiver's reserved transfers.

    Args:
        lock: guards the reservations and the sessions that fill them.
    """

    def __init__(self, *, boot_id: str, clock: Clock, lock: threading.Lock, writers: Writers) -> None:
        self.reservations = Reservations(TicketSigner(secrets.token_bytes(32)))
        self._boot_id = boot_id
        self._clock = clock
        self._lock = lock
        self._writers = writers
        self._incoming: dict[IncomingTransfer, Incoming] = {}

    def __len__(self) -> int:
        return len(self.reservations)

    def reserve(
        self,
        table: ChunkTable,
        destinations: Sequence[memoryview],
        *,
        lifetime_s: float,
        endpoints: Sequence[tuple[str, int]],
        manifest: dict[str, Any] | None = None,
    ) -> Incoming:
        """Promise to take a transfer into these destinations. On the loop.

        Args:
            lifetime_s: from now; when it has passed the transfer fails, whatever its state.
            endpoints: where the sender should dial, in order of preference.
        """
        ticket = Ticket(
            transfer_id=secrets.token_hex(16),
            boot_id=self._boot_id,
            endpoints=tuple(endpoints),
            total_bytes=table.total_bytes,
            n_chunks=len(table),
            table=table.fingerprint,
            lifetime_s=lifetime_s,
            manifest=manifest or {},
        )
        ticket = self.reservations.signer.sign(ticket)
        transfer = IncomingTransfer(ticket, table, destinations, deadline=self._clock.now() + lifetime_s)
        incoming = self._incoming[transfer] = Incoming(self, transfer)
        with self._lock:
            self.reservations.add(transfer)
        return incoming

    def tell(self, event: Event) -> None:
        """Pass an event of some session on to the transfer's user."""
        if isinstance(event, (TransferOpened, SealArrived, Completed, ReceiveFailed)):
            incoming = self._incoming.get(event.transfer)
            if incoming is not None:
                incoming.tell(event)
            if isinstance(event, Completed):
                self._incoming.pop(event.transfer, None)

    async def abort(self, incoming: Incoming, error: PrfaasError) -> None:
        """See :meth:`Incoming.abort`."""
        transfer = incoming.transfer
        with self._lock:
            owner = transfer.owner
            if isinstance(owner, ReceivingSession):
                owner.abort(transfer, error)
            else:
                self.reservations.fail(transfer, error)
            ended = transfer.error
        self._incoming.pop(transfer, None)
        if transfer.state is Rx.COMPLETE:  # its sender has been told; the events may still be on their way here
            incoming.tell(TransferOpened(transfer))
            incoming.tell(SealArrived(transfer))
            incoming.tell(Completed(transfer))
        else:
            incoming.fail(ended or error)
        if isinstance(owner, ReceivingSession):
            self._writers.pump(owner)
        await self._fence(transfer)

    async def _fence(self, transfer: IncomingTransfer) -> None:
        """Wait until nobody writes into the transfer's memory; connections that will not leave are shut down."""
        give_up_at = self._clock.now() + FENCE_S
        while transfer.landing:
            if self._clock.now() >= give_up_at:
                self._writers.shut_lanes(transfer.last_owner, set(transfer.landing.values()))
            await asyncio.sleep(0.002)

    async def abort_all(self) -> None:
        """End every transfer."""
        for incoming in tuple(self._incoming.values()):
            await incoming.abort()

    async def expire_forever(self) -> None:
        """End the transfers whose time passes while no session holds them."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            with self._lock:
                overdue = self.reservations.expire(now=self._clock.now())
            for transfer in overdue:
                incoming = self._incoming.get(transfer)
                if incoming is not None and transfer.error is not None:
                    incoming.fail(transfer.error)
