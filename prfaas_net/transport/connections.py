"""The sending side's connections of one session: control and lanes, from dialled to closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from prfaas_net.clock import Clock
from prfaas_net.errors import LinkError
from prfaas_net.transport.driver import SessionDriver
from prfaas_net.transport.lanes import Lane, SendLane, join_lanes
from prfaas_net.transport.options import LinkOptions, pace
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import Event, OutgoingTransfer, PeerIdentity, SendingSession

__all__ = ["SendingConnections"]

Views = Callable[[OutgoingTransfer, int], memoryview]


class SendingConnections:
    """One session and its sockets.

    Args:
        work: guards the session; lanes wait on it for chunks.
        budget_bps: what all data connections together are paced to; None: not at all.
        views: finds a chunk's bytes.
        on_change: called on the loop when a lane has ended.
    """

    def __init__(
        self,
        session: SendingSession,
        peer: PeerIdentity,
        *,
        work: threading.Condition,
        lock: threading.Lock,
        clock: Clock,
        options: LinkOptions,
        budget_bps: int | None,
        views: Views,
        on_event: Callable[[Event], None],
        on_change: Callable[[], None],
    ) -> None:
        self.session = session
        self.peer = peer
        self.lanes: dict[int, SendLane] = {}
        self.had_lanes = False
        self._work = work
        self._clock = clock
        self._options = replace(options, budget_bps=budget_bps)
        self._paced = options.budget_bps is not None
        self._views = views
        self._on_change = on_change
        self.driver = SessionDriver(session, clock=clock, lock=lock, on_event=on_event, on_pump=self._wake_lanes)

    async def attach(self, control: Stream) -> None:
        """Take over the control connection."""
        await self.driver.attach(control)

    def add_lane(self, number: int, stream: Stream) -> None:
        """Take over a data connection and let it pull chunks."""
        lane = SendLane(
            number, stream, self.session, work=self._work, views=self._views, clock=self._clock,
            wake=self.driver.wake, on_end=self._lane_ended,
        )  # fmt: skip
        self.lanes[number] = lane
        self.had_lanes = True
        lane.start()
        self._share_budget()

    def retire_lane(self) -> None:
        """Let the newest lane finish the chunk it is sending, and end."""
        numbers = [number for number, lane in self.lanes.items() if not lane.closing]
        if numbers:
            with self._work:
                self.lanes[max(numbers)].closing = True
                self._work.notify_all()

    @property
    def open_lanes(self) -> int:
        """Data connections that are up and stay so."""
        return sum(not lane.closing for lane in self.lanes.values())

    def pace_to(self, budget_bps: int | None) -> None:
        """Another budget from now on; None: none."""
        self._options = replace(self._options, budget_bps=budget_bps)
        self._share_budget()

    def _share_budget(self) -> None:
        """The budget is the link's: whatever number of connections there is, they get it in equal parts."""
        if not self._paced and self._options.budget_bps is None:
            return
        self._paced = True
        for lane in self.lanes.values():
            try:
                pace(lane.stream.sock, self._options, len(self.lanes))
            except OSError:
                pass  # it has just ended

    def shut_lane(self, number: int) -> None:
        """End a lane, whatever it is doing."""
        lane = self.lanes.get(number)
        if lane is not None:
            lane.closing = True
            lane.shutdown()

    def end_lanes(self) -> None:
        """Shut every lane down, whatever it is doing."""
        with self._work:
            for lane in self.lanes.values():
                lane.closing = True
            self._work.notify_all()
        for lane in tuple(self.lanes.values()):
            lane.shutdown()

    async def close(self, reason: str, *, timeout_s: float) -> None:
        """End the session, telling the peer; joins the threads."""
        await self.driver.close(reason, timeout_s=timeout_s)
        await self.join_lanes(timeout_s)

    async def join_lanes(self, timeout_s: float) -> None:
        """Shut the lanes down and wait for their threads."""
        self.end_lanes()
        await join_lanes(self.lanes.values(), timeout_s)

    def _wake_lanes(self) -> None:
        """Under the lock: a frame from the receiver may have freed chunks to send."""
        if self.session.waiting:
            self._work.notify_all()

    def _lane_ended(self, lane: Lane, error: Exception | None) -> None:
        """From the lane's thread: its last act."""
        with self._work:
            self.session.lane_lost(lane.number)
            self._work.notify_all()
        try:
            self.driver.loop.call_soon_threadsafe(self._forget_lane, lane, error)
        except RuntimeError:
            lane.close()  # the loop is gone

    def _forget_lane(self, lane: Lane, error: Exception | None) -> None:
        lane.close()
        del self.lanes[lane.number]
        self._share_budget()
        self._on_change()

    def lost_every_lane(self, error: Exception | None) -> None:
        """No data connection is left, and none can be made: the session is of no use."""
        found = str(error) if error else "end of stream"
        self.driver.lost(LinkError("every data connection of the link was closed", found=found))
