"""Which nodes hold which blocks: one hash table of NumPy columns, no Python object per block.

A million blocks as Python objects would take hundreds of bytes each and be walked one at a time. Here a block is one
slot of an open-addressing table: its 16-byte key, and for each group one bit per node in 64-bit words. That is
``16 + 8 * groups * ceil(nodes / 64)`` bytes a slot; a table that has grown is between 30 % and 70 % full, so with two
groups on 64 nodes 46 to 107 bytes a block. Whole prompts and whole batches of events are looked up at once.

*One* table for all groups, with a mask per group, because the key of a linear or window state is the key of the block
that ends where it does (the group is not hashed in): one probe answers for all groups, and eight bytes for an empty
mask cost less than a second copy of the key and a second probe.

Removing clears bits; a key without bits stays as a tombstone (blocks come back) until the table is next rebuilt, which
happens when 70 % of the slots have keys, dead or alive. Dropping a node clears its bit in every slot: one pass over
the masks, in time bounded by the table, without lists of what each node holds.

Probing is linear from a mixed hash, so that keys chosen by a peer do not pile up unless it knows the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.errors import UsageError

__all__ = ["BlockIndex", "Ints", "Words", "key_words"]

Words = np.ndarray[Any, np.dtype[np.uint64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

MAX_LOAD = 0.7  # linear probing: 2.2 probes for a hit, 6 for a miss (Knuth, vol. 3, 6.4)
_REBUILT_LOAD = 0.6  # below MAX_LOAD: a table is not rebuilt again soon after it was
_MIN_BITS = 10
_PART_KEYS = 1 << 14
_WORD = 64
_MASK64 = (1 << 64) - 1
# Odd constants of Weyl sequences with good avalanche (splitmix64, xxHash's PRIME64_2).
_MIX_HIGH = 0x9E3779B97F4A7C15
_MIX_LOW = 0xC2B2AE3D27D4EB4F
_KEY = np.dtype(f"V{KEY_BYTES}")
_EMPTY = bytes(KEY_BYTES)


def key_words(keys: bytes) -> Words:
    """Concatenated keys as an array of shape ``(n, 2)``.

    Raises:
        UsageError: not whole keys.
    """
    if len(keys) % KEY_BYTES:
        raise UsageError("not whole keys", expected=f"a multiple of {KEY_BYTES} bytes", found=len(keys))
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 2)


class BlockIndex:
    """A set of (key, node, group), by key.

    Nodes and groups are small integers; the caller gives them meaning. No key is all zeros.

    Args:
        n_groups: how many masks a key has.
        capacity: keys to make room for at once; the table grows by itself.
        seed: mixed into the hash.
    """

    def __init__(self, n_groups: int, *, capacity: int = 0, seed: int = 0) -> None:
        self.n_groups = n_groups
        self._seed = seed & _MASK64
        self._words = 1
        self._live = 0
        self._held = np.zeros((_WORD, n_groups), dtype=np.int64)
        self._allocate(max(_MIN_BITS, int(capacity / _REBUILT_LOAD).bit_length()))

    @property
    def n_blocks(self) -> int:
        """Keys that some node holds in some group."""
        return self._live

    @property
    def n_nodes(self) -> int:
        """Nodes that there is room for: the bits of a row of :meth:`masks`."""
        return self._words * _WORD

    @property
    def memory_bytes(self) -> int:
        """Of the table. A rebuild needs the old and the new one for its duration."""
        return self._keys.nbytes + self._masks.nbytes + self._held.nbytes

    def held(self, node: int) -> int:
        """How many (key, group) a node has."""
        return int(self._held[node].sum()) if node < self.n_nodes else 0

    def add(self, keys: bytes, nodes: int | Ints, groups: int | Ints) -> int:
        """Set bits, one node and group for all keys or one each.

        Returns:
            how many were not set before.
        """
        words, n_new = key_words(keys), 0
        most = int(np.max(nodes)) if words.size else 0
        while most >= self.n_nodes:
            self._widen()
        for part in _parts(len(words)):
            slots = self._insert(words[part])
            n_new += self._change(slots, _part_of(nodes, part), _part_of(groups, part), present=True)
        return n_new

    def remove(self, keys: bytes, nodes: int | Ints, groups: int | Ints) -> int:
        """Clear bits; the inverse of :meth:`add`.

        Returns:
            how many were set before.
        """
        words, n_gone = key_words(keys), 0
        for part in _parts(len(words)):
            slots = self.find(words[part])
            known = slots >= 0
            n_gone += self._change(
                slots[known], _part_of(_part_of(nodes, part), known), _part_of(_part_of(groups, part), known),
                present=False,
            )  # fmt: skip
        return n_gone

    def drop(self, node: int) -> None:
        """Clear every bit of a node: one pass over the table."""
        if not self.held(node):
            return
        word, keep = node // _WORD, ~np.uint64(1 << (node % _WORD))
        self._masks[:, word, :] &= keep
        self._held[node] = 0
        self._live = int(self._masks.reshape(len(self._masks), -1).any(axis=1).sum())

    def holds(self, key: bytes, node: int, group: int) -> bool:
        """One key, without the cost of arrays."""
        if node >= self.n_nodes:
            return False
        low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        mixed = ((low ^ self._seed ^ (high * _MIX_HIGH & _MASK64)) * _MIX_LOW) & _MASK64
        slot, last = mixed >> (_WORD - self._bits), (1 << self._bits) - 1
        while True:
            seen = self._view[slot * KEY_BYTES : (slot + 1) * KEY_BYTES]
            if seen == key:
                return bool(int(self._masks[slot, node // _WORD, group]) >> (node % _WORD) & 1)
            if seen == _EMPTY:
                return False
            slot = (slot + 1) & last

    def masks(self, keys: bytes) -> Words:
        """Who holds each key: shape ``(n_keys, n_words, n_groups)``, node ``i`` in bit ``i % 64`` of word ``i // 64``.

        A key that nobody holds has zeros.
        """
        slots = self.find(key_words(keys))
        found: Words = self._masks[slots]
        found[slots < 0] = 0
        return found

    def find(self, words: Words) -> Ints:
        """The slot of each key, -1 for none."""
        result = np.full(len(words), -1, dtype=np.int64)
        slots, waiting = self._home(words), np.arange(len(words))
        while waiting.size:
            seen = self._keys[slots].view("<u8").reshape(-1, 2)
            same = (seen == words).all(axis=1)
            result[waiting[same]] = slots[same]
            on = np.flatnonzero(~same & seen.any(axis=1))
            waiting, words, slots = waiting[on], words[on], (slots[on] + 1) & self._last
        return result

    def _insert(self, words: Words) -> Ints:
        """The slot of each key, made where there was none."""
        if self._used + len(words) > MAX_LOAD * len(self._keys):
            # Blocks that other nodes hold already need no room: count before growing.
            missing = int((self.find(words) < 0).sum())
            if self._used + missing > MAX_LOAD * len(self._keys):
                self._rebuild(missing)
        result = np.empty(len(words), dtype=np.int64)
        slots, waiting = self._home(words), np.arange(len(words))
        while waiting.size:
            empty = ~self._keys[slots].view("<u8").reshape(-1, 2).any(axis=1)
            claimed = slots[empty]
            # Where several keys claim one slot, one of them wins (an item of 16 bytes is written whole); the
            # others find a stranger there and go on. Equal keys both find themselves.
            self._keys[claimed] = np.ascontiguousarray(words[empty]).view(_KEY).reshape(-1)
            claimed.sort()
            self._used += int(np.count_nonzero(claimed[1:] != claimed[:-1])) + (claimed.size > 0)
            same = (self._keys[slots].view("<u8").reshape(-1, 2) == words).all(axis=1)
            result[waiting[same]] = slots[same]
            on = np.flatnonzero(~same)
            waiting, words, slots = waiting[on], words[on], (slots[on] + 1) & self._last
        return result

    def _change(self, slots: Ints, nodes: int | Ints, groups: int | Ints, *, present: bool) -> int:
        """Set or clear bits, count what really changed."""
        row = self._words * self.n_groups
        word = slots * row + np.floor_divide(nodes, _WORD) * self.n_groups + groups
        bit_ids = np.unique(word * _WORD + np.remainder(nodes, _WORD))
        flat = self._masks.reshape(-1)
        word, shift = bit_ids // _WORD, bit_ids % _WORD
        bits = np.left_shift(np.uint64(1), shift.astype(np.uint64))
        changed = ((flat[word] & bits) != 0) != present
        word, shift, bits = word[changed], shift[changed], bits[changed]
        if not word.size:
            return 0
        # Ids were sorted, so equal slots are neighbours.
        touched = word // row
        touched = touched[np.concatenate(([True], touched[1:] != touched[:-1]))]
        rows = self._masks.reshape(-1, row)
        before = int(rows[touched].any(axis=1).sum())
        np.bitwise_xor.at(flat, word, bits)
        self._live += int(rows[touched].any(axis=1).sum()) - before
        in_row = word % row
        column = (in_row // self.n_groups * _WORD + shift) * self.n_groups + in_row % self.n_groups
        counts = np.bincount(column, minlength=self._held.size).reshape(self._held.shape)
        self._held += counts if present else -counts
        return len(word)

    def _home(self, words: Words) -> Ints:
        mixed = (words[:, 0] ^ np.uint64(self._seed) ^ (words[:, 1] * np.uint64(_MIX_HIGH))) * np.uint64(_MIX_LOW)
        return (mixed >> np.uint64(_WORD - self._bits)).astype(np.int64)

    def _allocate(self, bits: int) -> None:
        self._bits = bits
        self._last = (1 << bits) - 1
        self._used = 0
        self._keys = np.zeros(1 << bits, dtype=_KEY)
        self._view = self._keys.view(np.uint8).data
        self._masks: Words = np.zeros((1 << bits, self._words, self.n_groups), dtype=np.uint64)

    def _rebuild(self, room: int) -> None:
        """Leave out dead keys; double when the live ones and ``room`` more need it."""
        alive = self._masks.reshape(len(self._masks), -1).any(axis=1)
        keys, masks = self._keys[alive], self._masks[alive]
        bits = self._bits
        while len(keys) + room > _REBUILT_LOAD * (1 << bits):
            bits += 1
        self._allocate(bits)
        # In the order of their homes, each goes to its home or just behind the one before: what probing would find,
        # in a few passes. The few that would run over the end start again at the beginning.
        homes = self._home(keys.view("<u8").reshape(-1, 2))
        order, steps = np.argsort(homes), np.arange(len(keys))
        slots = np.maximum.accumulate(homes[order] - steps) + steps
        n_inside = int(np.searchsorted(slots, len(self._keys)))
        inside, over = order[:n_inside], order[n_inside:]
        self._keys[slots[:n_inside]] = keys[inside]
        self._masks[slots[:n_inside]] = masks[inside]
        self._used = n_inside
        self._masks[self._insert(keys[over].view("<u8").reshape(-1, 2))] = masks[over]

    def _widen(self) -> None:
        """Room for 64 more nodes."""
        more = np.zeros((len(self._masks), 1, self.n_groups), dtype=np.uint64)
        self._masks = np.concatenate((self._masks, more), axis=1)
        self._words += 1
        self._held = np.concatenate((self._held, np.zeros((_WORD, self.n_groups), dtype=np.int64)))


def _parts(n: int) -> Iterator[slice]:
    """Pieces whose temporaries stay in the processor's cache: several times as fast as a million keys at once."""
    return (slice(start, start + _PART_KEYS) for start in range(0, n, _PART_KEYS))


def _part_of(which: int | Ints, part: slice | np.ndarray[Any, np.dtype[np.bool_]]) -> int | Ints:
    """Of one number for all there is nothing to choose."""
    return which if isinstance(which, int) else which[part]
