"""The two ends of a link in virtual time: the shells of ``prfaas_net.transport`` without sockets, threads and loop.

They drive the very same sans-IO sessions and follow the same rules: replace a lane that ended, come back with the
orphans when the session died, shut down what was given up, wait for the fence before memory is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from prfaas_net.errors import CorruptionError, LinkError, PrfaasError
from prfaas_net.kv import checksum
from prfaas_net.wire import (
    HEADER_BYTES,
    Acceptor,
    Dialer,
    Event,
    FrameParser,
    Header,
    Hello,
    IncomingTransfer,
    Landing,
    LaneGivenUp,
    OutgoingTransfer,
    ReceivingSession,
    Reservations,
    SendingSession,
    Session,
    SessionLost,
    TakenOver,
    TicketSigner,
    Timers,
)
from tests.simulation.world import Connection, Pipe, Weather

TIMERS = Timers(ping_interval_s=0.5, dead_after_s=3.0, lane_stall_s=1.5, stall_after_s=8.0)
WINDOW_S = 15.0
CONNECT_TIMEOUT_S = 1.0
LANES = 3


class End:
    """A session and its control pipe."""

    def __init__(self, weather: Weather, session: Session, control: Connection, out: Pipe, into: Pipe) -> None:
        self.weather, self.session, self.control, self._out = weather, session, control, out
        self.lanes: dict[int, Connection] = {}
        into.receive = self._received
        into.closed = lambda: self.lost(LinkError("the control connection was closed"))
        self._timer_at = 0.0
        self.on_event: Callable[[Event], None] = lambda event: None

    def _received(self, data: bytes) -> None:
        self.session.receive(data, now=self.weather.world.now)
        self.pump()

    def lost(self, error: PrfaasError) -> None:
        self.session.lost(error, now=self.weather.world.now)
        self.pump()

    def pump(self) -> None:
        """Say what there is to say, tell events, arm the timer."""
        world = self.weather.world
        for frame in self.session.take_output(now=world.now):
            self._out.write(frame)
        for event in self.session.take_events():
            if isinstance(event, SessionLost):
                for connection in (self.control, *self.lanes.values()):
                    connection.end()
            elif isinstance(event, LaneGivenUp):
                self._shut(event.lane)
            elif isinstance(event, TakenOver):
                for lane in event.lanes:
                    self._shut(lane)
            self.on_event(event)
        deadline = self.session.next_deadline()
        if deadline is not None and (self._timer_at <= world.now or deadline < self._timer_at):
            self._timer_at = deadline
            world.at(max(0.0, deadline - world.now), self._timeout)

    def _timeout(self) -> None:
        self.session.handle_timeout(now=self.weather.world.now)
        self.pump()

    def _shut(self, lane: int) -> None:
        if lane in self.lanes:
            self.lanes[lane].end()


class SimReceiver:
    """A listener."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.reservations = Reservations(TicketSigner(b"k" * 32))
        self.ends: dict[str, End] = {}
        self._expire()

    def _expire(self) -> None:
        self.reservations.expire(now=self.weather.world.now)
        self.weather.world.at(0.1, self._expire)

    def accept(self, connection: Connection) -> None:
        """A fresh connection: shake hands, then join its session."""
        nonce = f"{self.weather.world.random.getrandbits(128):032x}"
        acceptor = Acceptor(node="d0", boot_id="boot-d", nonce=nonce, key=b"a shared key of ours")
        parser = FrameParser()

        def received(data: bytes) -> None:
            try:
                for frame in parser.feed(data):
                    connection.to_a.write(acceptor.receive(frame))
                    if acceptor.hello is not None:
                        self._join(acceptor.hello, connection)
            except PrfaasError:
                connection.end()

        connection.to_b.receive = received

    def _join(self, hello: Hello, connection: Connection) -> None:
        if hello.lane == 0:
            session = ReceivingSession(
                self.reservations, peer=hello.node, timers=TIMERS, now=self.weather.world.now, link_grace_s=WINDOW_S
            )
            end = End(self.weather, session, connection, connection.to_a, connection.to_b)
            self.ends[hello.session] = end
            end.pump()
            return
        found = self.ends.get(hello.session)
        if found is None or hello.lane in found.lanes or found.session.error is not None:
            connection.end()
            return
        found.lanes[hello.lane] = connection
        LaneReader(found, hello.lane, connection)


class LaneReader:
    """A receiving lane: bytes in, chunks landed. What ``ReceiveLane`` does with blocking reads."""

    def __init__(self, end: End, lane: int, connection: Connection) -> None:
        self._end, self._lane, self._connection = end, lane, connection
        assert isinstance(end.session, ReceivingSession)
        self._session = end.session
        self._landing: Landing | None = None
        self._parse = self._run()
        next(self._parse)
        self._over = False
        connection.to_b.receive = self._received
        connection.to_b.closed = self._closed

    def _received(self, data: bytes) -> None:
        if self._over:
            return
        try:
            for byte in (data[i : i + 1] for i in range(len(data))):
                self._parse.send(byte)
        except PrfaasError as error:
            if not isinstance(error, CorruptionError):
                self._session.fail(error, now=self._end.weather.world.now)
            self._closed()
            self._connection.end()
        self._end.pump()

    def _closed(self) -> None:
        if self._over:
            return
        self._over = True
        self._end.lanes.pop(self._lane, None)
        if self._landing is not None:
            self._session.aborted(self._landing)
        self._end.pump()

    def _run(self) -> Generator[None, bytes, None]:
        while True:
            head = b""
            while len(head) < HEADER_BYTES:
                head += yield
            header = Header.unpack(head)
            self._landing = self._session.admit(header, self._lane)
            for place in range(header.payload_bytes):
                byte = yield
                if self._landing is not None:
                    self._landing.view[place : place + 1] = byte
            if self._landing is not None:
                landing, self._landing = self._landing, None
                self._session.landed(landing, checksum(landing.view), now=self._end.weather.world.now)
            else:
                self._session.drained(header, now=self._end.weather.world.now)


