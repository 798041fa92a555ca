"""Memory that a bench sends from or lands in: larger than any cache, prefaulted, verified as a whole."""

from __future__ import annotations

import numpy as np
import xxhash

from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Arena

__all__ = ["REGION_BYTES", "Region"]

# Eight times the last-level cache of the machines at hand: what lands must have gone to memory.
REGION_BYTES = 256 << 20


class Region:
    """A flat piece of an arena, and the views that cut transfers out of it.

    A transfer larger than the region goes around it: chunk after chunk, from the start again at the end. Both ends cut
    alike, so afterwards the two regions must be equal.
    """

    def __init__(self, n_bytes: int = REGION_BYTES) -> None:
        self._arena = Arena(n_bytes)
        self.memory = self._arena.memory[:n_bytes]

    def fill(self) -> None:
        """Random bytes, the same in every process, that no codec can shrink."""
        self.memory[:] = np.random.default_rng(7).bytes(self.memory.nbytes)

    def clear(self) -> None:
        """Forget what has landed."""
        np.frombuffer(self.memory, dtype=np.uint8)[:] = 0

    def views(self, table: ChunkTable) -> list[memoryview]:
        """Each chunk's place."""
        views, at = [], 0
        for length in table.lengths:
            if at + length > self.memory.nbytes:
                at = 0
            views.append(self.memory[at : at + length])
            at += length
        return views

    def digest(self, n_bytes: int) -> str:
        """xxh3 over what a transfer of this size has covered."""
        return xxhash.xxh3_64_hexdigest(self.memory[:n_bytes])
