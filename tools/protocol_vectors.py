#!/usr/bin/env python3
"""Write the protocol's test vectors: what the bytes on the wire are, for an implementation in another language.

    python tools/protocol_vectors.py            # rewrite tests/wire/vectors/
    python tools/protocol_vectors.py --check    # exit 1 if they are out of date

Everything that is random on a real wire (nonces, session and transfer ids, keys) is fixed here. JSON bodies are shown
as the bytes that were signed or sent: key order and white space are the sender's choice, receivers must not depend on
them, and proofs and signatures are over the bytes as given.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import orjson

from prfaas_net.errors import AuthError
from prfaas_net.kv.chunks import ChunkTable, checksum, transfer_digest
from prfaas_net.wire import Acceptor, Dialer, Flags, FrameParser, FrameType, Header, Hello, Ticket, TicketSigner
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.frames import encode

DIRECTORY = Path(__file__).parent.parent / "tests" / "wire" / "vectors"
SHARED_KEY = b"correct horse battery staple"
TICKET_KEY = bytes(range(32))
TABLE = ChunkTable([100, 1, 4096, 100, 77])

Vector = dict[str, Any]


def ticket() -> Ticket:
    return Ticket(
        transfer_id="0123456789abcdef0123456789abcdef",
        boot_id="fedcba9876543210fedcba9876543210",
        endpoints=(("192.0.2.1", 9100), ("2001:db8::1", 9100)),
        total_bytes=TABLE.total_bytes,
        n_chunks=len(TABLE),
        table=TABLE.fingerprint,
        lifetime_s=30.0,
        manifest={"start_token": 0, "stop_token": 512},
    )


# -- frames -------------------------------------------------------------------------------------------------------


def control_frames() -> list[tuple[FrameType, bytes, dict[str, Any]]]:
    """One of each type that belongs to a session: payload, and header fields that are not 0."""
    error = AuthError("the ticket is not one of ours", do="ask for a new one", transfer="0123").to_wire()
    signed = TicketSigner(TICKET_KEY).sign(ticket()).to_json()
    seal = {
        "digest": f"{transfer_digest([1, 2, 3, 4, 5]):016x}",
        "bytes": TABLE.total_bytes,
        "body": {"first_token": 7},
    }
    return [
        (FrameType.OPEN, orjson.dumps({"ticket": signed}), {"transfer": 1}),
        (FrameType.OPENED, b"\x05", {"transfer": 1}),
        (FrameType.ACK, b"\x80\x01", {"transfer": 1, "chunk": 8}),
        (FrameType.NACK, b"", {"transfer": 1, "chunk": 3}),
        (FrameType.SEAL, orjson.dumps(seal), {"transfer": 1}),
        (FrameType.DONE, b"\x1f", {"transfer": 1}),
        (FrameType.ABORT, orjson.dumps(error), {"transfer": 1}),
        (FrameType.PROBE, orjson.dumps({"chunks": 4, "chunk_bytes": 1 << 20}), {"transfer": 2}),
        (FrameType.PING, bytes(8), {"flags": Flags.OPTIONAL}),
        (FrameType.PONG, bytes(8), {"flags": Flags.OPTIONAL}),
        (FrameType.GOAWAY, orjson.dumps({"reason": "shutting down"}), {}),
        (FrameType.ERROR, orjson.dumps(error), {}),
    ]


def frame_vector(name: str, data: bytes) -> Vector:
    """A frame as its fields, its payload and its bytes."""
    header, payload = Header.unpack(data), data[64:]
    vector: Vector = {
        "name": name,
        "type": header.type,
        "flags": header.flags,
        "transfer": header.transfer,
        "payload_bytes": header.payload_bytes,
        "offset": header.offset,
        "chunk": header.chunk,
        "sequence": header.sequence,
        "payload_xxh3": f"{header.payload_xxh3:016x}",
        "codec": header.codec,
        "header_xxh3": f"{int.from_bytes(data[56:64], 'little'):016x}",
    }
    if payload.startswith(b"{"):
        vector["json"] = orjson.loads(payload)
    return {**vector, "hex": data.hex()}


def frames() -> list[Vector]:
    vectors = [
        frame_vector(kind.name, encode(kind, payload, sequence=number, **fields))
        for number, (kind, payload, fields) in enumerate(control_frames(), 1)
    ]
    payload = bytes(range(100))
    for flags in (Flags.MORE, Flags.NONE):
        header = Header(FrameType.DATA, flags, 1, 100, 4197, 3, checksum(payload))
        vectors.append(frame_vector(f"DATA {flags.name}", header.pack() + payload))
    return vectors


def refused_frames() -> list[Vector]:
    """Bytes that a control connection of a session must not take, and the error's code."""
    ping = encode(FrameType.PING, b"abc", sequence=1)
    cases = [
        ("another version", 21, _sealed(ping[:4] + b"\x02" + ping[5:])),
        ("header checksum", 23, ping[:63] + bytes([ping[63] ^ 1]) + ping[64:]),
        ("payload checksum", 23, ping[:-1] + b"d"),
        ("length of 2^63", 20, Header(FrameType.OPEN, 0, 0, 2**63, 0, 0, 0, 1).pack()),
        ("control payload over 1 MiB", 20, Header(FrameType.OPEN, 0, 0, (1 << 20) + 1, 0, 0, 0, 1).pack()),
        ("unknown critical type", 20, Header(99, 0, 0, 0, 0, 0, 0, 1).pack()),
        ("data on a control connection", 20, Header(FrameType.DATA, 0, 1, 1, 0, 0, 0, 1).pack() + b"x"),
        ("out of sequence", 23, encode(FrameType.PING, b"abc", sequence=2)),
    ]
    return [{"name": name, "error_code": code, "hex": data.hex()} for name, code, data in cases]


