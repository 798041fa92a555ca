"""Peers that mean harm: each is refused within a bound and counted, and an honest transfer beside it completes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from prfaas_net.errors import AuthError, BusyError, LinkError, PrfaasError, ProtocolError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, Security, SenderLink
from prfaas_net.transport.handshaking import dial
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import Acceptor, Dialer, Flags, Frame, FrameParser, FrameType, Header, Hello, Ticket
from prfaas_net.wire.frames import encode
from tests.faults.ends import Ends, start_transfer
from tests.transport.conftest import TIMERS
from tests.waiting import until

KEY = b"what honest peers know"
TABLE = ChunkTable.split(3_000_000, 100_000)
SMALL = ChunkTable.split(10_000, 1_000)
OPTIONS = LinkOptions(connections=2, connect_timeout_s=0.5)
# Honest dialers are patient: on a busy machine half a second is not long.
PATIENT = LinkOptions(connections=2, connect_timeout_s=5.0)


@pytest.fixture
async def listener() -> AsyncIterator[KvListener]:
    """With a shared key, and little patience for handshakes."""
    server = KvListener(identity=Identity("d0"), security=Security(KEY), options=OPTIONS, timers=TIMERS)
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()
    assert server.reservations == 0
    assert server.connections == 0


@pytest.fixture
async def honest(listener: KvListener) -> AsyncIterator[Ends]:
    """A transfer that is under way before the attack and ends after it, whole, on connections never replaced."""
    link = await SenderLink.connect(
        [listener.address], identity=Identity("p0"), security=Security(KEY), options=PATIENT, timers=TIMERS
    )
    ends = start_transfer(listener, link, TABLE)
    half = len(TABLE) // 2
    for chunk in range(half):
        ends.outgoing.ready(chunk)
    await until(lambda: ends.landed == half)
    yield ends
    for chunk in range(half, len(TABLE)):
        ends.outgoing.ready(chunk)
    ends.outgoing.seal({})
    await ends.delivered(within_s=5)
    assert link.connections == 2
    assert ends.outgoing.transfer.stats.lanes <= {1, 2}
    await link.close()


class Rogue:
    """An authenticated peer (somebody has the key) that then does as it likes."""

    def __init__(self, listener: KvListener) -> None:
        self.listener = listener
        self.session = secrets.token_hex(16)
        self.sequence = 0
        self.streams: list[Stream] = []

    async def join(self, lane: int = 0) -> Stream:
        """An honest handshake."""
        hello = Hello(self.session, lane, "rogue", "boot", secrets.token_hex(16))
        stream, _ = await dial(self.listener.address, hello, Security(KEY), OPTIONS)
        self.streams.append(stream)
        return stream

    def control(self, kind: int, payload: bytes = b"", **fields: int) -> bytes:
        """A sound control frame, rightly numbered; ``kind`` need not exist."""
        self.sequence += 1
        frame = encode(FrameType.PING, payload, sequence=self.sequence, transfer=fields.get("transfer", 0))
        header = replace(Header.unpack(frame[:64]), type=kind, flags=fields.get("flags", 0))
        return header.pack() + payload

    async def opened(self, ticket: Ticket, handle: int = 1) -> Stream:
        """A session that has presented a ticket; returns its control connection."""
        control = await self.join()
        await control.send(self.control(FrameType.OPEN, _json({"ticket": ticket.to_json()}), transfer=handle))
        return control

    def close(self) -> None:
        for stream in self.streams:
            stream.sock.close()


@pytest.fixture
def rogue(listener: KvListener) -> Iterator[Rogue]:
    peer = Rogue(listener)
    yield peer
    peer.close()


def _json(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body)


async def read_all(stream: Stream, *, within_s: float = 3.0) -> list[Frame]:
    """Every frame until the listener closes the connection, which it must do in time."""
    parser, frames = FrameParser(), []
    async with asyncio.timeout(within_s):
        with contextlib.suppress(ConnectionError):
            while data := await stream.receive(65536):
                frames += list(parser.feed(data))
    return frames


async def read_one(stream: Stream, kind: FrameType, *, within_s: float = 3.0) -> Frame:
    """The next frame of a kind."""
    parser = FrameParser()
    async with asyncio.timeout(within_s):
        while data := await stream.receive(parser.missing):
            for frame in parser.feed(data):
                if frame.type is kind:
                    return frame
    raise AssertionError(f"closed without {kind.name}")


def code_of(frame: Frame) -> int:
    code = frame.json()["code"]
    assert isinstance(code, int)
    return code


# -- who may come in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, b"a key that is not ours"], ids=["none", "wrong"])
async def test_no_or_wrong_credentials(listener: KvListener, honest: Ends, key: bytes | None) -> None:
    """Both sides say AuthError, and what to set."""
    with pytest.raises(AuthError, match=r"kv\.shared_key"):
        await SenderLink.connect([listener.address], identity=Identity("p1"), security=Security(key), options=OPTIONS)
    await until(lambda: listener.refused_connections == 1)


async def test_a_dialler_that_does_not_check_us_is_still_checked(listener: KvListener, honest: Ends) -> None:
    """Whoever has no key and goes on regardless of our proof gets ERROR with AuthError, and no further."""
    reader, writer = await asyncio.open_connection(*listener.address)
    hello = Hello("1" * 32, 0, "liar", "boot", "2" * 32)
    writer.write(Dialer(hello, None).begin() + encode(FrameType.CONFIRM, _json({"proof": "0" * 64})))
    async with asyncio.timeout(2):
        frames = list(FrameParser().feed(await reader.read()))
    assert [frame.type for frame in frames] == [FrameType.WELCOME, FrameType.ERROR]
    assert code_of(frames[1]) == AuthError.code
    await until(lambda: listener.refused_connections == 1)
    writer.close()


async def test_a_replayed_handshake(listener: KvListener, honest: Ends) -> None:
    """An eavesdropper's recording proves nothing: the listener's nonce is new for every connection."""
    hello = Hello("3" * 32, 0, "p0", "boot", "4" * 32)
    dialer = Dialer(hello, KEY)
    victim = Acceptor(node="d0", boot_id="boot", nonce="5" * 32, key=KEY)
    recorded = [dialer.begin()]
    (first,) = FrameParser().feed(recorded[0])
    (welcome,) = FrameParser().feed(victim.receive(first))
    recorded.append(dialer.receive(welcome))
    reader, writer = await asyncio.open_connection(*listener.address)
    writer.write(b"".join(recorded))
    async with asyncio.timeout(2):
        frames = list(FrameParser().feed(await reader.read()))
    assert frames[-1].type is FrameType.ERROR
    assert code_of(frames[-1]) == AuthError.code
    await until(lambda: listener.refused_connections == 1)
    writer.close()


async def test_a_data_connection_of_nobodys_session(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """Without a control connection of the same session a lane is closed."""
    stream = await rogue.join(lane=1)
    assert await read_all(stream) == []
    await until(lambda: listener.refused_connections == 1)


async def test_a_second_control_connection_takes_nothing_over(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """A session has one; whoever knows its id and the key cannot push the first one out."""
    first = await rogue.join()
    second = await rogue.join()
    assert await read_all(second) == []
    assert listener.refused_connections == 1
    await first.send(rogue.control(FrameType.PING, b"still here"))
    assert (await read_one(first, FrameType.PONG)).payload == b"still here"


# -- tickets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "0" * 64},
        {"total_bytes": 10_001},
        {"lifetime_s": 1e9},
        {"transfer_id": "f" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_forged_ticket(listener: KvListener, honest: Ends, rogue: Rogue, change: dict[str, Any]) -> None:
    """Any field changed: ABORT with AuthError, nothing opened, nothing reserved more than before."""
    victim = start_transfer(listener, await _link(listener), SMALL)
    stream = await rogue.opened(replace(victim.incoming.ticket, **change))
    answer = await read_one(stream, FrameType.ABORT)
    assert code_of(answer) == AuthError.code
    await _finish(victim)


async def test_another_transfers_id_in_a_ticket_of_ones_own(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """A good signature does not carry over to another transfer's id."""
    victim = start_transfer(listener, await _link(listener), SMALL)
    own = listener.reserve(SMALL, _memory(), lifetime_s=5)
    stream = await rogue.opened(replace(own.ticket, transfer_id=victim.incoming.ticket.transfer_id))
    assert code_of(await read_one(stream, FrameType.ABORT)) == AuthError.code
    await own.abort()
    await _finish(victim)


