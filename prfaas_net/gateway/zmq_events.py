"""The gateway's ear at vLLM and SGLang engines: their KV events over ZeroMQ, told to the global manager.

An engine publishes numbered batches (PUB: topic, 8-byte number, payload) and, where it is set up so, keeps the last
ones for whoever missed some (ROUTER: asked for all from a number on). There is no snapshot. So:

* A *session* is one subscription. It begins with an empty mirror and the oldest batches that can be had again; what was
  stored before those is unknown, which costs hits and never claims one.
* A gap is filled from the buffer, from the last batch on that was taken in: only if that comes back unchanged is it the
  same engine. A gap that cannot be filled ends the session, and so do a number that comes twice, a lost connection (the
  engine may have restarted) and a payload that cannot be read. All the engine's entries are dropped with it.
* After some silence the buffer is asked too: the last batch before a silence can be lost like any other.

Every wait has a deadline, and memory is bounded by the receive queue and the size of a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prfaas_net.cache.engine_events import MAX_PAYLOAD_BYTES, decode_batch
from prfaas_net.cache.engine_events_mirror import EngineMirror
from prfaas_net.cache.events import CacheEvent
from prfaas_net.cache.manager import Outcome
from prfaas_net.errors import ConfigError, DeadlineError, LinkError, PrfaasError, ProtocolError

__all__ = ["EngineEvents", "EngineSource"]

log = logging.getLogger(__name__)

# Messages that wait for us; with the largest payload 256 MiB. A publisher drops what is beyond: a gap, replayed.
QUEUE_MESSAGES = 64
_END = b"\xff" * 8  # the number that ends a replay
_Frames = list[bytes]


@dataclass(frozen=True)
class EngineSource:
    """One publisher: an engine, or one data-parallel rank of it.

    Attributes:
        endpoint: of its PUB socket, such as ``tcp://10.0.0.7:5557``.
        replay_endpoint: of its ROUTER socket; empty where it has none.
        topic: what its topics begin with.
        reply_s: how long connecting, and each answer of a replay, may take.
        silence_s: after so long without a batch the buffer is asked for more.
        retry_s: between two sessions; doubled after each that brought nothing, up to 16 times as long.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    reply_s: float = 5.0
    silence_s: float = 5.0
    retry_s: float = 0.5


@dataclass
class _Session:
    """Where a subscription stands.

    Attributes:
        next_seq: the number expected next; None before the first batch.
        digest: of the last batch that was taken in.
        live_seq: the last number that came on the subscription itself.
    """

    sub: Any
    monitor: Any
    next_seq: int | None = None
    digest: bytes = b""
    live_seq: int = -1


def _zmq() -> Any:
    try:
        return importlib.import_module("zmq.asyncio")
    except ImportError:
        raise ConfigError(
            "KV events of engines cannot be read", expected="pyzmq", found="it is not installed",
            do="pip install 'prfaas-net[events]'",
        ) from None  # fmt: skip


class EngineEvents:
    """Follows engines, each in a task of its own.

    Args:
        engines: sources, each with the mirror of that engine.
        tell: hands an event to the manager, under the mirror's ``node_id``.

    Raises:
        ConfigError: pyzmq is not installed.
    """

    def __init__(
        self, engines: Sequence[tuple[EngineSource, EngineMirror]], tell: Callable[[str, CacheEvent], Outcome]
    ) -> None:
        self._asyncio = _zmq()
        self._zmq = importlib.import_module("zmq")
        self._context = self._asyncio.Context()
        self.followers = [_Follower(self._zmq, self._context, *engine, tell) for engine in engines]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen."""
        self._tasks = [asyncio.create_task(one.run(), name=one.source.endpoint) for one in self.followers]

    async def stop(self) -> None:
        """Stop listening, close every socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)