class SimSender:
    """A link that is kept up."""

    def __init__(self, weather: Weather, receiver: SimReceiver) -> None:
        self.weather = weather
        self._receiver = receiver
        self.views: dict[OutgoingTransfer, list[memoryview]] = {}
        self.end: End | None = None
        self._dialling = False
        self._last_lane = 0
        self._session_id = ""
        self._busy: set[int] = set()
        self.gave_up = False

    @property
    def session(self) -> SendingSession | None:
        session = self.end.session if self.end is not None else None
        assert session is None or isinstance(session, SendingSession)
        return session

    # -- dialling -----------------------------------------------------------------------------------------------

    def dial(self, lane: int, ok: Callable[[Connection], None], failed: Callable[[], None]) -> None:
        """Connect and shake hands; exactly one of the two is called."""
        draw = self.weather.world.random
        if lane == 0:
            self._session_id = f"{draw.getrandbits(128):032x}"
        hello = Hello(self._session_id, lane, "p0", "boot-p", f"{draw.getrandbits(128):032x}")
        dialer = Dialer(hello, b"a shared key of ours")
        parser, connection = FrameParser(), Connection(self.weather)
        settled = False

        def settle(result: Callable[[], None]) -> None:
            nonlocal settled
            if not settled:
                settled = True
                result()

        def fail() -> None:
            connection.end()
            settle(failed)

        def received(data: bytes) -> None:
            try:
                for frame in parser.feed(data):
                    answer = dialer.receive(frame)
                    if answer:
                        connection.to_b.write(answer)
                    if dialer.peer is not None:
                        settle(partial(ok, connection))
            except PrfaasError:
                fail()

        connection.to_a.receive, connection.to_a.closed = received, fail
        self._receiver.accept(connection)
        connection.to_b.write(dialer.begin())
        self.weather.world.at(CONNECT_TIMEOUT_S, lambda: None if settled else fail())

    def connect(self, give_up_at: float) -> None:
        """A new session, again and again until the window is over."""

        def failed() -> None:
            if self.weather.world.now < give_up_at:
                self.weather.world.at(0.1, lambda: self.dial(0, self._connected, failed))
            else:
                self._give_up()

        self.dial(0, self._connected, failed)

    def _connected(self, control: Connection) -> None:
        old = self.session
        session = SendingSession(timers=TIMERS, now=self.weather.world.now, resumable=True)
        self.end = End(self.weather, session, control, control.to_b, control.to_a)
        self.end.on_event = self._event
        self._busy.clear()
        if old is not None:
            for transfer in old.orphans:
                if not transfer.machine.ended:
                    session.adopt(transfer)
            old.orphans.clear()
        self.end.pump()
        self._fill_lanes()

    def _give_up(self) -> None:
        self.gave_up = True
        if self.session is not None:
            for transfer in tuple(self.session.orphans):
                self.session.abort(transfer, LinkError("could not come back"), now=self.weather.world.now)

    def _event(self, event: Event) -> None:
        if isinstance(event, SessionLost):
            # After a final end it is the pool that dials again, for the next transfer.
            self.connect(self.weather.world.now + WINDOW_S)

    def _fill_lanes(self) -> None:
        if self._dialling or self.end is None or self.end.session.error is not None or len(self.end.lanes) >= LANES:
            return
        self._dialling = True
        self._last_lane += 1
        self.dial(self._last_lane, partial(self._lane_up, self.end, self._last_lane), self._lane_failed)

    def _lane_failed(self) -> None:
        self._dialling = False
        self.weather.world.at(0.1, self._fill_lanes)

    def _lane_up(self, end: End, number: int, connection: Connection) -> None:
        self._dialling = False
        if end is not self.end or end.session.error is not None:
            connection.end()
        else:
            end.lanes[number] = connection
            connection.to_a.receive = lambda data: None
            connection.to_a.closed = partial(self._lane_closed, end, number)
            self.kick()
        self._fill_lanes()

    def _lane_closed(self, end: End, number: int) -> None:
        end.lanes.pop(number, None)
        assert isinstance(end.session, SendingSession)
        end.session.lane_lost(number)
        end.pump()
        self.kick()
        self._fill_lanes()

    # -- sending ------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Every free lane pulls a chunk."""
        session = self.session
        if self.end is None or session is None:
            return
        for number, connection in tuple(self.end.lanes.items()):
            if number in self._busy or not connection.alive:
                continue
            order = session.next_chunk(number, now=self.weather.world.now)
            if order is None:
                break
            view = self.views[order.transfer][order.chunk]
            known = order.checksum
            if known is None:
                known = checksum(view)
                session.hashed(order, known)
            self._busy.add(number)
            connection.to_b.write(order.header(known) + bytes(view))
            self.weather.world.at(0.002, partial(self._free, number))
        self.end.pump()

    def _free(self, number: int) -> None:
        self._busy.discard(number)
        self.kick()


def still_writing(incoming: IncomingTransfer) -> bool:
    """Whether a lane is inside the transfer's memory: the fence before it may be used again."""
    return bool(incoming.landing)
