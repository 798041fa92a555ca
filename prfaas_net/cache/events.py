"""What a node says about its cache: one snapshot, then numbered deltas, as plain JSON-ready data.

    {"event": "snapshot", "node": id, "boot": id, "layout": fingerprint, "block_tokens": n, "seq": N,
     "groups": ["full", "linear"], "stored": [run, ...]}
    {"event": "delta", "seq": N + 1, "cleared": true, "stored": [run, ...], "removed": [{"group", "keys"}, ...]}

A *run* is ``{"group", "parent", "keys"}`` with keys concatenated and in hex. For ``full``, its keys are consecutive
blocks of one chain after ``parent``, which the node holds or which is a root: that of the fleet's plain scope, or any
other (a salt, an adapter) when the run says ``"root": true``. For ``window`` and ``linear`` the keys are those of the
exact lengths at which that state is held, in any order, and there is no parent.

Within one delta the order is: cleared, stored, removed. It is the order that errs on the safe side: a key that is in
both lists is *not* held. A node that evicts a block and stores it again says so in two deltas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.errors import ProtocolError, RefusedError
from prfaas_net.kv import KvKind

__all__ = ["MAX_KEYS_PER_EVENT", "CacheEvent", "Delta", "Removal", "Run", "Snapshot", "parse_event"]

# 4 Mi blocks of 256 tokens are a billion tokens: no node holds more, and its snapshot would be 134 MB of hex.
MAX_KEYS_PER_EVENT = 1 << 22
_GROUPS = {kind.value: kind for kind in KvKind}
_MAX_ID = 200  # characters
_MAX_SEQ = (1 << 63) - 1
_KEY_DIGITS = 2 * KEY_BYTES
_MAX_DIGITS = MAX_KEYS_PER_EVENT * _KEY_DIGITS


class Run(NamedTuple):
    """Blocks that a node has stored.

    Attributes:
        keys: ``KEY_BYTES`` each, concatenated.
        parent: for ``FULL``, the key before the first; empty otherwise.
        root: the parent is a root, not a block.
    """

    group: KvKind
    keys: bytes
    parent: bytes = b""
    root: bool = False

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"group": self.group.value, "keys": self.keys.hex()}
        if self.parent:
            body["parent"] = self.parent.hex()
        if self.root:
            body["root"] = True
        return body


class Removal(NamedTuple):
    """Blocks that a node has no longer; ``keys`` as in :class:`Run`."""

    group: KvKind
    keys: bytes

    def to_json(self) -> dict[str, Any]:
        return {"group": self.group.value, "keys": self.keys.hex()}


class Snapshot(NamedTuple):
    """All that a node holds, as of ``seq``; the next delta is ``seq + 1``."""

    node: str
    boot: str
    layout: str
    block_tokens: int
    seq: int
    groups: frozenset[KvKind]
    stored: tuple[Run, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; :func:`parse_event` is the inverse."""
        return {
            "event": "snapshot",
            "node": self.node,
            "boot": self.boot,
            "layout": self.layout,
            "block_tokens": self.block_tokens,
            "seq": self.seq,
            "groups": sorted(kind.value for kind in self.groups),
            "stored": [run.to_json() for run in self.stored],
        }


