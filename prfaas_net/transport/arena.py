"""Host memory that KVCache lands in: one mapping, huge pages, touched once at start.

Landing in fresh 4 KiB pages doubles the receiver's CPU time (page faults), so the arena asks for huge pages and
populates them before the first transfer. Blocks are given out first-fit and merged when they come back.
"""

from __future__ import annotations

import bisect
import mmap
import threading

from prfaas_net.errors import BusyError, ConfigError, RefusedError
from prfaas_net.units import MiB, format_bytes

__all__ = ["Arena", "ArenaBlock"]

GRAIN_BYTES = 4096


class ArenaBlock:
    """A piece of an arena. Whoever reserved it releases it, once, when nobody reads or writes it any more."""

    def __init__(self, arena: Arena, offset: int, n_bytes: int, room_bytes: int) -> None:
        self._arena = arena
        self.offset = offset
        self.n_bytes = n_bytes
        self.room_bytes = room_bytes
        self.view = arena.memory[offset : offset + n_bytes]
        self._released = False

    def release(self) -> None:
        """Give the memory back; further calls do nothing."""
        if not self._released:
            self._released = True
            self._arena._take_back(self)


class Arena:
    """A fixed amount of host memory.

    Args:
        total_bytes: rounded up to 2 MiB.

    Raises:
        ConfigError: the host does not have so much memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = -(-total_bytes // (2 * MiB)) * 2 * MiB
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.total_bytes, flags=flags)
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot map an arena of {format_bytes(self.total_bytes)}",
                found=str(error),
                do="make it smaller",
            ) from error
        self.memory = memoryview(self._map)
        self._populate()
        self._lock = threading.Lock()
        # Free pieces as parallel sorted lists: offsets and sizes.
        self._free_at: list[int] = [0]
        self._free_bytes: list[int] = [self.total_bytes]
        self.used_bytes = 0

    def _populate(self) -> None:
        """Write one byte a page: with huge pages this is one fault for each 2 MiB."""
        self.memory[::GRAIN_BYTES] = bytes(len(range(0, self.total_bytes, GRAIN_BYTES)))

    def reserve(self, n_bytes: int) -> ArenaBlock:
        """A block of at least ``n_bytes``, page-aligned. Its content is whatever the last user left.

        Raises:
            RefusedError: it is larger than the whole arena.
            BusyError: there is no room now.
        """
        room = -(-n_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if room > self.total_bytes:
            raise RefusedError(
                "the KVCache is larger than the landing arena",
                expected=f"at most {format_bytes(self.total_bytes)}",
                found=format_bytes(n_bytes),
                do="raise kv.arena of the decode node",
            )
        with self._lock:
            for index, size in enumerate(self._free_bytes):
                if size >= room:
                    offset = self._free_at[index]
                    if size == room:
                        del self._free_at[index], self._free_bytes[index]
                    else:
                        self._free_at[index] += room
                        self._free_bytes[index] -= room
                    self.used_bytes += room
                    return ArenaBlock(self, offset, n_bytes, room)
            free = self.total_bytes - self.used_bytes
        raise BusyError(
            "no room in the landing arena now", expected=format_bytes(n_bytes), found=f"{format_bytes(free)} free",
            do="try again, or raise kv.arena of the decode node",
        )  # fmt: skip

    def _take_back(self, block: ArenaBlock) -> None:
        with self._lock:
            at, size = block.offset, block.room_bytes
            self.used_bytes -= size
            index = bisect.bisect_left(self._free_at, at)
            if index < len(self._free_at) and at + size == self._free_at[index]:
                size += self._free_bytes[index]
                del self._free_at[index], self._free_bytes[index]
            if index > 0 and self._free_at[index - 1] + self._free_bytes[index - 1] == at:
                self._free_bytes[index - 1] += size
            else:
                self._free_at.insert(index, at)
                self._free_bytes.insert(index, size)
