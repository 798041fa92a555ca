"""A network in virtual time: connections whose bytes arrive late, in pieces, damaged, twice, or not at all.

Everything is decided by one seed. A fault is applied to whole frames as they are written, since that is where a
protocol's meaning lies: at the boundary before a frame, inside it, and after it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas_net.wire import FrameType

FAULTS = ("drop", "delay", "duplicate", "reorder", "truncate", "corrupt", "reset-before", "reset-inside", "reset-after")
MAX_EVENTS = 100_000


class World:
    """Time, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.n_events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._ties), action))

    def run(self, *, until: float, done: Callable[[], bool]) -> None:
        """Let things happen until they are done or time is up; a livelock is an error."""
        while self._queue and self._queue[0][0] <= until and not done():
            self.now, _, action = heapq.heappop(self._queue)
            self.n_events += 1
            assert self.n_events < MAX_EVENTS, "livelock"
            action()


@dataclass
class Weather:
    """How bad the network is, and for how long; the rates of a run are drawn anew for each seed."""

    world: World
    quiet_after: float
    rates: dict[str, float] = field(default_factory=dict)
    aim: tuple[str, FrameType] | None = None
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def draw(cls, world: World, seed: int) -> Weather:
        """Some kinds of fault, each at some rate: mostly a few, now and then a storm. Besides, each seed aims one kind
        of fault at one type of frame, so that all pairs have their turn."""
        draw = world.random
        storm = draw.choice([0.02, 0.08, 0.25])
        rates = {kind: draw.random() * storm for kind in FAULTS if draw.random() < 0.5}
        types = list(FrameType)
        aim = FAULTS[seed % len(FAULTS)], types[seed // len(FAULTS) % len(types)]
        if aim[1] is FrameType.NACK:
            rates["corrupt"] = 0.1  # there is no NACK without damage
        return cls(world, world.now + draw.uniform(0.5, 6.0), rates, aim)

    def strike(self, frame: bytes) -> str | None:
        """The fault that hits this frame, if any."""
        if self.world.now >= self.quiet_after:
            return None
        kind = FrameType(frame[5])
        if self.aim is not None and self.aim[1] is kind and self.world.random.random() < 0.5:
            self.seen[self.aim[0], kind.name] += 1
            return self.aim[0]
        for fault, rate in self.rates.items():
            if self.world.random.random() < rate:
                self.seen[fault, kind.name] += 1
                return fault
        return None


class Connection:
    """Two pipes with one fate. ``a`` dialled, ``b`` accepted."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.alive = True
        self.to_b = Pipe(self)
        self.to_a = Pipe(self)

    def end(self) -> None:
        """Both ends learn that it is over, each after its own delay; what is on the way is lost."""
        if not self.alive:
            return
        self.alive = False
        for pipe in (self.to_a, self.to_b):
            self.weather.world.at(self.weather.world.random.uniform(0, 0.05), pipe.closed)


class Pipe:
    """One direction: frames in, pieces of bytes out, in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._free_at = 0.0
        self._held: bytes | None = None
        self.receive: Callable[[bytes], None] = lambda data: None
        self.closed: Callable[[], None] = lambda: None

    def write(self, frame: bytes) -> None:
        """Send one frame, or what the weather leaves of it."""
        if not self._connection.alive:
            return
        weather = self._connection.weather
        draw = weather.world.random
        kind = weather.strike(frame)
        if kind == "reset-before":
            self._connection.end()
            return
        if kind == "drop":
            return
        if kind == "reorder" and self._held is None:
            self._held = frame
            # If nothing follows, the frame was merely late.
            weather.world.at(0.2, self._release)
            return
        if kind == "corrupt":
            place = draw.randrange(len(frame))
            frame = frame[:place] + bytes([frame[place] ^ (1 << draw.randrange(8))]) + frame[place + 1 :]
        if kind in ("truncate", "reset-inside"):
            frame = frame[: draw.randrange(1, len(frame))]
        self._carry(frame, draw.uniform(0.5, 3.0) if kind == "delay" else 0.0)
        if kind == "duplicate":
            self._carry(frame, 0.0)
        self._release()
        if kind in ("truncate", "reset-after"):
            # The bytes before the end still arrive; the connection ends behind them.
            weather.world.at(max(0.0, self._free_at - weather.world.now) + 0.001, self._connection.end)
        elif kind == "reset-inside":
            self._connection.end()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._carry(held, 0.0)

    def _carry(self, data: bytes, extra_s: float) -> None:
        """Whole, in pieces, or byte by byte; never before what was sent earlier."""
        world = self._connection.weather.world
        draw = world.random
        size = draw.choice([len(data), len(data), 64, 7, 1]) if len(data) < 400 else draw.choice([len(data), 64])
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self._free_at = max(self._free_at, world.now + draw.uniform(0.001, 0.02) + extra_s)
            world.at(self._free_at - world.now, lambda piece=piece: self._arrive(piece))  # type: ignore[misc]

    def _arrive(self, piece: bytes) -> None:
        if self._connection.alive:
            self.receive(piece)