class Delta(NamedTuple):
    """What has changed since ``seq - 1``."""

    seq: int
    stored: tuple[Run, ...] = ()
    removed: tuple[Removal, ...] = ()
    cleared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data; :func:`parse_event` is the inverse."""
        body: dict[str, Any] = {"event": "delta", "seq": self.seq}
        if self.cleared:
            body["cleared"] = True
        if self.stored:
            body["stored"] = [run.to_json() for run in self.stored]
        if self.removed:
            body["removed"] = [removal.to_json() for removal in self.removed]
        return body


CacheEvent = Snapshot | Delta


def parse_event(body: object) -> CacheEvent:
    """An event out of plain data that a peer sent.

    Raises:
        ProtocolError: it is not an event.
        RefusedError: it is larger than any honest one.
    """
    if not isinstance(body, dict):
        raise ProtocolError("not a cache event", expected="an object", found=type(body).__name__)
    kind = body.get("event")
    if kind == "delta":
        stored, removed = body.get("stored"), body.get("removed")
        return Delta(
            _integer(body, "seq", 0, _MAX_SEQ),
            () if stored is None else _runs(stored),
            () if removed is None else _removals(removed),
            "cleared" in body and _flag(body, "cleared"),
        )
    if kind != "snapshot":
        raise ProtocolError("not a cache event", expected="event: snapshot or delta", found=repr(kind)[:_MAX_ID])
    return Snapshot(
        node=_text(body, "node"),
        boot=_text(body, "boot"),
        layout=_text(body, "layout"),
        block_tokens=_integer(body, "block_tokens", 1, 1 << 31),
        seq=_integer(body, "seq", 0, _MAX_SEQ),
        groups=frozenset(_group(name) for name in _list(body.get("groups"), "groups")),
        stored=_runs(body.get("stored", ())),
    )


def _runs(body: object) -> tuple[Run, ...]:
    runs = tuple([_run(item) for item in _list(body, "stored")])
    if len(runs) > 1:
        _bounded(runs)
    return runs


def _run(body: object) -> Run:
    if type(body) is not dict:
        raise ProtocolError("not a run of blocks", expected="an object", found=type(body).__name__)
    group = _group(body.get("group"))
    keys = _hex(body.get("keys"), "keys")
    if group is not KvKind.FULL:
        return Run(group, keys)
    parent = _hex(body.get("parent"), "parent")
    if len(parent) != KEY_BYTES:
        raise ProtocolError("a parent is one key", expected=f"{KEY_BYTES} bytes", found=len(parent))
    return Run(group, keys, parent, "root" in body and _flag(body, "root"))


def _removals(body: object) -> tuple[Removal, ...]:
    removals = []
    for item in _list(body, "removed"):
        if type(item) is not dict:
            raise ProtocolError("not a list of removed blocks", expected="an object", found=type(item).__name__)
        removals.append(Removal(_group(item.get("group")), _hex(item.get("keys"), "keys")))
    if len(removals) > 1:
        _bounded(removals)
    return tuple(removals)


def _bounded(parts: Iterable[Run | Removal]) -> None:
    """One part is bounded by its text's length."""
    total = sum(len(part.keys) for part in parts) // KEY_BYTES
    if total > MAX_KEYS_PER_EVENT:
        raise RefusedError("too many blocks in one event", expected=f"at most {MAX_KEYS_PER_EVENT}", found=total)


def _group(name: object) -> KvKind:
    kind = _GROUPS.get(name) if type(name) is str else None
    if kind is None:
        raise ProtocolError("no such group", expected=", ".join(_GROUPS), found=repr(name)[:_MAX_ID])
    return kind


def _hex(text: object, field: str) -> bytes:
    if not isinstance(text, str):
        raise ProtocolError(f"{field} is not text", expected="hex", found=type(text).__name__)
    n_digits = len(text)
    if n_digits > _MAX_DIGITS:
        raise RefusedError("too many blocks in one event", expected=f"at most {MAX_KEYS_PER_EVENT}")
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    # ``fromhex`` skips white space: the lengths tell.
    if not raw or n_digits % _KEY_DIGITS or len(raw) * 2 != n_digits:
        expected = f"1 or more keys of {KEY_BYTES} bytes in hex"
        raise ProtocolError(f"{field} cannot be read", expected=expected, found=f"{n_digits} characters")
    return raw


def _list(body: object, field: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(body, (list, tuple)):
        raise ProtocolError(f"{field} is not a list", found=type(body).__name__)
    return body


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID:
        raise ProtocolError(f"{field} cannot be read", expected=f"1 to {_MAX_ID} characters", found=repr(value)[:50])
    return value


def _integer(body: dict[str, Any], field: str, low: int, high: int) -> int:
    value = body.get(field)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{field} cannot be read", expected=f"an integer, {low} to {high}", found=repr(value)[:50])
    return value


def _flag(body: dict[str, Any], field: str) -> bool:
    value = body.get(field, False)
    if type(value) is not bool:
        raise ProtocolError(f"{field} cannot be read", expected="true or false", found=repr(value)[:50])
    return value
