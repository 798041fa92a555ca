"""What both ends of a session share: the control connection's parser, keep-alive, and the end.

A session is driven by its shell: bytes from the control connection go into :meth:`Session.receive`, bytes from
:meth:`Session.take_output` go out, :meth:`Session.take_events` tells the user, and when
:meth:`Session.next_deadline` has passed the shell calls :meth:`Session.handle_timeout`. Sessions are not
thread-safe; a shell with several threads holds one lock around every call.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas_net.errors import CorruptionError, LinkError, PrfaasError, ProtocolError, error_from_wire
from prfaas_net.wire.events import Event, PeerDraining, SessionLost
from prfaas_net.wire.frames import Flags, Frame, FrameParser, FrameType, encode

__all__ = ["Session", "Timers"]

_STAMP = struct.Struct("<d")
# Frames that move nothing (pings, answers to them, notices), in any second. An honest peer says a handful.
MAX_IDLE_FRAMES = 200


@dataclass(frozen=True)
class Timers:
    """How long a session waits for what.

    Attributes:
        ping_interval_s: a ping leaves when nothing else was sent for so long.
        dead_after_s: the peer is dead when nothing came from it for so long. Several pings must have had the
            time to be answered, also behind a full queue of a slow link.
        lane_stall_s: a data connection none of whose chunks was acknowledged for so long is given up; its chunks go
            again on the others.
        stall_after_s: a transfer none of whose sent chunks was acknowledged for so long has failed.
    """

    ping_interval_s: float = 1.0
    dead_after_s: float = 10.0
    lane_stall_s: float = 5.0
    stall_after_s: float = 20.0


class Session(ABC):
    """Base of :class:`~prfaas_net.wire.sending.SendingSession` and ``ReceivingSession``."""

    def __init__(self, *, timers: Timers, now: float) -> None:
        self.timers = timers
        self.error: PrfaasError | None = None
        self.rtt_s: float | None = None
        self.draining = False
        self._parser = FrameParser(sequenced=True)
        self._sequence = 1
        self._output: list[bytes] = []
        self._events: list[Event] = []
        self._heard_at = now
        self._said_at = now
        self._idle_frames = 0
        self._idle_since = now

    # -- for the shell ------------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, *, now: float) -> None:
        """Bytes from the control connection. A peer that breaks the protocol ends the session, never raises."""
        if self.error is not None:
            return
        self._heard_at = now
        try:
            for frame in self._parser.feed(data):
                if self.error is None:  # an ERROR frame may have ended it
                    self._receive_frame(frame, now=now)
        except CorruptionError as error:
            # The network's doing, not the peer's: give the connections up, and let the transfers go on with others.
            self.lost(error, now=now)
        except PrfaasError as error:
            self.fail(error, now=now)

    def take_output(self, *, now: float) -> list[bytes]:
        """Bytes to write to the control connection, in order."""
        self._before_output()
        output, self._output = self._output, []
        if output:
            self._said_at = now
        return output

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def has_news(self) -> bool:
        """Whether something was written, or has happened, that should not wait. (Acknowledgements may.)"""
        return bool(self._output or self._events)

    def next_deadline(self) -> float | None:
        """When :meth:`handle_timeout` has something to do, or None once the session is over."""
        if self.error is not None:
            return None
        own = min(self._heard_at + self.timers.dead_after_s, self._said_at + self.timers.ping_interval_s)
        transfers = self._transfer_deadline()
        return own if transfers is None else min(own, transfers)

    def handle_timeout(self, *, now: float) -> None:
        """Ping, notice a dead peer, end transfers whose time is up."""
        if self.error is not None:
            return
        if now >= self._heard_at + self.timers.dead_after_s:
            self.lost(LinkError(f"nothing came from the peer for {self.timers.dead_after_s:g} s"), now=now)
            return
        if now >= self._said_at + self.timers.ping_interval_s:
            self._write(FrameType.PING, _STAMP.pack(now), flags=Flags.OPTIONAL)
            self._said_at = now
        self._end_overdue(now=now)

    def lost(self, error: PrfaasError, *, now: float, final: bool = False) -> None:
        """The connections died; nothing can be said to the peer any more.

        Args:
            final: one of the two sides wanted it so; there is no use in trying again.
        """
        if self.error is None:
            self._output.clear()
            self._end(error, now=now, final=final)

    def fail(self, error: PrfaasError, *, now: float) -> None:
        """End the session and tell the peer why."""
        if self.error is None:
            self._write_json(FrameType.ERROR, error.to_wire())
            self._end(error, now=now, final=True)

    def go_away(self, reason: str) -> None:
        """Ask the peer for no new transfers; those under way go on."""
        self._write_json(FrameType.GOAWAY, {"reason": reason})

    # -- for the two ends ---------------------------------------------------------------------------------------

    def _end(self, error: PrfaasError, *, now: float, final: bool) -> None:
        self.error = error
        self._lose_transfers(error, now=now, final=final)
        self._events.append(SessionLost(error, final))

    def _write(
        self,
        kind: FrameType,
        payload: bytes = b"",
        *,
        transfer: int = 0,
        chunk: int = 0,
        flags: Flags = Flags.NONE,
    ) -> None:
        frame = encode(kind, payload, transfer=transfer, chunk=chunk, flags=flags, sequence=self._sequence)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._output.append(frame)

    def _write_json(self, kind: FrameType, body: dict[str, Any], *, transfer: int = 0) -> None:
        self._write(kind, orjson.dumps(body), transfer=transfer)

    def _receive_frame(self, frame: Frame, *, now: float) -> None:
        match frame.type:
            case FrameType.PING:
                self._count_idle(now=now)
                self._write(FrameType.PONG, frame.payload, flags=Flags.OPTIONAL)
            case FrameType.PONG:
                self._count_idle(now=now)
                self._measure_rtt(frame.payload, now=now)
            case FrameType.GOAWAY:
                self._count_idle(now=now)
                self.draining = True
                self._events.append(PeerDraining(str(frame.json().get("reason", ""))[:500]))
            case FrameType.ERROR:
                self.lost(error_from_wire(frame.json()), now=now, final=True)
            case _:
                self._receive_transfer_frame(frame, now=now)

    def _count_idle(self, *, now: float) -> None:
        if now >= self._idle_since + 1.0:
            self._idle_since, self._idle_frames = now, 0
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES:
            raise ProtocolError("too many pings", expected=f"at most {MAX_IDLE_FRAMES} a second")

    def _measure_rtt(self, stamp: bytes, *, now: float) -> None:
        # The stamp is our own, but it comes from the peer: a nonsense value must not become a nonsense RTT.
        if len(stamp) == _STAMP.size:
            elapsed_s = now - _STAMP.unpack(stamp)[0]
            if 0 <= elapsed_s <= self.timers.dead_after_s:
                self.rtt_s = elapsed_s

    @staticmethod
    def _unexpected(frame: Frame) -> ProtocolError:
        return ProtocolError("unexpected frame", found=frame.type.name)

    @abstractmethod
    def _receive_transfer_frame(self, frame: Frame, *, now: float) -> None: ...

    @abstractmethod
    def _transfer_deadline(self) -> float | None: ...

    @abstractmethod
    def _end_overdue(self, *, now: float) -> None: ...

    @abstractmethod
    def _lose_transfers(self, error: PrfaasError, *, now: float, final: bool) -> None: ...

    @abstractmethod
    def _before_output(self) -> None:
        """A chance to add what was held back for batching."""
