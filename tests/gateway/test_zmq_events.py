"""KV events over real ZeroMQ sockets on loopback: what an engine holds is known, and nothing that it may not hold."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from prfaas_net.cache.engine_events import MAX_PAYLOAD_BYTES
from prfaas_net.cache.engine_events_mirror import EngineMirror
from prfaas_net.cache.events import CacheEvent
from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager, Outcome
from prfaas_net.errors import ConfigError
from prfaas_net.gateway.zmq_events import QUEUE_MESSAGES, EngineEvents, EngineSource
from tests.waiting import until

BLOCK = 4
TOKENS = list(range(40))  # 10 blocks
KEYS = prefix_keys(PrefixScope("layout", BLOCK), TOKENS)


def store(first: int, last: int | None = None) -> list[Any]:
    """The event for blocks of TOKENS; block i is called i + 1."""
    stop = first + 1 if last is None else last
    names = [i + 1 for i in range(first, stop)]
    return ["BlockStored", names, first or None, TOKENS[first * BLOCK : stop * BLOCK], BLOCK]


def remove(*blocks: int) -> list[Any]:
    return ["BlockRemoved", [i + 1 for i in blocks]]


class Publisher:
    """An engine's side: numbers, sends and keeps batches; answers replays."""

    def __init__(
        self, context: Any, *, ports: tuple[int, int] = (0, 0), kept: int = 1000, topics: bool = False
    ) -> None:
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.seq, self.topics, self.asked = 0, topics, list[int]()
        for sock, port in zip((self.pub, self.router), ports, strict=True):
            sock.setsockopt(zmq.LINGER, 0)
            sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.task = asyncio.create_task(self._serve())

    @property
    def endpoints(self) -> tuple[str, str]:
        return self.pub.getsockopt_string(zmq.LAST_ENDPOINT), self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def ports(self) -> tuple[int, int]:
        one, two = (int(endpoint.rsplit(":", 1)[1]) for endpoint in self.endpoints)
        return one, two

    async def publish(self, *events: list[Any], lost: bool = False) -> None:
        """``lost``: kept for replays, but never sent."""
        payload = msgpack.packb([float(self.seq), list(events), 0])
        self.buffer.append((self.seq, payload))
        if not lost:
            await self.send(self.seq, payload)
        self.seq += 1

    async def send(self, seq: int, payload: bytes) -> None:
        await self.pub.send_multipart([b"kv@here@m", seq.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        extra = [b"kv@here@m"] if self.topics else []
        while True:
            client, _, start = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, payload in list(self.buffer):
                if seq >= self.asked[-1]:
                    await self.router.send_multipart([client, b"", *extra, seq.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", *extra, b"\xff" * 8, b""])

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for sock in (self.pub, self.router):
            sock.close(linger=0)


class Listener:
    """Our side, and what the manager then answers."""

    def __init__(self, publisher: Publisher, *, replays: bool = True, silence_s: float = 30.0) -> None:
        self.manager = CacheManager("layout", BLOCK, EngineMirror("e", "layout", BLOCK).kinds)
        pub, router = publisher.endpoints
        source = EngineSource(pub, router if replays else "", "kv@", reply_s=2.0, silence_s=silence_s, retry_s=0.01)
        self.mirror = EngineMirror("e", "layout", BLOCK)
        self.events = EngineEvents([(source, self.mirror)], self._tell)
        self.counters = self.events.followers[0].counters

    def _tell(self, node_id: str, event: CacheEvent) -> Outcome:
        return self.manager.apply(node_id, "x", event, now=0)

    def blocks(self) -> int:
        """How many blocks of TOKENS are held from the start."""
        match = self.manager.match(KEYS, n_tokens=len(TOKENS) + 1).node("e")
        return match.rows_tokens // BLOCK if match else 0


@asynccontextmanager
async def listening(publisher: Publisher, **options: Any) -> AsyncIterator[Listener]:
    """A listener whose subscription has reached the publisher."""
    listener = Listener(publisher, **options)
    listener.events.start()
    try:
        await until(lambda: listener.counters["sessions"])
        # A subscription takes a moment to arrive; batches without events are sent until one comes through.
        while not listener.counters["batches"] - listener.counters["replayed"]:
            await publisher.publish()
            await asyncio.sleep(0.005)
        yield listener
    finally:
        await listener.events.stop()


@pytest.fixture
async def context() -> AsyncIterator[Any]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def publisher(context: Any) -> AsyncIterator[Publisher]:
    made = Publisher(context)
    yield made
    await made.close()


async def test_what_is_stored_is_known_until_it_is_removed(publisher: Publisher) -> None:
    async with listening(publisher) as listener:
        await publisher.publish(store(0, 6))
        await until(lambda: listener.blocks() == 6)
        await publisher.publish(remove(5, 4))
        await until(lambda: listener.blocks() == 4)
        await publisher.publish(["AllBlocksCleared"])
        await until(lambda: listener.manager.n_blocks == 0)
        assert listener.counters["sessions"] == 1


@pytest.mark.parametrize("topics", [False, True])
async def test_a_late_listener_hears_what_was_before(context: Any, topics: bool) -> None:
    """From batch 0 on, out of the engine's buffer, in both forms that answers have."""
    publisher = Publisher(context, topics=topics)
    for i in range(5):
        await publisher.publish(store(i))
    try:
        async with listening(publisher) as listener:
            assert listener.blocks() == 5
            assert publisher.asked[0] == 0
            assert listener.counters["replayed"] >= 5
    finally:
        await publisher.close()


async def test_what_the_buffer_has_lost_is_not_claimed(context: Any) -> None:
    """It keeps four batches: of blocks stored before those nothing is known, nor of those that follow them."""
    publisher = Publisher(context, kept=4)
    for i in range(8):
        await publisher.publish(store(i))
    listener = Listener(publisher)
    listener.events.start()
    try:
        await until(lambda: listener.counters["batches"] == 4)
        assert listener.manager.n_blocks == 0
        assert listener.mirror.counters["unplaced"] == 4
    finally:
        await listener.events.stop()
        await publisher.close()


async def test_a_gap_is_filled_from_the_buffer(publisher: Publisher) -> None:
    async with listening(publisher) as listener:
        await publisher.publish(store(0))
        await publisher.publish(store(1), lost=True)
        await publisher.publish(remove(0), lost=True)
        await publisher.publish(store(0, 3))
        await until(lambda: listener.blocks() == 3)
        assert (listener.counters["gaps"], listener.counters["sessions"]) == (1, 1)


async def test_a_gap_that_cannot_be_filled_costs_all_entries(publisher: Publisher) -> None:
    """Without a buffer: what was known is dropped, and what comes next is known."""
    async with listening(publisher, replays=False) as listener:
        await publisher.publish(store(0, 3))
        await until(lambda: listener.blocks() == 3)
        await publisher.publish(remove(0, 1, 2), lost=True)
        await publisher.publish(["AllBlocksCleared"])
        await until(lambda: listener.counters["gaps"] == 1 and listener.manager.n_blocks == 0)
        await until(lambda: listener.counters["sessions"] == 2)


async def test_the_last_batch_before_a_silence_is_not_lost(publisher: Publisher) -> None:
    async with listening(publisher, silence_s=0.05) as listener:
        await publisher.publish(store(0, 3))
        await until(lambda: listener.blocks() == 3)
        await publisher.publish(remove(2), lost=True)
        await until(lambda: listener.blocks() == 2)
        assert listener.counters["sessions"] == 1


async def test_an_engine_that_restarts_is_not_taken_for_the_old_one(context: Any) -> None:
    """The new one holds one block, under a number that the old one would have used next, too."""
    publisher = Publisher(context)
    async with listening(publisher) as listener:
        await publisher.publish(store(0, 5))
        await until(lambda: listener.blocks() == 5)
        ports, seq = publisher.ports, publisher.seq
        await publisher.close()
        await until(lambda: listener.manager.n_blocks == 0)
        publisher = Publisher(context, ports=ports)
        try:
            publisher.seq = seq
            await publisher.publish(store(0))
            await until(lambda: listener.blocks() == 1)
            assert listener.counters["lost"] == 1
            assert listener.counters["sessions"] == 2
        finally:
            await publisher.close()


async def test_a_buffer_with_another_history_is_another_engines(publisher: Publisher) -> None:
    """The batch that was taken in last is asked for again, and must be the same."""
    async with listening(publisher) as listener:
        await publisher.publish(store(0, 5))
        await until(lambda: listener.blocks() == 5)
        publisher.buffer.clear()
        publisher.buffer.append((publisher.seq - 1, msgpack.packb([9.0, [store(0)], 0])))
        publisher.seq += 1
        await publisher.publish()
        await until(lambda: listener.counters["sessions"] == 2 and listener.blocks() == 1)


async def test_a_number_that_comes_twice_costs_all_entries(publisher: Publisher) -> None:
    async with listening(publisher, replays=False) as listener:
        await publisher.publish(store(0, 5))
        await until(lambda: listener.blocks() == 5)
        await publisher.send(*publisher.buffer[-1])
        await until(lambda: listener.counters["refused"] == 1 and listener.manager.n_blocks == 0)


HOSTILE = {
    "not msgpack": b"\xc1",
    "deep nesting": b"\x91" * 100_000,
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a group that was not configured": msgpack.packb([0, [["BlockStored", [1], None, [1] * 4, 4, *[None] * 4, 5]]]),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_payload_costs_all_entries_once(publisher: Publisher, payload: bytes) -> None:
    """It stays in the engine's buffer: the next session begins after it."""
    async with listening(publisher) as listener:
        await publisher.publish(store(0, 5))
        await until(lambda: listener.blocks() == 5)
        publisher.buffer.append((publisher.seq, payload))
        await publisher.send(publisher.seq, payload)
        publisher.seq += 1
        await until(lambda: listener.counters["sessions"] == 2)
        assert (listener.counters["refused"], listener.blocks()) == (1, 0)
        await publisher.publish(store(0, 2))
        await publisher.publish(store(2))
        await until(lambda: listener.blocks() >= 2)


@pytest.mark.parametrize("frames", [[b"kv@"], [b"kv@", b"\x00" * 7, b""], [b"kv@", b"", b"", b""]])
async def test_a_message_of_other_frames_is_refused(publisher: Publisher, frames: list[bytes]) -> None:
    async with listening(publisher) as listener:
        await publisher.pub.send_multipart(frames)
        await until(lambda: listener.counters["refused"] == 1 and listener.counters["sessions"] == 2)


async def test_a_message_beyond_the_bound_is_never_held(publisher: Publisher) -> None:
    """The connection it comes on is closed while it arrives; the queue of others is short."""
    async with listening(publisher, replays=False) as listener:
        await publisher.send(publisher.seq, bytes(MAX_PAYLOAD_BYTES + 1))
        await until(lambda: listener.counters["lost"] == 1)
        assert listener.counters["refused"] == 0
        assert QUEUE_MESSAGES * MAX_PAYLOAD_BYTES <= 256 << 20


async def test_an_engine_that_does_not_replay_costs_a_deadline(context: Any) -> None:
    publisher = Publisher(context)
    publisher.task.cancel()  # its buffer answers nobody
    listener = Listener(publisher)
    follower = listener.events.followers[0]
    object.__setattr__(follower.source, "reply_s", 0.05)
    listener.events.start()
    try:
        await until(lambda: listener.counters["sessions"] >= 2)
        assert listener.manager.n_blocks == 0
    finally:
        await listener.events.stop()
        await publisher.close()


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Nobody listens on a port, and nobody else can begin to."""
    with socket.socket() as sock:
        deadline_s = time.monotonic() + 5.0
        while True:
            try:
                sock.bind(("127.0.0.1", port))
                break
            except OSError:  # ZeroMQ lets go of it in a thread of its own
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        yield


async def test_an_engine_that_is_not_there_costs_a_deadline(context: Any) -> None:
    publisher = Publisher(context)
    listener, (one, two) = Listener(publisher), publisher.ports
    await publisher.close()
    with taken(one), taken(two):
        await _finds_nobody(listener)


async def _finds_nobody(listener: Listener) -> None:
    follower = listener.events.followers[0]
    object.__setattr__(follower.source, "reply_s", 0.02)
    listener.events.start()
    try:
        await asyncio.sleep(0.1)
        assert listener.counters["sessions"] == 0
        assert listener.manager.n_blocks == 0
    finally:
        await listener.events.stop()


@pytest.mark.parametrize("frames", [[b"", b"\x00" * 7, b""], [b"x"], [b"", b"", b"", b"\x00" * 8, b""]])
async def test_an_answer_of_other_frames_is_refused(publisher: Publisher, frames: list[bytes]) -> None:
    async def lie() -> None:
        while True:
            client, _, _ = await publisher.router.recv_multipart()
            await publisher.router.send_multipart([client, *frames])

    publisher.task.cancel()
    await asyncio.gather(publisher.task, return_exceptions=True)
    publisher.task = asyncio.create_task(lie())
    listener = Listener(publisher)
    listener.events.start()
    try:
        await until(lambda: listener.counters["refused"] >= 2)
        assert listener.manager.n_blocks == 0
    finally:
        await listener.events.stop()


async def test_what_the_manager_refuses_ends_the_session(publisher: Publisher) -> None:
    async with listening(publisher) as listener:
        listener.manager.drop("e")  # as a gateway does that has changed to another model
        await publisher.publish(store(0, 3))
        await until(lambda: listener.counters["refused"] == 1)
        await until(lambda: listener.counters["sessions"] == 2)


async def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.raises(ConfigError, match=r"prfaas-net\[events\]"):
        EngineEvents([], lambda _node, _event: Outcome.APPLIED)
