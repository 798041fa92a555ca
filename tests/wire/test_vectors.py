"""The test vectors: what this implementation says and understands is what the files say."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash

from prfaas_net.errors import PrfaasError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.wire import FrameParser, FrameType, Header, Ticket, TicketSigner
from prfaas_net.wire.bitmap import ChunkBitmap

HERE = Path(__file__).parent
TOOL = HERE.parent.parent / "tools" / "protocol_vectors.py"


def load(name: str) -> Any:
    return json.loads((HERE / "vectors" / name).read_text(encoding="utf-8"))


def names(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def test_the_vectors_are_what_the_code_says() -> None:
    """A change of the wire shows as a change of these files, and never by accident."""
    result = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False, timeout=30
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}; run tools/protocol_vectors.py"


@pytest.mark.parametrize("vector", load("frames.json"), ids=names)
def test_a_frame_is_read_as_written(vector: dict[str, Any]) -> None:
    """Every field at its offset, both checksums, the payload; and packed again it is the same bytes."""
    data = bytes.fromhex(vector["hex"])
    header = Header.unpack(data)
    for field in ("type", "flags", "transfer", "payload_bytes", "offset", "chunk", "sequence", "codec"):
        assert getattr(header, field) == vector[field], field
    assert f"{header.payload_xxh3:016x}" == vector["payload_xxh3"] == xxhash.xxh3_64_hexdigest(data[64:])
    assert vector["header_xxh3"] == xxhash.xxh3_64_hexdigest(data[:56])
    assert data[:5] == b"PFKV\x01"
    assert len(data) == 64 + vector["payload_bytes"]
    assert header.pack() == data[:64]
    if header.type != FrameType.DATA:
        (frame,) = FrameParser().feed(data)
        assert frame.payload == data[64:]
        assert "json" not in vector or frame.json() == vector["json"]


def test_every_frame_type_has_a_vector() -> None:
    """Whoever adds a type adds its bytes."""
    handshakes = [frame["hex"] for frame in load("handshake.json")["with_key"]["frames"]]
    seen = {Header.unpack(bytes.fromhex(text)).type for text in handshakes}
    seen |= {vector["type"] for vector in load("frames.json")}
    assert seen == set(FrameType)


@pytest.mark.parametrize("vector", load("refused.json"), ids=names)
def test_a_bad_frame_is_refused_with_its_code(vector: dict[str, Any]) -> None:
    """Whole and byte at a time."""
    data = bytes.fromhex(vector["hex"])
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        parser = FrameParser(sequenced=True)
        with pytest.raises(PrfaasError) as caught:
            list(chain.from_iterable(map(parser.feed, pieces)))
        assert caught.value.code == vector["error_code"]


@pytest.mark.parametrize("which", ["without_key", "with_key"])
def test_a_handshake_is_proven_as_specified(which: str) -> None:
    """The proofs computed from the files' bytes alone, as docs/protocol.md defines them."""
    vector = load("handshake.json")[which]
    hello, welcome, confirm, ready = (bytes.fromhex(frame["hex"]) for frame in vector["frames"])
    said, answered, proven = (orjson.loads(frame[64:]) for frame in (hello, welcome, confirm))
    assert ready[64:] == b"{}"
    if vector["key_hex"] is None:
        assert answered["proof"] == proven["proof"] == ""
        return
    key = bytes.fromhex(vector["key_hex"])

    def proof(side: bytes, second: bytes) -> str:
        text = b"prfaas kv stream 1 " + side + hashlib.sha256(hello).digest() + hashlib.sha256(second).digest()
        return hmac.new(key, text, hashlib.sha256).hexdigest()

    assert answered["proof"] == proof(b"acceptor", answered["nonce"].encode())
    assert proven["proof"] == proof(b"dialer", welcome[64:])
    assert said["nonce"] != answered["nonce"]


def test_a_ticket_is_signed_as_specified() -> None:
    """Over the sorted JSON without its signature; whoever has the key accepts it."""
    vector = load("ticket.json")
    key = bytes.fromhex(vector["key_hex"])
    expected = hmac.new(key, vector["signed_bytes"].encode(), hashlib.sha256).hexdigest()
    assert vector["ticket"]["signature"] == expected
    assert json.loads(vector["signed_bytes"]) == {k: v for k, v in vector["ticket"].items() if k != "signature"}
    TicketSigner(key).check(Ticket.from_json(vector["ticket"]))


@pytest.mark.parametrize("vector", load("bitmaps.json"), ids=lambda vector: f"{vector['n_chunks']}-chunks")
def test_a_bitmap_is_read_as_written(vector: dict[str, Any]) -> None:
    """Merging the files' bits gives the files' chunks."""
    bitmap = ChunkBitmap(vector["n_chunks"])
    assert list(bitmap.merge(0, bytes.fromhex(vector["whole_hex"]))) == vector["landed"]
    assert (
        list(bitmap.merge(vector["report_first_chunk"], bytes.fromhex(vector["report_hex"]))) == vector["then_landed"]
    )


@pytest.mark.parametrize("vector", load("digests.json"), ids=lambda vector: f"{len(vector['lengths'])}-chunks")
def test_a_digest_is_made_as_specified(vector: dict[str, Any]) -> None:
    """xxh3_64 over the chunks' checksums, little-endian, in order; the table's over its lengths in the same way."""
    chunks = [bytes.fromhex(text) for text in vector["chunks_hex"]]
    assert [xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks] == vector["xxh3_64"]
    sums = b"".join(int(text, 16).to_bytes(8, "little") for text in vector["xxh3_64"])
    assert xxhash.xxh3_64_hexdigest(sums) == vector["digest"]
    lengths = b"".join(length.to_bytes(8, "little") for length in vector["lengths"])
    assert xxhash.xxh3_64_hexdigest(lengths) == vector["table_fingerprint"]
    assert ChunkTable(vector["lengths"]).fingerprint == vector["table_fingerprint"]
