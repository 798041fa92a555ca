"""What every link is to its user, whichever side dialled: transfers, figures, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prfaas_net.clock import Clock
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import DeadlineError, LinkError, PrfaasError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.kv.codecs import Codec
from prfaas_net.transport.connections import SendingConnections
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.outgoing import Outgoing
from prfaas_net.transport.stats import LinkStats, TransferProgress, read_tcp_info
from prfaas_net.transport.streams import Stream
from prfaas_net.transport.telemetry import LinkTelemetry
from prfaas_net.transport.tuning import LinkSampler, StreamTuner
from prfaas_net.units import MiB
from prfaas_net.wire import (
    Delivered,
    Event,
    LaneGivenUp,
    OutgoingTransfer,
    PeerIdentity,
    SendFailed,
    SendingSession,
    SessionLost,
    Ticket,
    Timers,
)

__all__ = ["LinkBase"]

# How often the sockets are looked at, and how often in between whether there is something to send.
SAMPLE_EVERY_S = 0.5
LOOKS_PER_SAMPLE = 5


class LinkBase:
    """Base of ``SenderLink``, which dials, and ``AcceptedLink``, which is dialled.

    Attributes:
        towards: the cluster of its receiver, where its user has said so.
    """

    def __init__(self, *, options: LinkOptions, timers: Timers, clock: Clock) -> None:
        self.options = options
        self.towards = ""
        self._timers = timers
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._outgoing: dict[OutgoingTransfer, Outgoing] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sampler = LinkSampler()
        self._tuner: StreamTuner | None = None
        self._ended_bytes = 0
        self._now: SendingConnections
        self.telemetry = LinkTelemetry(
            streams=lambda: [(number, lane.stream) for number, lane in self._now.lanes.items()],
            alive=lambda: self.alive,
            backlog_bytes=self._backlog_bytes,
            in_use=lambda: bool(self._outgoing),
            clock=clock,
            budget_bps=options.budget_bps,
            on_budget=lambda budget_bps: self._now.pace_to(budget_bps),
            log_directory=options.telemetry_log,
        )

    # -- for the user -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether new transfers can be opened."""
        return self._now.session.error is None and not self._now.session.draining

    @property
    def peer_boot_id(self) -> str:
        """Of the receiver; a ticket of another boot is void."""
        return self._now.peer.boot_id

    @property
    def peer_name(self) -> str:
        """What the receiver calls itself."""
        return self._now.peer.node

    @property
    def streams(self) -> list[Stream]:
        """The data connections that are up."""
        return [lane.stream for lane in self._now.lanes.values()]

    def tcp_info(self) -> TcpInfo | None:
        """What the kernel knows of one of the data connections."""
        return next((info for stream in self.streams if (info := read_tcp_info(stream.sock)) is not None), None)

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the last ping, application to application."""
        return self._now.session.rtt_s

    @property
    def verdict(self) -> Verdict:
        """What the link is doing, by the last look at its sockets."""
        return self.telemetry.verdict

    def tell_verdicts_to(self, listener: Callable[[LinkBase, Verdict], None] | None) -> None:
        """Have every change told, on the loop, within the look that found it; None tells nobody."""
        self.telemetry.on_verdict = None if listener is None else lambda verdict: listener(self, verdict)

    def set_budget(self, budget_bps: int | None) -> None:
        """Another egress budget from now on, for what is being sent as well; None: not paced. On the loop."""
        if budget_bps != self.options.budget_bps:
            self.options = replace(self.options, budget_bps=budget_bps)
            self.telemetry.set_budget(budget_bps)

    @property
    def connections(self) -> int:
        """Data connections that are up."""
        return len(self._now.lanes)

    @property
    def wanted_connections(self) -> int:
        """Data connections that there should be."""
        return self.options.connections if self._tuner is None else self._tuner.streams

    def progress(self) -> list[TransferProgress]:
        """Every transfer that has not ended."""
        now = self._clock.now()
        with self._lock:
            return [TransferProgress.of(transfer, now=now) for transfer in self._outgoing]

    def stats(self) -> LinkStats:
        """The link as a whole; TCP's counters are those of the last sample."""
        infos = self._sampler.infos
        transfers = self.progress()
        return LinkStats(
            peer=self._now.peer.node,
            alive=self.alive,
            connections=self.connections,
            transfers=len(transfers),
            queued_bytes=sum(t.ready_bytes - t.acked_bytes for t in transfers),
            acked_bytes=self._acked_bytes(),
            goodput_bps=self._sampler.goodput_bps,
            rtt_s=self.rtt_s,
            tcp_rtt_s=sum(info.rtt_s for info in infos) / len(infos) if infos else 0.0,
            bytes_sent=self._sampler.sent_bytes,
            bytes_retrans=self._sampler.retrans_bytes,
            delivery_rate_bps=sum(info.delivery_rate_bps for info in infos),
            budget_bps=self.telemetry.budget_bps,
            verdict=self.verdict,
        )

    def open(
        self,
        ticket: Ticket,
        table: ChunkTable,
        views: Sequence[memoryview],
        *,
        lifetime_s: float | None = None,
        codec: Codec = Codec.RAW,
    ) -> Outgoing:
        """Begin a transfer. On the loop.

        Args:
            views: each chunk's bytes, to be sent from where they lie; they must stay as they are from
                ``ready`` until the transfer has ended.
            lifetime_s: from now; the ticket's own lifetime bounds it.
            codec: what suits the values; used on connections where it is sooner, if ``options.encode`` allows it and
                the receiver can.

        Raises:
            PrfaasError: the link is down or draining, or the ticket is for another table.
        """
        now = self._clock.now()
        lifetime_s = min(ticket.lifetime_s, lifetime_s or ticket.lifetime_s)
        with self._lock:
            transfer = self._now.session.open(ticket, table, deadline=now + lifetime_s, now=now)
            transfer.codec = codec if codec.feature in self._now.peer.features else Codec.RAW
            outgoing = self._outgoing[transfer] = Outgoing(self, transfer, views)
        self._now.driver.pump()
        self.telemetry.wake()
        return outgoing

    def probe(self, total_bytes: int, *, chunk_bytes: int = MiB, lifetime_s: float = 30.0) -> Outgoing:
        """Send so many bytes into nowhere, to measure the path: ``wait()`` tells how long they took."""
        chunk_bytes = min(chunk_bytes, total_bytes)
        table = ChunkTable([chunk_bytes] * (total_bytes // chunk_bytes))
        now = self._clock.now()
        views = [memoryview(bytes(chunk_bytes))] * len(table)
        with self._lock:
            transfer = self._now.session.probe(table, deadline=now + lifetime_s, now=now)
            outgoing = self._outgoing[transfer] = Outgoing(self, transfer, views)
        self._now.driver.pump()
        outgoing.ready_all()
        outgoing.seal({})
        self.telemetry.wake()
        return outgoing

    async def close(self, reason: str = "the sender closed the link", *, timeout_s: float = 1.0) -> None:
        """End the link; transfers under way fail on both sides. Joins its threads."""
        self.telemetry.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._now.close(reason, timeout_s=timeout_s)
        self._give_up(self._now, LinkError(reason))

    # -- for Outgoing, from any thread --------------------------------------------------------------------------

    def ready(self, transfer: OutgoingTransfer, chunk: int, known: int | None) -> None:
        with self._work:
            self._now.session.ready(transfer, chunk, known)
            self._work.notify()

    def seal(self, transfer: OutgoingTransfer, body: dict[str, Any]) -> None:
        with self._lock:
            self._now.session.seal(transfer, body, now=self._clock.now())
        self._now.driver.wake()

    def abort(self, transfer: OutgoingTransfer, error: PrfaasError) -> None:
        with self._lock:
            self._now.session.abort(transfer, error, now=self._clock.now())
        self._now.driver.wake()

    # -- sessions -----------------------------------------------------------------------------------------------

    def _make_connections(self, peer: PeerIdentity) -> SendingConnections:
        """A fresh session, without sockets yet."""
        session = SendingSession(timers=self._timers, now=self._clock.now(), resumable=self.options.resume_window_s > 0)
        return SendingConnections(
            session, peer, work=self._work, lock=self._lock, clock=self._clock, options=self.options, views=self._view,
            budget_bps=self.telemetry.budget_bps,
            on_event=self._event, on_change=self._changed.set,
        )  # fmt: skip

    def _open_orphans(self, old: SendingConnections) -> list[OutgoingTransfer]:
        """Orphans that are still worth coming back for; those whose time is up are ended."""
        now = self._clock.now()
        with self._lock:
            for transfer in old.session.orphans:
                if now >= transfer.deadline:
                    overdue = DeadlineError("the transfer's time is up", transfer=transfer.transfer_id)
                    old.session.abort(transfer, overdue, now=now)
            left = [transfer for transfer in old.session.orphans if not transfer.machine.ended]
        old.driver.pump()
        return left

    def _adopt(self, old: SendingConnections, new: SendingConnections) -> bool:
        """Take the orphans along to a new session; False if that one is dead already."""
        with self._lock:
            if new.session.error is not None:
                return False
            for transfer in old.session.orphans:
                if not transfer.machine.ended:
                    new.session.adopt(transfer)
            old.session.orphans.clear()
            self._now = new
        new.driver.pump()
        return True

    def _give_up(self, old: SendingConnections, error: PrfaasError) -> None:
        """Nobody will come back: the orphans fail."""
        session = old.session
        with self._lock:
            for transfer in session.orphans:
                session.abort(transfer, error, now=self._clock.now())
            session.orphans.clear()
        old.driver.pump()

    # -- inside -------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        """Look at the sockets every now and then; follow the tuner's advice."""
        while True:
            for _ in range(LOOKS_PER_SAMPLE):
                await asyncio.sleep(SAMPLE_EVERY_S / LOOKS_PER_SAMPLE)
                with self._lock:
                    self._sampler.note_busy(bool(self._now.session.waiting))
            streams = [(number, lane.stream) for number, lane in self._now.lanes.items()]
            sample = self._sampler.sample(streams, acked_bytes=self._acked_bytes(), now=self._clock.now())
            if self._tuner is None or sample is None:
                continue
            wanted = self._tuner.add(sample)
            for _ in range(self._now.open_lanes - wanted):
                self._now.retire_lane()
            self._changed.set()

    def _backlog_bytes(self) -> int:
        """Made and not acknowledged, by the mean size of a transfer's chunks: this is asked fifty times a second."""
        return sum(
            max(0, t.table.total_bytes * t.ready.count // max(1, len(t.table)) - t.stats.acked_bytes)
            for t in tuple(self._outgoing)
        )

    def _acked_bytes(self) -> int:
        with self._lock:
            return self._ended_bytes + sum(transfer.stats.acked_bytes for transfer in self._outgoing)

    def _view(self, transfer: OutgoingTransfer, chunk: int) -> memoryview:
        return self._outgoing[transfer].views[chunk]

    def _event(self, event: Event) -> None:
        if isinstance(event, (Delivered, SendFailed)):
            with self._lock:
                outgoing = self._outgoing.pop(event.transfer)
                self._ended_bytes += event.transfer.stats.acked_bytes
            outgoing.end(event.error if isinstance(event, SendFailed) else None)
        elif isinstance(event, LaneGivenUp):
            self._now.shut_lane(event.lane)
        elif isinstance(event, SessionLost):
            self._now.end_lanes()
            self._changed.set()
