"""A second tier for cached state: on disk, larger than memory, alive after a restart.

Nothing that comes out of it is believed. Every record carries a BLAKE2b hash over its key, group, parent, length and
payload, keyed if the operator gives a key; a record that does not agree is deleted, counted and simply not a hit, so
its tokens are run again. The tier may fail at any time (disk full, file damaged): it then holds less or nothing, and
nobody but its counters notices. Only at the start does it refuse loudly what can never work.

SQLite holds it: one file, transactions, and a damaged or truncated file is an error rather than a signal that ends the
process, which it would be with a store that maps its file into memory. Calls block; the shell makes them from a
worker thread, one at a time.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from prfaas_net.errors import ConfigError, UsageError
from prfaas_net.kv import KvKind
from prfaas_net.units import KiB, format_bytes

__all__ = ["SqliteTier", "Tier", "TierRecord", "TierStats"]

DIGEST_BYTES = 32
PAGE_BYTES = 64 * KiB  # payloads are large: fewer, larger pages are several times faster
FILE_NAME = "kvcache.sqlite"
_TAGS = frozenset(group.value for group in KvKind)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, tag TEXT NOT NULL, parent BLOB NOT NULL,
    n_tokens INTEGER NOT NULL, n_bytes INTEGER NOT NULL, digest BLOB NOT NULL, UNIQUE (key, tag)) STRICT;
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY, payload BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS scope (name TEXT) STRICT;
"""

T = TypeVar("T")


class TierRecord(NamedTuple):
    """What the tier knows of an entry without reading it.

    Attributes:
        group: kind of state.
        parent: key of the block before; empty for the first.
        n_tokens: length of the prefix that the key stands for.
    """

    key: bytes
    group: KvKind
    parent: bytes
    n_tokens: int
    n_bytes: int


@dataclass
class TierStats:
    """Counted since the start.

    Attributes:
        poisoned: records whose content was not what had been stored.
        failures: calls that the disk or the store failed.
    """

    stored: int = 0
    hits: int = 0
    misses: int = 0
    removed: int = 0
    poisoned: int = 0
    failures: int = 0


class Tier(Protocol):
    """A place for entries beyond the pool."""

    stats: TierStats

    def records(self) -> list[TierRecord]:
        """All that it holds, oldest first."""
        ...

    def put(self, record: TierRecord, payload: bytes | memoryview) -> bool:
        """Keep a payload; the oldest give way. False if it cannot be kept."""
        ...

    def get(self, key: bytes, group: KvKind) -> bytes | None:
        """A payload exactly as it was stored, or None."""
        ...

    def close(self) -> None: ...