async def test_a_ticket_in_use_by_somebody_else(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """A stolen ticket is worth nothing while its owner holds it."""
    stream = await rogue.opened(honest.incoming.ticket)
    assert code_of(await read_one(stream, FrameType.ABORT)) == BusyError.code


async def test_a_used_ticket(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """Presented again after the transfer has ended: no second OPENED, and no byte is taken."""
    link = await _link(listener)
    done = start_transfer(listener, link, SMALL)
    done.seal()
    await done.delivered(within_s=3)
    await link.close()
    control = await rogue.opened(done.incoming.ticket)
    parser = FrameParser()
    frames = list(parser.feed(await control.receive(65536)))
    assert FrameType.OPENED not in [frame.type for frame in frames]
    lane = await rogue.join(lane=1)
    before = done.memory.copy()
    await lane.send(Header(FrameType.DATA, 0, 1, 1_000, 0, 0, 0).pack() + b"x" * 1_000)
    await asyncio.sleep(0.05)
    assert (done.memory == before).all()


# -- data connections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (Header(FrameType.DATA, 0, 1, 2**63, 0, 0, 0), "too long"),
        (Header(FrameType.DATA, 0, 1, 2**64 - 1, 0, 0, 0), "too long"),
        (Header(FrameType.DATA, 0, 1, 1_000, 2**63, 0, 0), "outside the grant"),
        (Header(FrameType.DATA, 0, 1, 1_000, 1_000, 0, 0), "outside the grant"),
        (Header(FrameType.DATA, 0, 1, 1_000, 10_000, 10, 0), "outside the grant"),
        (Header(FrameType.DATA, 0, 1, 1_000, 0, 2**32 - 1, 0), "outside the grant"),
        (Header(FrameType.DATA, 0, 1, 999, 0, 0, 0), "outside the grant"),
        (Header(FrameType.DATA, 0, 2, 1_000, 0, 0, 0), "never opened"),
        (Header(FrameType.DATA, 0, 2**64 - 1, 1_000, 0, 0, 0), "never opened"),
        (Header(FrameType.OPEN, 0, 1, 10, 0, 0, 0), "only data frames"),
        (Header(200, Flags.OPTIONAL, 1, 10, 0, 0, 0), "only data frames"),
    ],
    ids=[
        "length-2^63", "length-max", "offset-2^63", "moved", "past-the-end", "chunk-max", "short",
        "another-transfers-handle", "handle-max", "control-frame", "optional-frame",
    ],
)  # fmt: skip
async def test_data_that_was_not_granted(
    listener: KvListener, honest: Ends, rogue: Rogue, header: Header, what: str
) -> None:
    """The session ends with ProtocolError before a byte of payload is read; its reservation returns."""
    incoming = listener.reserve(SMALL, _memory(), lifetime_s=5)
    control = await rogue.opened(incoming.ticket)
    await read_one(control, FrameType.OPENED)
    lane = await rogue.join(lane=1)
    await lane.send(header.pack())
    frames = await read_all(control)
    assert frames[-1].type is FrameType.ERROR
    assert code_of(frames[-1]) == ProtocolError.code
    assert what in frames[-1].json()["message"] + str(frames[-1].json()["found"])
    with pytest.raises(ProtocolError, match=what):
        await incoming.landed()
    assert incoming.transfer.landed.count == 0
    await incoming.abort()


