"""KV events of vLLM and SGLang in every form they come in, and payloads that nobody honest sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.cache.engine_events import (
    MAX_PAYLOAD_BYTES,
    Cleared,
    EngineBatch,
    Removed,
    Stored,
    decode_batch,
)
from prfaas_net.errors import ProtocolError, RefusedError

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "kv_event_vectors.json").read_text())
TOKENS = list(range(1, 49))
DIGESTS = [bytes.fromhex(text) for text in VECTORS["vllm_sha256_cbor"]["blocks"]]


def u32(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def decode(*events: Any, mapped: bool = False) -> EngineBatch:
    body: Any = {"ts": 1.5, "events": list(events), "data_parallel_rank": 3} if mapped else [1.5, list(events), 3]
    return decode_batch(msgpack.packb(body))


@pytest.mark.parametrize("name", ["wire_array_legacy", "wire_map_pr42892"])
def test_the_recorded_batches_are_read(name: str) -> None:
    """The array form and the map form of vLLM say the same."""
    batch = decode_batch(bytes.fromhex(VECTORS[name]["hex"]))
    stored = Stored(tuple(DIGESTS[:1]), None, u32(TOKENS[:16]), 16)
    assert batch == EngineBatch((stored, Removed(tuple(DIGESTS[:1])), Cleared()), rank=0)


def test_a_batch_of_one_form_may_hold_events_of_the_other() -> None:
    """Dynamo: an array of maps; and a map of arrays."""
    event = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
    }
    assert decode(event) == decode(["BlockStored", [7], None, [1, 2], 2], mapped=True)


def test_trailing_fields_may_be_missing_or_new() -> None:
    """SGLang ends after lora_id; a later engine adds fields at the end."""
    short = ["BlockStored", [7], 6, [1, 2], 2]
    full = [*short, None, None, None, None, None, None, None, "LOCAL", "someone", {"what": "ever"}]
    assert decode(short) == decode(full) == decode([*short, None])
    assert decode(["BlockRemoved", [7]]) == decode(["BlockRemoved", [7], None, None, "LOCAL"])


def test_signed_and_unsigned_hashes_are_the_same_64_bits() -> None:
    """SGLang's are signed; vLLM's low 64 bits of a digest are not."""
    for digest, number in zip(DIGESTS, VECTORS["vllm_sha256_cbor"]["int64"], strict=True):
        assert int.from_bytes(digest[-8:], "big") == number
    unsigned = VECTORS["dynamo_local_xxh3_1337"][0]
    assert unsigned >> 63
    assert decode(["BlockRemoved", [unsigned - (1 << 64)]]) == decode(["BlockRemoved", [unsigned]])


def test_what_a_hybrid_engine_adds_is_read() -> None:
    """Groups, kinds, adapters, media and extra keys."""
    event = {
        "type": "BlockStored", "block_hashes": [b"h" * 32, b"i" * 32], "parent_block_hash": b"p" * 32,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": 4, "lora_name": "poet", "medium": "CPU",
        "extra_keys": [["poet"], None], "group_idx": 2, "kv_cache_spec_kind": "mamba", "block_mm_infos": [],
    }  # fmt: skip
    expected = Stored(
        (b"h" * 32, b"i" * 32), b"p" * 32, u32([1, 2, 3, 4]), 2, "poet", "CPU", (("poet",), ()), 2, "mamba"
    )
    assert decode(event).events == (expected,)
    assert decode(["BlockStored", [1], None, [1], 1, 4]).events[0] == Stored((1,), None, u32([1]), 1, "4")


def test_blocks_of_a_cpu_tier_may_come_without_tokens() -> None:
    absent: list[Any] = [None, []]
    for tokens in absent:
        event = decode(["BlockStored", [7], None, tokens, 16, None, "CPU_TIER1"]).events[0]
        assert event == Stored((7,), None, b"", 16, medium="CPU_TIER1")


def test_events_of_unknown_kinds_are_counted_and_skipped() -> None:
    batch = decode(["BlockMigrated", [7], "x"], {"type": "New"}, ["AllBlocksCleared"])
    assert batch == EngineBatch((Cleared(),), rank=3, n_unknown=2)


def stored(**changes: Any) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return msgpack.packb([0.0, [event | changes]])  # type: ignore[no-any-return]


HOSTILE = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "cut off": stored()[:-1],
    "something after it": stored() + b"\x00",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 100_000,
    "deep maps": b"\x81\x01" * 100_000,
    "a list as a map's key": b"\x81\x91\x01\x01",
    "not UTF-8": b"\x92\x00\x91\x91\xa1\xff",
    "a number": b"\x07",
    "half a batch": b"\x91\x00",
    "events that are no list": msgpack.packb([0, {}]),
    "an event that is a number": msgpack.packb([0, [1]]),
    "an empty event": msgpack.packb([0, [[]]]),
    "an event without a kind": msgpack.packb([0, [{}]]),
    "a kind that is a list": msgpack.packb([0, [[[]]]]),
    "a rank of a wrong type": msgpack.packb([0, [], "0"]),
    "no hashes": stored(block_hashes=None),
    "hashes that are text": stored(block_hashes=["7"]),
    "hashes that are true": stored(block_hashes=[True]),
    "an empty hash": stored(block_hashes=[b""]),
    "a long hash": stored(block_hashes=[b"x" * 65]),
    "a parent of a wrong type": stored(parent_block_hash=1.5),
    "tokens that are text": stored(token_ids="abc"),
    "tokens that are fractions": stored(token_ids=[1.5]),
    "tokens that are lists": stored(token_ids=[[1], [2]]),
    "ragged tokens": stored(token_ids=[[1], [2, 3]]),
    "tokens that are nothing": stored(token_ids=[None]),
    "tokens that are true": stored(token_ids=[True]),
    "a negative token": stored(token_ids=[-1]),
    "a token of 33 bits": stored(token_ids=[1 << 32]),
    "tokens of mixed signs beyond 64 bits": stored(token_ids=[-1, (1 << 64) - 1]),
    "no block size": stored(block_size=None),
    "a negative block size": stored(block_size=-1),
    "a block size that is true": stored(block_size=True),
    "extra keys of other blocks": stored(extra_keys=[None, None]),
    "extra keys of a wrong type": stored(extra_keys=["salt"]),
    "a group of a wrong type": stored(group_idx="0"),
    "a medium of a wrong type": stored(medium=7),
    "a long adapter": stored(lora_name="x" * 1000),
    "an adapter's number of a wrong type": stored(lora_id="x"),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


def test_a_payload_is_bounded_before_it_is_read() -> None:
    with pytest.raises(RefusedError):
        decode_batch(b"\x90" * (MAX_PAYLOAD_BYTES + 1))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=40)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "type"]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(
        st.sampled_from(["type", "events", "block_hashes", "token_ids", "block_size", "extra_keys", "group_idx"]), inner
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(body=PLAIN)
def test_whatever_is_well_formed_is_read_or_refused(body: Any) -> None:
    """Any msgpack at all: a batch, or a protocol error."""
    for whole in (body, [0.0, [body], 0], {"events": [body]}, [0.0, [["BlockStored", body, None, body, 1]]]):
        try:
            assert isinstance(decode_batch(msgpack.packb(whole)), EngineBatch)
        except ProtocolError:
            pass


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_batch_is_read_or_refused(data: st.DataObject) -> None:
    """Real batches with bytes changed or cut."""
    raw = bytearray(
        bytes.fromhex(VECTORS[data.draw(st.sampled_from(["wire_array_legacy", "wire_map_pr42892"]))]["hex"])
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode_batch(bytes(raw[: data.draw(st.integers(0, len(raw)))])), EngineBatch)
    except ProtocolError:
        pass