class SqliteTier:
    """A tier in a directory of its own.

    Args:
        directory: made if missing. For one process.
        max_bytes: of payloads.
        scope: what must agree for anything to be reused (the layout's fingerprint, the block size): what another
            scope left there is removed.
        secret: key of the hash, 0 to 64 bytes. With one, whoever can write to the disk but does not know it
            cannot plant state.

    Raises:
        ConfigError: the directory cannot be written, or the disk has not that much room.
        UsageError: the secret is too long.
    """

    def __init__(self, directory: Path, max_bytes: int, *, scope: str, secret: bytes = b"") -> None:
        if len(secret) > blake2b.MAX_KEY_SIZE:
            raise UsageError("the key of the hash is too long", expected=f"{blake2b.MAX_KEY_SIZE} bytes or fewer")
        self.stats = TierStats()
        self.max_bytes = max_bytes
        self._scope = scope
        self._secret = secret
        self._path = directory / FILE_NAME
        self._db: sqlite3.Connection | None = None
        self._held_bytes = 0
        self._check_room(directory)
        try:
            self._db = self._open()
        except sqlite3.Error as error:
            if not _damaged(error):
                raise self._cannot_open(error) from error
            self._db = self._start_over(error)
        self._attempt(self._shrink)

    @property
    def held_bytes(self) -> int:
        """Bytes of payloads held."""
        return self._held_bytes

    def records(self) -> list[TierRecord]:
        """All that it holds, oldest first: what a starting node can offer."""
        return self._attempt(_list) or []

    def put(self, record: TierRecord, payload: bytes | memoryview) -> bool:
        """Keep a payload; the oldest give way. False if it cannot be kept: too large, or the disk failed."""
        size = memoryview(payload).nbytes
        if size != record.n_bytes:
            raise UsageError("a payload of another size", expected=record.n_bytes, found=size)
        if size > self.max_bytes or self._attempt(lambda db: self._store(db, record, payload)) is None:
            return False
        self.stats.stored += 1
        return True

    def get(self, key: bytes, group: KvKind) -> bytes | None:
        """A payload exactly as it was stored, or None: not there, or no longer what it was."""
        found = self._attempt(lambda db: self._load(db, key, group))
        if found is None:
            self.stats.misses += 1
            return None
        record, digest, payload = found
        if isinstance(payload, bytes) and len(payload) == record.n_bytes and self._digest(record, payload) == digest:
            self.stats.hits += 1
            return payload
        self.stats.poisoned += 1
        self._attempt(lambda db: self._remove(db, key, group))
        return None

    def close(self) -> None:
        """Let go of the file. From now on everything is a miss."""
        if self._db is not None:
            self._db.close()
            self._db = None

    # --- inside ---

    def _check_room(self, directory: Path) -> None:
        """Refuse at the start what would fail later."""
        probe = directory / ".writable"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink()
            taken = self._path.stat().st_size if self._path.exists() else 0
            room = shutil.disk_usage(directory).free + taken
        except OSError as error:
            raise ConfigError(
                "the directory of the second cache tier cannot be written",
                found=str(error),
                do="give the node a directory that it may write to",
            ) from error
        if room < self.max_bytes:
            raise ConfigError(
                "the disk has no room for the second cache tier",
                expected=f"{format_bytes(self.max_bytes)} for it",
                found=f"{format_bytes(room)} free in {directory}",
                do="make room or the tier smaller",
            )

    def _open(self) -> sqlite3.Connection:
        # Transactions are our own; any one thread at a time, as the module promises.
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1.0)
        try:
            # For one process. Then SQLite also keeps the index of its log in memory of its own instead of a mapped
            # file, whose truncation would be a signal.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA mmap_size = 0")
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            # What the last seconds before a crash lose is run again: no waiting for the disk.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")
            db.executescript(_SCHEMA)
            if db.execute("SELECT name FROM scope").fetchall() != [(self._scope,)]:
                db.executescript("DELETE FROM entries; DELETE FROM payloads; DELETE FROM scope;")
                db.execute("INSERT INTO scope VALUES (?)", (self._scope,))
            (self._held_bytes,) = db.execute("SELECT COALESCE(SUM(n_bytes), 0) FROM entries").fetchone()
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _start_over(self, error: sqlite3.Error) -> sqlite3.Connection:
        """What is there cannot be read: begin with an empty file."""
        self.stats.failures += 1
        self.close()
        self._held_bytes = 0
        try:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            return self._open()
        except (sqlite3.Error, OSError) as again:
            raise self._cannot_open(again) from error

    def _cannot_open(self, error: Exception) -> ConfigError:
        return ConfigError(
            "the second cache tier cannot be opened",
            found=str(error),
            do=f"give each node a directory of its own; check the disk, or remove {self._path}",
        )

    def _attempt(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        """Do it in one transaction. If disk or store fail, that is counted and the answer is None."""
        db, held = self._db, self._held_bytes
        if db is None:
            return None
        try:
            db.execute("BEGIN")
            done = action(db)
            db.execute("COMMIT")
            return done
        except sqlite3.Error as error:
            self._held_bytes = held
            if not _damaged(error):
                self.stats.failures += 1
                if db.in_transaction:
                    db.execute("ROLLBACK")
                return None
            try:
                self._db = self._start_over(error)
            except ConfigError:
                self._db = None  # nothing can be kept there any more: all are misses from now on
            return None

    def _store(self, db: sqlite3.Connection, record: TierRecord, payload: bytes | memoryview) -> bool:
        self._remove(db, record.key, record.group)
        self._shrink(db, record.n_bytes)
        columns = (record.key, record.group.value, record.parent, record.n_tokens, record.n_bytes)
        done = db.execute(
            "INSERT INTO entries (key, tag, parent, n_tokens, n_bytes, digest) VALUES (?, ?, ?, ?, ?, ?)",
            (*columns, self._digest(record, payload)),
        )
        db.execute("INSERT INTO payloads VALUES (?, ?)", (done.lastrowid, payload))
        self._held_bytes += record.n_bytes
        return True

    def _load(self, db: sqlite3.Connection, key: bytes, group: KvKind) -> tuple[TierRecord, bytes, object] | None:
        row = db.execute(
            "SELECT parent, n_tokens, n_bytes, digest, payload FROM entries LEFT JOIN payloads USING (id) "
            "WHERE key = ? AND tag = ?",
            (key, group.value),
        ).fetchone()
        return row and (TierRecord(key, group, *row[:3]), row[3], row[4])

    def _shrink(self, db: sqlite3.Connection, coming_bytes: int = 0) -> None:
        """Remove the oldest until there is room for what is coming."""
        while self._held_bytes + coming_bytes > self.max_bytes:
            row = db.execute("SELECT key, tag FROM entries ORDER BY id LIMIT 1").fetchone()
            if row is None:
                break
            self._remove(db, row[0], row[1])
            self.stats.removed += 1

    def _remove(self, db: sqlite3.Connection, key: bytes, tag: str) -> None:
        row = db.execute("SELECT id, n_bytes FROM entries WHERE key = ? AND tag = ?", (key, str(tag))).fetchone()
        if row is not None:
            db.execute("DELETE FROM entries WHERE id = ?", row[:1])
            db.execute("DELETE FROM payloads WHERE id = ?", row[:1])
            self._held_bytes -= row[1]

    def _digest(self, record: TierRecord, payload: bytes | memoryview) -> bytes:
        hasher = blake2b(digest_size=DIGEST_BYTES, key=self._secret, person=b"prfaas tier 1")
        for part in (record.key, record.group.value.encode(), record.parent, self._scope.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
        hasher.update(f"{record.n_tokens} {record.n_bytes} ".encode())
        hasher.update(payload)
        return hasher.digest()


def _list(db: sqlite3.Connection) -> list[TierRecord]:
    rows = db.execute("SELECT key, tag, parent, n_tokens, n_bytes FROM entries ORDER BY id").fetchall()
    return [
        TierRecord(key, KvKind(tag), parent, tokens, size) for key, tag, parent, tokens, size in rows if tag in _TAGS
    ]


def _damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is spoilt, so that trying again is of no use."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code == sqlite3.SQLITE_IOERR_SHORT_READ
