"""Frames: the only thing that is ever written to a connection.

A frame is a header of 64 bytes and a payload. Everything is little-endian, lengths are bounded, and header and
payload each carry their own xxh3_64. The layout, as ``docs/protocol.md`` gives it:

    offset size field
         0    4 magic           "PFKV"
         4    1 version         1
         5    1 type            see FrameType
         6    2 flags           bit 0 OPTIONAL, bit 1 MORE, bit 2 FOLLOWS
         8    8 transfer        handle of the transfer within the session; 0 for frames of the session itself
        16    8 payload_bytes
        24    8 offset          DATA: of the chunk's first byte in the transfer, counted in chunk order
        32    4 chunk           DATA: number of the chunk; ACK: number of the bitmap's first chunk
        36    4 sequence        control frames of a session: 1, 2, 3, ... in each direction; else 0
        40    8 payload_xxh3    DATA: of the chunk's bytes, decoded
        48    8 codec           DATA: how the payload is encoded, 0 for not at all; else 0
        56    8 header_xxh3     over the 56 bytes before it
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import orjson
import xxhash

from prfaas_net.errors import CorruptionError, IncompatibleError, ProtocolError
from prfaas_net.kv.chunks import MAX_CHUNK_BYTES
from prfaas_net.units import MiB

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "MAX_CONTROL_BYTES",
    "VERSION",
    "Flags",
    "Frame",
    "FrameParser",
    "FrameType",
    "Header",
    "encode",
    "encode_json",
]

MAGIC = b"PFKV"
VERSION = 1
HEADER_BYTES = 64
# Room for the bitmap of the largest chunk table (2^20 chunks are 128 KiB), with a wide margin.
MAX_CONTROL_BYTES = MiB
# JSON bodies nest a few levels. Whoever walks through one recursively must not be at the mercy of its sender.
MAX_NESTING = 32

_FIELDS = struct.Struct("<4sBBHQQQIIQQ")
_SUM = struct.Struct("<Q")


class FrameType(IntEnum):
    """Types below 16 belong to the handshake, below 32 to transfers, the rest to the session."""

    HELLO = 1
    WELCOME = 2
    CONFIRM = 3
    READY = 4
    OPEN = 16
    OPENED = 17
    DATA = 18
    ACK = 19
    NACK = 20
    SEAL = 21
    DONE = 22
    ABORT = 23
    PROBE = 24
    PING = 32
    PONG = 33
    GOAWAY = 34
    ERROR = 35


class Flags(IntFlag):
    """``OPTIONAL``: whoever does not know the type skips the frame. ``MORE``: more chunks are ready, on whatever
    connection. ``FOLLOWS``: the next one comes right behind, on this connection."""

    NONE = 0
    OPTIONAL = 1
    MORE = 2
    FOLLOWS = 4


@dataclass(frozen=True, slots=True)
class Header:
    """The first 64 bytes of a frame, decoded and found sound."""

    type: int
    flags: int
    transfer: int
    payload_bytes: int
    offset: int
    chunk: int
    payload_xxh3: int
    sequence: int = 0
    codec: int = 0

    def pack(self) -> bytes:
        """The 64 bytes."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.type, self.flags, self.transfer, self.payload_bytes,
            self.offset, self.chunk, self.sequence, self.payload_xxh3, self.codec,
        )  # fmt: skip
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Decode and check 64 bytes.

        Raises:
            ProtocolError: this is not the KV stream protocol, or a length is out of bounds.
            IncompatibleError: it is another version of it.
            CorruptionError: the header's checksum does not match.
        """
        fields = _FIELDS.unpack_from(data)
        magic, version, kind, flags, transfer, n_bytes, offset, chunk, sequence, payload_xxh3, codec = fields
        if _SUM.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(bytes(data[: _FIELDS.size])):
            raise CorruptionError("a frame header does not match its checksum")
        if magic != MAGIC:
            raise ProtocolError("this is not a KV stream", expected=MAGIC, found=magic, do="check the port")
        if version != VERSION:
            raise IncompatibleError(
                "the peer speaks another version of the KV stream", expected=VERSION, found=version,
                do="run versions of prfaas-net that share a protocol version",
            )  # fmt: skip
        limit = MAX_CHUNK_BYTES if kind == FrameType.DATA else MAX_CONTROL_BYTES
        if n_bytes > limit:
            raise ProtocolError("a frame is too long", expected=f"at most {limit} bytes", found=n_bytes)
        return cls(kind, flags, transfer, n_bytes, offset, chunk, payload_xxh3, sequence, codec)


def encode(
    kind: FrameType,
    payload: bytes = b"",
    *,
    transfer: int = 0,
    chunk: int = 0,
    flags: Flags = Flags.NONE,
    sequence: int = 0,
) -> bytes:
    """A whole control frame."""
    checksum = xxhash.xxh3_64_intdigest(payload)
    return Header(kind, flags, transfer, len(payload), 0, chunk, checksum, sequence).pack() + payload


def encode_json(kind: FrameType, body: dict[str, Any]) -> bytes:
    """A control frame whose payload is a JSON object."""
    return encode(kind, orjson.dumps(body))


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole control frame, payload verified."""

    header: Header
    payload: bytes

    @property
    def type(self) -> FrameType:
        return FrameType(self.header.type)

    def json(self) -> dict[str, Any]:
        """The payload as a JSON object.

        Raises:
            ProtocolError: it is none.
        """
        try:
            body = orjson.loads(self.payload)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"the body of {self.type.name} is not JSON", found=str(error)) from error
        if not isinstance(body, dict):
            raise ProtocolError(f"the body of {self.type.name} is not an object", found=type(body).__name__)
        if self.payload.count(b"[") + self.payload.count(b"{") > MAX_NESTING and _nests_too_deep(body):
            raise ProtocolError(f"the body of {self.type.name} nests too deep", expected=f"at most {MAX_NESTING}")
        return body


