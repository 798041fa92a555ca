"""A node's second cache tier: a thread of its own in front of the store, so that no prompt waits for a write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from prfaas_net.cache.tier import Tier, TierRecord, TierStats
from prfaas_net.kv import KvKind
from prfaas_net.units import MiB

__all__ = ["SecondTier"]

# Payloads that wait to be written; more are not kept. Bounds memory where the disk is slower than prefill.
MAX_WAITING_BYTES = 256 * MiB
# A disk that takes longer than this for one payload saves no work: it is a miss, and computed.
READ_TIMEOUT_S = 5.0


class SecondTier:
    """Reads at once, writes behind. Safe from any thread."""

    def __init__(self, store: Tier) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-tier")
        self._lock = threading.Lock()
        # What is there, so that looking up a prompt costs no disk. It may name what the store has dropped since.
        self._known = {(record.key, record.group) for record in store.records()}
        self._waiting_bytes = 0
        self.n_skipped = 0

    @property
    def stats(self) -> TierStats:
        return self._store.stats

    def has(self, key: bytes, group: KvKind) -> bool:
        """Whether it is worth asking for."""
        with self._lock:
            return (key, group) in self._known

    def read(self, key: bytes, group: KvKind, n_bytes: int) -> bytes | None:
        """A payload, checked, or None. Blocks for a disk read, behind what is being written; not for ever."""
        try:
            payload = self._thread.submit(self._store.get, key, group).result(READ_TIMEOUT_S)
        except TimeoutError:
            return None
        if payload is None or len(payload) != n_bytes:
            with self._lock:
                self._known.discard((key, group))
            return None
        return payload

    def write(self, record: TierRecord, payload: bytes) -> None:
        """Keep a payload, some time later; not at all if too much waits already."""
        with self._lock:
            if (record.key, record.group) in self._known:
                return
            if self._waiting_bytes + record.n_bytes > MAX_WAITING_BYTES:
                self.n_skipped += 1
                return
            self._waiting_bytes += record.n_bytes
        self._thread.submit(self._write, record, payload)

    def _write(self, record: TierRecord, payload: bytes) -> None:
        kept = False
        try:
            kept = self._store.put(record, payload)
        finally:
            with self._lock:
                self._waiting_bytes -= record.n_bytes
                if kept:
                    self._known.add((record.key, record.group))

    def close(self) -> None:
        """Write what waits, then let go of the store. Blocks; bounded by what may wait."""
        self._thread.shutdown()
        self._store.close()
