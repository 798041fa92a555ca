"""Targets of fuzzing: each takes any bytes, and lets nothing out but what the protocol promises.

The tests run them under hypothesis for seconds, ``tools/fuzz.py`` for as long as one likes. A target raises
``AssertionError`` where a promise is broken, and any other exception is a finding too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import orjson
import xxhash

from prfaas_net.errors import PrfaasError, error_from_wire
from prfaas_net.kv import ChunkTable, checksum
from prfaas_net.wire import (
    HEADER_BYTES,
    Acceptor,
    Dialer,
    Frame,
    FrameParser,
    FrameType,
    Header,
    Hello,
    ReceivingSession,
    SendingSession,
    Session,
    Ticket,
    TicketSigner,
)
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.frames import MAX_CONTROL_BYTES
from tests.wire.pair import KEY, Pair, random_bytes

__all__ = ["TARGETS", "honest_streams", "mutate"]

TABLE = ChunkTable([100, 1, 300, 77])
SOURCE = random_bytes(TABLE.total_bytes)
HELLO = Hello(session="5" * 32, lane=1, node="p0", boot_id="boot", nonce="6" * 32)


# -- honest traffic, to be mutated --------------------------------------------------------------------------------


@cache
def honest_streams() -> dict[str, bytes]:
    """What a whole honest session says on control in each direction, and a data connection, and a handshake."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    forward, backward, data = bytearray(), bytearray(), bytearray()

    def exchange() -> None:
        while True:
            to_receiver = b"".join(pair.sender.take_output(now=pair.now))
            to_sender = b"".join(pair.receiver.take_output(now=pair.now))
            if not to_receiver and not to_sender:
                return
            forward.extend(to_receiver)
            backward.extend(to_sender)
            pair.receiver.receive(to_receiver, now=pair.now)
            pair.sender.receive(to_sender, now=pair.now)

    exchange()
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {"first_token": 1}, now=pair.now)
    exchange()
    while (order := pair.pull()) is not None:
        payload = bytes(pair.sources[outgoing.handle][order.chunk])
        data += order.header(checksum(payload)) + payload
        pair.carry(order)
        exchange()
    dialer = Dialer(HELLO, KEY)
    hello = dialer.begin()
    (frame,) = FrameParser().feed(hello)
    welcome = _acceptor().receive(frame)
    (answer,) = FrameParser().feed(welcome)
    confirm = dialer.receive(answer)
    return {
        "forward": bytes(forward), "backward": bytes(backward), "data": bytes(data),
        "acceptor": hello + confirm, "dialer": welcome,
    }  # fmt: skip


def _frames(stream: bytes) -> Iterator[bytes]:
    while stream:
        end = HEADER_BYTES + int.from_bytes(stream[16:24], "little")
        yield stream[:end]
        stream = stream[end:]


def _reseal(frame: bytes, *, payload_too: bool) -> bytes:
    """The checksums made right again, so that a mutation gets past them."""
    fields = bytearray(frame[:56])
    payload = frame[HEADER_BYTES:]
    if payload_too:
        fields[16:24] = len(payload).to_bytes(8, "little")
        fields[40:48] = xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
    return bytes(fields) + xxhash.xxh3_64_intdigest(bytes(fields)).to_bytes(8, "little") + payload


def _numbered(frame: bytes, sequence: int) -> bytes:
    return _reseal(frame[:36] + sequence.to_bytes(4, "little") + frame[40:], payload_too=False)


