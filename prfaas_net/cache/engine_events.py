"""KV events of vLLM, SGLang and Dynamo off the wire: msgpack in any of the forms in use, into one plain form.

A batch is ``[ts, events, rank]`` or ``{"ts", "events", "data_parallel_rank"}``; an event is ``[tag, field, ...]`` with
trailing fields left out, or ``{"type": tag, field: value}``; both in any combination. Fields that a later engine adds
are ignored, and so are events of unknown kinds (counted in the batch).

Payloads come from outside. A batch is bounded in bytes before it is read; lengths and nesting are bounded by the
payload itself; whatever does not fit raises, and the caller drops that engine's entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from prfaas_net.errors import ProtocolError, RefusedError

__all__ = ["MAX_PAYLOAD_BYTES", "Cleared", "EngineBatch", "EngineHash", "Removed", "Stored", "decode_batch"]

# One scheduler step of an engine: 800K tokens of five bytes. The smallest objects (an empty list from one byte) take
# 64 times their bytes once read, so this also bounds memory, at 256 MiB.
MAX_PAYLOAD_BYTES = 4 << 20
_MAX_HASH_BYTES = 64
_MAX_NAME = 200  # characters
_MASK64 = (1 << 64) - 1

# An engine's own name for a block: a digest, or 64 bits of one as an unsigned number.
EngineHash = bytes | int

# In the order of the array form (vLLM; SGLang's ends after ``medium``).
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS: dict[str, tuple[str, ...]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}


class Stored(NamedTuple):
    """Blocks that follow each other in one sequence.

    Attributes:
        parent: the block before the first; None at the start of a sequence.
        tokens: 4 bytes each, little-endian, of all blocks; empty where the engine leaves them out (its CPU tier).
        block_tokens: tokens of one block, by the engine's count.
        adapter: the LoRA adapter's name, or its number where that is all there is; empty without.
        extra_keys: per block, what else went into its hash (salt, images); None where the engine does not say.
        kind: what vLLM calls the group's attention; empty where it does not say.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: bytes
    block_tokens: int
    adapter: str = ""
    medium: str = "GPU"
    extra_keys: tuple[tuple[object, ...], ...] | None = None
    group: int = 0
    kind: str = ""


class Removed(NamedTuple):
    """Blocks that are gone from one medium."""

    hashes: tuple[EngineHash, ...]
    medium: str = "GPU"
    group: int = 0


class Cleared(NamedTuple):
    """Every block is gone."""


class EngineBatch(NamedTuple):
    """What an engine published at once; ``n_unknown`` events were of kinds that are not known here."""

    events: tuple[Stored | Removed | Cleared, ...]
    rank: int | None = None
    n_unknown: int = 0