async def test_junk_on_a_data_connection_after_a_good_handshake(
    listener: KvListener, honest: Ends, rogue: Rogue
) -> None:
    """It costs that connection; the session's transfer waits for better ones, until its own time is up."""
    incoming = listener.reserve(SMALL, _memory(), lifetime_s=1.0)
    control = await rogue.opened(incoming.ticket)
    await read_one(control, FrameType.OPENED)
    lane = await rogue.join(lane=1)
    await lane.send(secrets.token_bytes(5_000))
    assert await read_all(lane) == []
    assert incoming.transfer.landed.count == 0
    async with asyncio.timeout(3):
        with pytest.raises(PrfaasError):
            await incoming.landed()
    await incoming.abort()


async def test_a_checksum_that_is_always_wrong(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """Four times the same chunk with bytes that do not match: CorruptionError, not an endless exchange."""
    incoming = listener.reserve(SMALL, _memory(), lifetime_s=5)
    control = await rogue.opened(incoming.ticket)
    await read_one(control, FrameType.OPENED)
    lane = await rogue.join(lane=1)
    for _ in range(6):
        await lane.send(Header(FrameType.DATA, 0, 1, 1_000, 0, 0, 12345).pack() + b"x" * 1_000)
    answer = await read_one(control, FrameType.ABORT)
    assert "came wrong 4 times" in answer.json()["message"]
    with pytest.raises(PrfaasError, match="came wrong 4 times"):
        await incoming.landed()
    await incoming.abort()


async def test_a_chunk_that_never_ends(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """A sender that stalls inside a chunk is shut out when the memory is wanted back; connections of the same number
    that belong to others are not."""
    incoming = listener.reserve(SMALL, _memory(), lifetime_s=5)
    control = await rogue.opened(incoming.ticket)
    await read_one(control, FrameType.OPENED)
    lane = await rogue.join(lane=1)
    await lane.send(Header(FrameType.DATA, 0, 1, 1_000, 0, 0, 0).pack() + b"x" * 10)
    await until(lambda: incoming.transfer.landing)
    async with asyncio.timeout(3):
        await incoming.abort()
    assert not incoming.transfer.landing
    assert await read_all(lane) == []


async def test_more_lanes_than_a_session_may_have(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """The 65th data connection of a session is closed, and the other 64 stay."""
    await rogue.join()
    before = listener.connections
    for lane in range(1, 65):
        await rogue.join(lane)
    one_too_many = await rogue.join(65)
    assert await read_all(one_too_many) == []
    assert listener.refused_connections == 1
    assert listener.connections == before + 64


# -- control connections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        (Header(250, 0, 0, 0, 0, 0, 0, 1), "unknown type"),
        (Header(FrameType.PING, 0, 0, 2**63, 0, 0, 0, 1), "too long"),
        (Header(FrameType.DATA, 0, 1, 100, 0, 0, 0, 1), "data frame on a control connection"),
        (Header(FrameType.HELLO, 0, 0, 0, 0, 0, 0x2D06800538D394C2, 1), "unexpected frame"),
        (Header(FrameType.SEAL, 0, 77, 0, 0, 0, 0x2D06800538D394C2, 1), "unexpected frame"),
        (Header(FrameType.DONE, 0, 2**64 - 1, 0, 0, 0, 0x2D06800538D394C2, 1), "unexpected frame"),
    ],
    ids=["unknown-critical", "length-2^63", "data", "handshake-again", "never-opened", "receivers-own"],
)
async def test_control_frames_that_no_state_allows(
    listener: KvListener, honest: Ends, rogue: Rogue, frame: Header, found: str
) -> None:
    """ERROR with the reason, then the end of the session."""
    control = await rogue.join()
    await control.send(frame.pack())
    frames = await read_all(control)
    assert frames[-1].type is FrameType.ERROR
    assert code_of(frames[-1]) == ProtocolError.code
    assert found in frames[-1].json()["message"]


async def test_unknown_optional_frames_are_no_reason_to_end(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """A newer peer may say what we do not understand."""
    control = await rogue.join()
    await control.send(rogue.control(250, b"news", flags=Flags.OPTIONAL) + rogue.control(FrameType.PING, b"x"))
    assert (await read_one(control, FrameType.PONG)).payload == b"x"


async def test_a_control_flood_that_is_never_read(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """Pings of a megabyte whose answers nobody fetches: the session is ended before they fill the memory."""
    control = await rogue.join()
    sock = control.sock
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def flood() -> int:
        sock.setblocking(True)
        sock.settimeout(3.0)
        sent = 0
        with contextlib.suppress(OSError):
            for _ in range(256):
                sock.sendall(rogue.control(FrameType.PING, bytes(1_000_000)))
                sent += 1
        return sent

    async with asyncio.timeout(8):
        sent = await asyncio.to_thread(flood)
    assert sent < 256, "everything was taken in, and answered into memory"
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 128
    await until(lambda: listener.connections == 3)


async def test_a_control_flood_that_is_read(listener: KvListener, honest: Ends, rogue: Rogue) -> None:
    """Fifty thousand pings as fast as they go: the session is ended after the first few hundred, with the reason."""
    control = await rogue.join()
    frames = b"".join(rogue.control(FrameType.PING, b"p") for _ in range(50_000))

    async def flood() -> None:
        with contextlib.suppress(OSError):
            await control.send(frames)

    flooding = asyncio.create_task(flood())
    answers = await read_all(control)
    async with asyncio.timeout(5):
        await flooding
    assert len(answers) < 1_000
    await until(lambda: listener.connections == 3)


@pytest.mark.parametrize("depth", [300, 900])
async def test_a_body_that_is_nested_deep(listener: KvListener, honest: Ends, rogue: Rogue, depth: int) -> None:
    """JSON of hundreds of brackets in a ticket: a typed refusal, no RecursionError, no traceback."""
    control = await rogue.join()
    nested = b"[" * depth + b"]" * depth
    ticket = replace(honest.incoming.ticket, manifest={})
    body = _json({"ticket": ticket.to_json()}).replace(b'"manifest":{}', b'"manifest":{"a":' + nested + b"}")
    await control.send(rogue.control(FrameType.OPEN, body, transfer=1))
    frames = await read_all(control)
    assert frames[-1].type is FrameType.ERROR
    assert code_of(frames[-1]) == ProtocolError.code


# -- connections that never become anything -------------------------------------------------------------------------


async def test_a_drip_of_single_bytes(listener: KvListener, honest: Ends) -> None:
    """One byte at a time, for ever, before the handshake is complete: closed after connect_timeout_s, and counted."""
    hello = Dialer(Hello("6" * 32, 0, "slow", "boot", "7" * 32), KEY).begin()
    reader, writer = await asyncio.open_connection(*listener.address)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for place in range(len(hello)):
                writer.write(hello[place : place + 1])
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(2):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    assert asyncio.get_running_loop().time() - started < 1.5
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.close()
    await until(lambda: listener.refused_connections == 1)
    assert isinstance(listener.last_refusal, LinkError)


def _half_open(address: tuple[str, int], count: int, sockets: list[socket.socket]) -> None:
    """So many connections that say nothing."""
    for _ in range(count):
        sock = socket.socket()
        sock.settimeout(10.0)
        sockets.append(sock)
        sock.connect(address)


def _open_limit() -> int:
    """How many half-open connections this process may make, both ends being its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(10_000, (hard if hard != resource.RLIM_INFINITY else 1 << 20) - 1_500) if soft else 0


async def test_ten_thousand_half_open_connections(listener: KvListener, honest: Ends) -> None:
    """At most a few hundred are ever held, all are gone within connect_timeout_s, all are counted; and while they
    last an honest dialler still gets in."""
    count = _open_limit()
    asyncio.get_running_loop().set_debug(False)  # a traceback for each of them would take most of the time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sockets: list[socket.socket] = []
    most_held = 0

    async def watch() -> None:
        nonlocal most_held
        while True:
            most_held = max(most_held, len(os.listdir("/proc/self/fd")) - len(sockets))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    attack = asyncio.create_task(asyncio.to_thread(_half_open, listener.address, count, sockets))
    await until(lambda: listener.refused_connections > count // 10, within_s=20)
    link = await _link(listener)  # in the middle of it
    ends = start_transfer(listener, link, SMALL)
    ends.seal()
    await ends.delivered(within_s=15)
    await attack
    await until(lambda: listener.refused_connections == count, within_s=15)
    watching.cancel()
    await link.close()
    assert most_held < 400
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 64
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


# -- helpers ------------------------------------------------------------------------------------------------------


def _memory() -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in SMALL.lengths]


async def _link(listener: KvListener) -> SenderLink:
    return await SenderLink.connect(
        [listener.address], identity=Identity("p2"), security=Security(KEY), options=PATIENT, timers=TIMERS
    )


async def _finish(ends: Ends) -> None:
    """The victim of an attack is delivered all the same."""
    ends.seal()
    await ends.delivered(within_s=8)
    link = ends.outgoing._link
    assert isinstance(link, SenderLink)
    await link.close()
