"""From changes of one node's cache, block by block, to the events that tell them to gateways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prfaas_net.cache.events import Delta, Removal, Run
from prfaas_net.cache.prefix_tree import CacheChange
from prfaas_net.kv import KvKind

__all__ = ["deltas_of", "runs_of"]


def runs_of(changes: Iterable[CacheChange], root: bytes) -> Iterator[Run]:
    """``stored`` changes as runs: neighbours of one chain together, states of one group together.

    Args:
        root: stands for the parent of a prompt's first block. (Which of all roots it is does not matter: the block's
            own key tells.)
    """
    states: dict[KvKind, bytearray] = {}
    chain, parent = bytearray(), b""
    for change in changes:
        assert change.group is not None
        if change.group is not KvKind.FULL:
            states.setdefault(change.group, bytearray()).extend(change.key)
            continue
        if chain and change.parent == chain[-len(change.key) :]:
            chain += change.key
            continue
        if chain:
            yield Run(KvKind.FULL, bytes(chain), parent)
        chain, parent = bytearray(change.key), change.parent or root
    if chain:
        yield Run(KvKind.FULL, bytes(chain), parent)
    for group, keys in states.items():
        yield Run(group, bytes(keys))


def deltas_of(changes: Iterable[CacheChange], first_seq: int, root: bytes) -> Iterator[Delta]:
    """The fewest deltas that tell the changes in order.

    Inside a delta removals come last, so one begins anew where a block is stored that was removed before.
    """
    seq, cleared = first_seq, False
    stored: list[CacheChange] = []
    removed: dict[tuple[KvKind, bytes], None] = {}

    def delta() -> Delta:
        groups: dict[KvKind, bytearray] = {}
        for group, key in removed:
            groups.setdefault(group, bytearray()).extend(key)
        removals = tuple(Removal(group, bytes(keys)) for group, keys in groups.items())
        return Delta(seq, tuple(runs_of(stored, root)), removals, cleared)

    for change in changes:
        anew = change.kind == "cleared" or (change.kind == "stored" and (change.group, change.key) in removed)
        if anew and (stored or removed or cleared):
            yield delta()
            seq, cleared = seq + 1, False
            stored, removed = [], {}
        if change.kind == "cleared":
            cleared = True
        elif change.kind == "stored":
            stored.append(change)
        else:
            assert change.group is not None
            removed[change.group, change.key] = None
    if stored or removed or cleared:
        yield delta()