def decode_batch(payload: bytes) -> EngineBatch:
    """One message's payload.

    Raises:
        ProtocolError: it is not a batch of KV events.
        RefusedError: it is longer than :data:`MAX_PAYLOAD_BYTES`.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise RefusedError("a batch of events is too long", expected=f"{MAX_PAYLOAD_BYTES} bytes", found=len(payload))
    try:
        # Every length is bounded by that of the payload, nesting by 1024 levels (the library's own limits).
        body = msgpack.unpackb(payload)
    except ValueError as error:
        raise ProtocolError("a batch of events cannot be read", expected="msgpack", found=str(error)[:200]) from None
    if isinstance(body, dict):
        events, rank = body.get("events"), body.get("data_parallel_rank")
    elif isinstance(body, list) and len(body) >= 2:
        events, rank = body[1], body[2] if len(body) > 2 else None
    else:
        raise ProtocolError("not a batch of events", expected="[ts, events, rank]", found=type(body).__name__)
    decoded = [_event(event) for event in _list(events, "events")]
    known = tuple(event for event in decoded if event is not None)
    return EngineBatch(known, _integer(rank, "data_parallel_rank", none=True), len(decoded) - len(known))


def _event(body: object) -> Stored | Removed | Cleared | None:
    """None: of a kind that is not known."""
    if isinstance(body, dict):
        tag, fields = body.get("type"), body
    elif isinstance(body, list) and body:
        tag = body[0]
        names = _FIELDS.get(tag, ()) if isinstance(tag, str) else ()
        fields = dict(zip(names, body[1:], strict=False))
    else:
        raise ProtocolError("not an event", expected="[tag, ...] or {type, ...}", found=type(body).__name__)
    if not isinstance(tag, str):
        raise ProtocolError("an event without a kind", expected=", ".join(_FIELDS), found=type(tag).__name__)
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        hashes = _hashes(fields.get("block_hashes"))
        return Removed(hashes, _name(fields.get("medium"), "medium") or "GPU", _group(fields))
    return Cleared() if tag == "AllBlocksCleared" else None


def _stored(fields: dict[Any, Any]) -> Stored:
    parent = fields.get("parent_block_hash")
    lora_id = _integer(fields.get("lora_id"), "lora_id", none=True)
    hashes = _hashes(fields.get("block_hashes"))
    return Stored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=_tokens(fields.get("token_ids")),
        block_tokens=_integer(fields.get("block_size"), "block_size") or 0,
        adapter=_name(fields.get("lora_name"), "lora_name") or ("" if lora_id is None else str(lora_id)),
        medium=_name(fields.get("medium"), "medium") or "GPU",
        extra_keys=_extra_keys(fields.get("extra_keys"), len(hashes)),
        group=_group(fields),
        kind=_name(fields.get("kv_cache_spec_kind"), "kv_cache_spec_kind"),
    )


def _hashes(body: object) -> tuple[EngineHash, ...]:
    return tuple(_hash(item) for item in _list(body, "block_hashes"))


def _hash(body: object) -> EngineHash:
    if isinstance(body, bytes) and 0 < len(body) <= _MAX_HASH_BYTES:
        return body
    # SGLang has signed numbers, vLLM unsigned ones; msgpack has none outside these 65 bits.
    if type(body) is int:
        return body & _MASK64
    raise ProtocolError("not a block hash", expected="bytes or a 64-bit integer", found=repr(body)[:100])


def _tokens(body: object) -> bytes:
    if body is None:
        return b""
    items = _list(body, "token_ids")
    try:
        tokens = np.asarray(items)
    except (ValueError, OverflowError):  # ragged, or too large for any type
        tokens = np.empty(0, dtype=object)
    if not items:
        return b""
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or int(tokens.min()) < 0 or int(tokens.max()) >> 32:
        raise ProtocolError("token_ids cannot be read", expected="integers of 32 bits", found=repr(items[:4])[:100])
    return tokens.astype("<u4").tobytes()


def _extra_keys(body: object, n_blocks: int) -> tuple[tuple[object, ...], ...] | None:
    if body is None:
        return None
    items = _list(body, "extra_keys")
    if len(items) != n_blocks:
        raise ProtocolError("extra_keys of other blocks", expected=f"{n_blocks} entries", found=len(items))
    return tuple(() if item is None else tuple(_list(item, "extra_keys")) for item in items)


def _group(fields: dict[Any, Any]) -> int:
    return _integer(fields.get("group_idx"), "group_idx", none=True) or 0


def _list(body: object, field: str) -> Sequence[Any]:
    if not isinstance(body, list):
        raise ProtocolError(f"{field} is not a list", found=type(body).__name__)
    return body


def _name(body: object, field: str) -> str:
    if body is None:
        return ""
    if not isinstance(body, str) or len(body) > _MAX_NAME:
        raise ProtocolError(f"{field} cannot be read", expected=f"up to {_MAX_NAME} characters", found=repr(body)[:50])
    return body


def _integer(body: object, field: str, *, none: bool = False) -> int | None:
    if body is None and none:
        return None
    if type(body) is not int or not 0 <= body < 1 << 31:
        raise ProtocolError(f"{field} cannot be read", expected="a small number", found=repr(body)[:50])
    return body