def _nests_too_deep(body: dict[str, Any]) -> bool:
    level: list[Any] = [body]
    for _ in range(MAX_NESTING):
        parts = [part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer)]
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


_KNOWN = frozenset(FrameType)


class FrameParser:
    """Bytes of a control connection in, whole frames out.

    Holds at most one frame: a header and ``MAX_CONTROL_BYTES``. Unknown optional frames are skipped; anything
    else that is wrong raises, and the parser must not be used after that.

    Args:
        sequenced: frames must be numbered without a gap, as those of a session are: what is lost, repeated or out of
            order on the way is then noticed even if each frame is sound in itself.
    """

    def __init__(self, *, sequenced: bool = False) -> None:
        self._sequenced = sequenced
        self._next_sequence = 1
        self._buffer = bytearray()
        self._header: Header | None = None

    @property
    def missing(self) -> int:
        """Bytes that would complete the header, or the frame, that is being read."""
        total = HEADER_BYTES if self._header is None else self._header.payload_bytes
        return total - len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Take bytes as they came and yield the frames they complete.

        Raises:
            ProtocolError, IncompatibleError, CorruptionError: the peer is not worth listening to any more.
        """
        self._buffer += data
        while True:
            if self._header is None:
                # A stranger is told at once, not when 64 bytes have dripped in. (Once a session is established there
                # are no strangers, only damage.)
                head = bytes(self._buffer[: len(MAGIC)])
                if not self._sequenced and not MAGIC.startswith(head):
                    raise ProtocolError("this is not a KV stream", expected=MAGIC, found=head, do="check the port")
                if len(self._buffer) < HEADER_BYTES:
                    return
                self._header = self._accept(Header.unpack(self._buffer))
                del self._buffer[:HEADER_BYTES]
            header = self._header
            if len(self._buffer) < header.payload_bytes:
                return
            payload = bytes(self._buffer[: header.payload_bytes])
            del self._buffer[: header.payload_bytes]
            self._header = None
            if xxhash.xxh3_64_intdigest(payload) != header.payload_xxh3:
                raise CorruptionError("a control frame does not match its checksum", frame=header.type)
            if header.type in _KNOWN:
                yield Frame(header, payload)

    def _accept(self, header: Header) -> Header:
        if self._sequenced and header.sequence != self._next_sequence:
            raise CorruptionError(
                "a control frame is missing or repeated", expected=self._next_sequence, found=header.sequence
            )
        self._next_sequence = (self._next_sequence + 1) & 0xFFFFFFFF
        if header.type == FrameType.DATA:
            raise ProtocolError("a data frame on a control connection")
        if header.type not in _KNOWN and not header.flags & Flags.OPTIONAL:
            raise ProtocolError(
                "a frame of unknown type that must not be skipped",
                expected="a type of protocol version 1",
                found=header.type,
            )
        return header