INTERESTING = (0, 1, 7, 8, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TOKENS = (b"null", b"-1", b"1e999", b"[[[[[[", b"{}", b'""', b"18446744073709551616", b"true", b"\xff\xfe", b"NaN")


def mutate(stream: bytes, draw: random.Random) -> bytes:
    """Frames dropped, repeated, swapped, damaged, and damaged with right checksums; then cut."""
    frames = list(_frames(stream))
    for _ in range(draw.randint(1, 4)):
        if not frames:
            break
        place = draw.randrange(len(frames))
        frame = bytearray(frames[place])
        match draw.randrange(8):
            case 0:
                frames.insert(place, bytes(frame))
            case 1:
                del frames[place]
            case 2:
                other = draw.randrange(len(frames))
                frames[place], frames[other] = frames[other], frames[place]
            case 3:
                frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
                frames[place] = bytes(frame)
            case 4 | 5:
                start, width = draw.choice([(5, 1), (6, 2), (8, 8), (16, 8), (24, 8), (32, 4), (36, 4), (48, 8)])
                value = draw.choice(INTERESTING) & (256**width - 1)
                frame[start : start + width] = value.to_bytes(width, "little")
                frames[place] = _reseal(bytes(frame), payload_too=False)
            case 6 | 7:
                if len(frame) > HEADER_BYTES:
                    at = draw.randrange(HEADER_BYTES, len(frame))
                    frame[at : at + draw.randrange(12)] = draw.choice(TOKENS)
                frames[place] = _reseal(bytes(frame), payload_too=True)
    if draw.random() < 0.5:
        # Numbered anew, so that what follows a dropped or doubled frame is still listened to.
        frames = [
            _reseal(f[:36] + i.to_bytes(4, "little") + f[40:], payload_too=False) for i, f in enumerate(frames, 1)
        ]
    data = b"".join(frames)
    return data[: draw.randrange(len(data) + 1)] if draw.random() < 0.2 else data


# -- targets ------------------------------------------------------------------------------------------------------


def _pieces(data: bytes) -> list[list[bytes]]:
    """Whole, and byte at a time."""
    return [[data], [data[i : i + 1] for i in range(len(data))]]


def parser(data: bytes) -> None:
    """Frames or a PrfaasError, the same whole and byte at a time; never more than a frame in memory."""
    outcomes = []
    for pieces in _pieces(data):
        frames: list[tuple[int, bytes]] = []
        feeder = FrameParser(sequenced=False)
        error = None
        try:
            for piece in pieces:
                for frame in feeder.feed(piece):
                    frames.append((frame.type, frame.payload))
                assert 0 < feeder.missing <= MAX_CONTROL_BYTES
        except PrfaasError as caught:
            error = caught.code
        outcomes.append((frames, error))
    whole, bytewise = outcomes
    assert whole[0] == bytewise[0]
    # A stranger is found out at its first bytes if they come alone, and by its header's checksum if they do not.
    assert (whole[1] is None) == (bytewise[1] is None)


def header(data: bytes) -> None:
    """64 bytes are a header or a PrfaasError; a header packs into the same bytes."""
    padded = bytes(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    for raw in (padded, _reseal(padded, payload_too=False), _reseal(b"PFKV\x01" + padded[5:], payload_too=False)):
        try:
            found = Header.unpack(raw)
        except PrfaasError:
            continue
        assert found.pack() == raw


def bodies(data: bytes) -> None:
    """Any JSON as a HELLO, a ticket, an error: an object or a PrfaasError."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    assert isinstance(error_from_wire(body), PrfaasError)
    assert len(orjson.dumps(error_from_wire(body).to_wire())) < MAX_CONTROL_BYTES
    frame = Frame(Header(FrameType.OPEN, 0, 0, len(data), 0, 0, 0), data)
    try:
        parsed = frame.json()
    except PrfaasError:
        return
    for read in (Hello.from_json, _check_ticket):
        assert len(orjson.dumps(_refusal(read, parsed))) < MAX_CONTROL_BYTES


def _refusal(read: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> dict[str, Any]:
    """What a peer would be told of this body; nothing if there is nothing to say against it."""
    try:
        read(body)
    except PrfaasError as error:
        return error.to_wire()
    return {}


def _check_ticket(body: dict[str, Any]) -> None:
    TicketSigner(KEY).check(Ticket.from_json(body))


def bitmap(data: bytes) -> None:
    """Any report: chunks that exist, each new once, or a PrfaasError."""
    if len(data) < 3:
        return
    here = ChunkBitmap(1 + data[0])
    for first in (0, data[1], data[1] * 8):
        try:
            new = list(here.merge(first, data[2:]))
        except PrfaasError:
            continue
        assert len(set(new)) == len(new)
        assert all(chunk in here and chunk < here.n_chunks for chunk in new)
    assert here.count == sum(chunk in here for chunk in range(here.n_chunks))


def _acceptor() -> Acceptor:
    return Acceptor(node="d0", boot_id="boot", nonce="7" * 32, key=KEY)


def acceptor(data: bytes) -> None:
    """Nobody without the key is let in, and nothing but a PrfaasError comes out."""
    for pieces in _pieces(data):
        feeder, other = FrameParser(), _acceptor()
        refusal = b""
        try:
            for frame in chain.from_iterable(map(feeder.feed, pieces)):
                other.receive(frame)
        except PrfaasError as error:
            refusal = other.refuse(error) if other.hello is None else b""
        assert all(frame.type is FrameType.ERROR for frame in FrameParser().feed(refusal))
        # The proof is over the whole HELLO; only what carries no meaning, such as a flag of CONFIRM, may differ.
        assert other.hello in (None, HELLO)


def dialer(data: bytes) -> None:
    """The same of the other side."""
    for pieces in _pieces(data):
        feeder, other = FrameParser(), Dialer(HELLO, KEY)
        other.begin()
        try:
            for piece in pieces:
                for frame in feeder.feed(piece):
                    other.receive(frame)
        except PrfaasError:
            pass


def _settle(session: Session, now: float) -> None:
    """Whatever happened: what it says can be read by any parser, and it ends when its time is up."""
    speech = b"".join(session.take_output(now=now))
    session.take_events()
    list(FrameParser(sequenced=True).feed(speech))
    for _ in range(200):
        at = session.next_deadline()
        if at is None:
            break
        now = max(now, at)
        session.handle_timeout(now=now)
        session.take_output(now=now)
        session.take_events()
    assert session.error is not None
    assert session.next_deadline() is None
    assert not session.take_output(now=now)


def receiving(data: bytes) -> None:
    """A receiving session never raises, whatever the control connection brings, and gives everything back."""
    for pieces in _pieces(data):
        pair = Pair()
        incoming, _ = pair.reserve(TABLE)
        session = pair.receiver
        for piece in pieces:
            session.receive(piece, now=pair.now)
        _settle(session, pair.now)
        assert incoming.owner is None
        pair.reservations.expire(now=pair.now + 1000)
        assert len(pair.reservations) == 0
        assert incoming.machine.ended


def landing(data: bytes) -> None:
    """A data connection: chunks inside the grant, or a PrfaasError; memory outside the views is not touched."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    pair.receiver.receive(honest_streams()["forward"][: _first_frame("forward")], now=pair.now)
    session: ReceivingSession = pair.receiver
    rest = data
    try:
        while len(rest) >= HEADER_BYTES:
            head, rest = Header.unpack(rest[:HEADER_BYTES]), rest[HEADER_BYTES:]
            place = session.admit(head, 1)
            payload, rest = rest[: head.payload_bytes], rest[head.payload_bytes :]
            if place is None:
                continue
            if len(payload) < head.payload_bytes:
                session.aborted(place)
                break
            if head.codec == 0:
                place.view[:] = payload
            session.landed(place, checksum(payload), now=pair.now)
    except PrfaasError as error:
        session.fail(error, now=pair.now)
    assert not incoming.landing
    for chunk in range(len(TABLE)):
        if chunk in incoming.landed:
            start = TABLE.offsets[chunk]
            held = memory[start : start + TABLE.lengths[chunk]].tobytes()
            assert checksum(held) == incoming.checksums[chunk]
    _settle(session, pair.now)


def _first_frame(name: str) -> int:
    return len(next(_frames(honest_streams()[name])))


def sending(data: bytes) -> None:
    """A sending session never raises, never believes a delivery that was not confirmed, and ends every transfer."""
    for resumable in (False, True):
        for pieces in _pieces(data):
            pair = Pair(link_grace_s=5.0 if resumable else 0.0)
            incoming, _ = pair.reserve(TABLE)
            outgoing = pair.open(incoming, SOURCE)
            session: SendingSession = pair.sender
            pair.make_ready(outgoing, [0, 1, 2, 3])
            session.seal(outgoing, {}, now=pair.now)
            for piece in pieces:
                session.receive(piece, now=pair.now)
                if (order := session.next_chunk(1, now=pair.now)) is not None:
                    assert order.chunk < len(TABLE)
            _settle(session, pair.now)
            assert outgoing.machine.ended or outgoing in session.orphans
            assert not outgoing.in_flight


TARGETS: dict[str, tuple[Callable[[bytes], None], str | None]] = {
    "parser": (parser, "forward"),
    "header": (header, "data"),
    "bodies": (bodies, None),
    "bitmap": (bitmap, None),
    "acceptor": (acceptor, "acceptor"),
    "dialer": (dialer, "dialer"),
    "receiving": (receiving, "forward"),
    "landing": (landing, "data"),
    "sending": (sending, "backward"),
}
"""Name, what takes the bytes, and which honest stream is worth mutating for it."""