def _sealed(frame: bytes) -> bytes:
    """The frame with its header's checksum made right."""
    return frame[:56] + checksum(frame[:56]).to_bytes(8, "little") + frame[64:]


# -- the rest -----------------------------------------------------------------------------------------------------


def handshake(key: bytes | None) -> Vector:
    """Four frames."""
    hello = Hello(session="5" * 32, lane=1, node="p0", boot_id="a" * 32, nonce="6" * 32)
    dialer = Dialer(hello, key)
    acceptor = Acceptor(node="d0", boot_id="b" * 32, nonce="7" * 32, key=key)
    said = [("HELLO", dialer.begin())]
    for name, side in (("WELCOME", acceptor), ("CONFIRM", dialer), ("READY", acceptor)):
        (frame,) = FrameParser().feed(said[-1][1])
        said.append((name, side.receive(frame)))
    (ready,) = FrameParser().feed(said[-1][1])
    dialer.receive(ready)
    assert dialer.peer is not None
    return {
        "key_hex": None if key is None else key.hex(),
        "frames": [{"name": name, "json": orjson.loads(data[64:]), "hex": data.hex()} for name, data in said],
    }


def signed_ticket() -> Vector:
    """The signature is HMAC-SHA256 over the ticket without it, as JSON with sorted keys and no white space."""
    signed = TicketSigner(TICKET_KEY).sign(ticket())
    body = ticket().to_json()
    del body["signature"]
    return {
        "key_hex": TICKET_KEY.hex(),
        "signed_bytes": orjson.dumps(body, option=orjson.OPT_SORT_KEYS).decode(),
        "ticket": signed.to_json(),
    }


def bitmaps() -> list[Vector]:
    """Chunks that have landed, and the whole bitmap; then what a report of the last change says."""
    vectors = []
    for n_chunks, landed, late in (
        (1, [], [0]),
        (8, [0, 7], [3]),
        (13, [0, 3, 12], [9, 10]),
        (100, list(range(50)), [99]),
    ):
        bitmap = ChunkBitmap(n_chunks)
        for chunk in landed:
            bitmap.add(chunk)
        _, whole = bitmap.take_report(whole=True) or (0, b"")
        for chunk in late:
            bitmap.add(chunk)
        first, report = bitmap.take_report() or (0, b"")
        vectors.append(
            {
                "n_chunks": n_chunks, "landed": landed, "whole_hex": whole.hex(),
                "then_landed": late, "report_first_chunk": first, "report_hex": report.hex(),
            }
        )  # fmt: skip
    return vectors


def digests() -> list[Vector]:
    """Chunk checksums, the transfer's digest over them, and the fingerprint of the chunk table."""
    vectors = []
    for chunks in ([b"a"], [b"a", b"b", b"c"], [bytes(100), bytes(range(256)), b"x" * 1000]):
        sums = [checksum(chunk) for chunk in chunks]
        vectors.append(
            {
                "chunks_hex": [chunk.hex() for chunk in chunks],
                "lengths": [len(chunk) for chunk in chunks],
                "table_fingerprint": ChunkTable([len(chunk) for chunk in chunks]).fingerprint,
                "xxh3_64": [f"{value:016x}" for value in sums],
                "digest": f"{transfer_digest(sums):016x}",
            }
        )
    return vectors


def files() -> dict[str, Any]:
    """Each file's content."""
    return {
        "frames.json": frames(),
        "refused.json": refused_frames(),
        "handshake.json": {"without_key": handshake(None), "with_key": handshake(SHARED_KEY)},
        "ticket.json": signed_ticket(),
        "bitmaps.json": bitmaps(),
        "digests.json": digests(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the vectors are up to date")
    check = parser.parse_args().check
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, content in files().items():
        path, text = DIRECTORY / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(stale)}" if stale else "up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