@dataclass
class _Follower:
    """One engine.

    Attributes:
        floor: replays begin here: after a batch that could not be read.
    """

    zmq: Any
    context: Any
    source: EngineSource
    mirror: EngineMirror
    tell: Callable[[str, CacheEvent], Outcome]
    floor: int = 0
    counters: dict[str, int] = field(
        default_factory=lambda: {"sessions": 0, "batches": 0, "replayed": 0, "gaps": 0, "refused": 0, "lost": 0}
    )

    async def run(self) -> None:
        """Session after session, until cancelled."""
        pause_s = self.source.retry_s
        while True:
            before = self.counters["batches"]
            try:
                self._apply(self.mirror.start())
                async with self._subscribed() as session:
                    await self._follow(session)
            except PrfaasError as error:
                log.warning("events of %s: %s", self.mirror.node_id, error.line())
            except Exception:
                log.exception("events of %s failed", self.mirror.node_id)
            finally:
                # Nothing is claimed between sessions.
                self.tell(self.mirror.node_id, self.mirror.start())
            useful = self.counters["batches"] > before
            pause_s = self.source.retry_s if useful else min(pause_s * 2, self.source.retry_s * 16)
            await asyncio.sleep(pause_s)

    # -- sessions ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _subscribed(self) -> AsyncIterator[_Session]:
        zmq = self.zmq
        with self._socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
            # A host that is gone without a word is noticed, too.
            sub.setsockopt(zmq.HEARTBEAT_IVL, int(self.source.reply_s * 500))
            sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self.source.reply_s * 1000))
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                sub.connect(self.source.endpoint)
                session = _Session(sub, monitor)
                if not await monitor.poll(self.source.reply_s * 1000):
                    raise DeadlineError("an engine's events cannot be reached", found=self.source.endpoint)
                await monitor.recv_multipart()
                self.counters["sessions"] += 1
                yield session
            finally:
                sub.disable_monitor()
                monitor.close(linger=0)

    def _socket(self, kind: int) -> Any:
        sock = self.context.socket(kind)
        sock.setsockopt(self.zmq.LINGER, 0)
        sock.set_hwm(QUEUE_MESSAGES)
        sock.setsockopt(self.zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)  # whoever sends more is disconnected
        return sock

    async def _follow(self, session: _Session) -> None:
        """Until something is out of order.

        Raises:
            PrfaasError: what that was.
        """
        await self._replay(session)
        poller = self.zmq.asyncio.Poller()
        for sock in (session.sub, session.monitor):
            poller.register(sock, self.zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(self.source.silence_s * 1000))
            # The monitor first: what came after the connection was lost is another engine's.
            if session.monitor in ready:
                self._gone()
            elif session.sub in ready:
                frames = await session.sub.recv_multipart()
                if await session.monitor.poll(0):
                    self._gone()
                await self._live(session, frames)
            else:
                await self._replay(session)
            await asyncio.sleep(0)  # a flood must not keep the loop to itself

    def _gone(self) -> None:
        self.counters["lost"] += 1
        self.floor = 0
        raise LinkError("the connection to an engine's events was lost", found=self.source.endpoint)

    async def _live(self, session: _Session, frames: _Frames) -> None:
        """One message of the subscription."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counters["refused"] += 1
            raise ProtocolError("not a message of KV events", expected="topic, number, payload", found=len(frames))
        seq, payload = int.from_bytes(frames[1], "big"), frames[2]
        if seq <= session.live_seq:
            self.counters["refused"] += 1
            self.floor = 0
            raise ProtocolError("a number came twice", expected=f"more than {session.live_seq}", found=seq)
        session.live_seq = seq
        if session.next_seq is not None and seq > session.next_seq:
            self.counters["gaps"] += 1
            await self._replay(session)
            if session.next_seq < seq:
                raise ProtocolError("batches are missing", expected=session.next_seq, found=seq)
        if session.next_seq is None or seq == session.next_seq:
            self._take(session, seq, payload)

    # -- replays -----------------------------------------------------------------------------------------------------

    async def _replay(self, session: _Session) -> None:
        """Take in what the engine still has and we have not; again, as long as that brings something.

        Raises:
            PrfaasError: it does not answer in time, or is another engine.
        """
        if not self.source.replay_endpoint:
            return
        with self._socket(self.zmq.DEALER) as dealer:
            dealer.connect(self.source.replay_endpoint)
            before: int | None = -1
            while before != session.next_seq:
                before = session.next_seq
                if not await self._ask(session, dealer):
                    return

    async def _ask(self, session: _Session, dealer: Any) -> bool:
        """One question and its answers; True when some of them were left out on the way."""
        asked = self.floor if session.next_seq is None else session.next_seq - 1
        known, holes = session.next_seq is None, False
        await dealer.send_multipart([b"", asked.to_bytes(8, "big")])
        while True:
            if not await dealer.poll(self.source.reply_s * 1000):
                raise DeadlineError("an engine does not replay its events", found=self.source.replay_endpoint)
            frames = await dealer.recv_multipart()
            # Some versions put the topic before the number.
            if len(frames) not in (3, 4) or len(frames[-2]) != 8:
                self.counters["refused"] += 1
                raise ProtocolError("not an answer to a replay", expected="number, payload", found=len(frames))
            if frames[-2] == _END:
                return holes
            seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
            if not known:
                if seq != asked or _digest(payload) != session.digest:
                    raise ProtocolError("an engine does not know its last batch: it is another", found=seq)
                known = True
            elif session.next_seq is None or seq == session.next_seq:
                self._take(session, seq, payload)
                self.counters["replayed"] += 1
            else:
                holes = holes or seq > session.next_seq
            await asyncio.sleep(0)

    # -- batches -----------------------------------------------------------------------------------------------------

    def _take(self, session: _Session, seq: int, payload: bytes) -> None:
        """Into the mirror, and what comes of it to the manager."""
        self.floor = seq + 1  # if it cannot be read now, it cannot be read later
        try:
            for event in self.mirror.feed(decode_batch(payload)):
                self._apply(event)
        except PrfaasError:
            self.counters["refused"] += 1
            raise
        self.floor = 0
        session.next_seq, session.digest = seq + 1, _digest(payload)
        self.counters["batches"] += 1

    def _apply(self, event: CacheEvent) -> None:
        outcome = self.tell(self.mirror.node_id, event)
        if not outcome.applied:
            raise ProtocolError("the manager refused an engine's events", found=outcome.detail or outcome.resync)


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()
