"""The second tier: survives a restart, believes nothing that it reads, and never fails later than at the start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas_net.cache import tier as tier_module
from prfaas_net.cache.tier import FILE_NAME, SqliteTier, TierRecord
from prfaas_net.errors import ConfigError, UsageError
from prfaas_net.kv import KvKind

FULL, _, LINEAR = KvKind
PAYLOAD = bytes(range(256)) * 1024  # several pages


def record(n: int, n_bytes: int = len(PAYLOAD), group: KvKind = FULL) -> TierRecord:
    return TierRecord(bytes([n]) * 16, group, bytes([n - 1]) * 16, n * 4, n_bytes)


def open_tier(directory: Path, max_bytes: int = 1 << 20, *, scope: str = "scope", secret: bytes = b"") -> SqliteTier:
    return SqliteTier(directory, max_bytes, scope=scope, secret=secret)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SqliteTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def spoil(directory: Path, statement: str) -> None:
    """Change the file behind the tier's back."""
    db = sqlite3.connect(directory / FILE_NAME)
    db.execute(statement)
    db.commit()
    db.close()


def test_what_was_put_comes_back(tier: SqliteTier) -> None:
    assert tier.put(record(1), PAYLOAD)
    assert tier.put(record(1, 5, LINEAR), memoryview(b"state"))
    assert tier.get(record(1).key, FULL) == PAYLOAD
    assert tier.get(record(1).key, LINEAR) == b"state"
    assert tier.get(record(2).key, FULL) is None
    assert (tier.stats.stored, tier.stats.hits, tier.stats.misses) == (2, 2, 1)
    assert tier.held_bytes == len(PAYLOAD) + 5


def test_it_survives_a_restart_with_its_keys_and_their_parents(tmp_path: Path) -> None:
    before = open_tier(tmp_path)
    for n in (1, 2):
        before.put(record(n), PAYLOAD)
    before.close()
    assert before.get(record(1).key, FULL) is None
    after = open_tier(tmp_path)
    assert after.records() == [record(1), record(2)]
    assert after.get(record(2).key, FULL) == PAYLOAD
    after.close()


def test_the_oldest_give_way(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=250)
    for n in (1, 2, 3):
        assert tier.put(record(n, 100), bytes(100))
    assert [each.key[0] for each in tier.records()] == [2, 3]
    assert (tier.held_bytes, tier.stats.removed) == (200, 1)
    assert tier.put(record(2, 100), bytes(100)), "again: now it is the youngest"
    assert [each.key[0] for each in tier.records()] == [3, 2]
    assert not tier.put(record(4, 251), bytes(251))
    tier.close()
    smaller = open_tier(tmp_path, max_bytes=100)
    assert [each.key[0] for each in smaller.records()] == [2]
    smaller.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE payloads SET payload = zeroblob(length(payload))",
        "UPDATE payloads SET payload = substr(payload, 1, 1000)",
        "UPDATE payloads SET payload = CAST(payload || x'00' AS BLOB)",
        "DELETE FROM payloads",
        "UPDATE entries SET n_tokens = 400",
        "UPDATE entries SET n_tokens = -4",
        "UPDATE entries SET parent = x'01'",
        "UPDATE entries SET digest = zeroblob(32)",
        "UPDATE entries SET n_bytes = 1",
    ],
)
def test_a_poisoned_or_truncated_entry_is_counted_deleted_and_no_hit(tmp_path: Path, statement: str) -> None:
    tier = open_tier(tmp_path)
    tier.put(record(1), PAYLOAD)
    tier.close()
    spoil(tmp_path, statement)
    tier = open_tier(tmp_path)
    assert tier.get(record(1).key, FULL) is None
    assert tier.stats.poisoned == 1
    assert tier.records() == []
    assert tier.get(record(1).key, FULL) is None
    assert tier.stats.poisoned == 1
    assert tier.put(record(1), PAYLOAD) and tier.get(record(1).key, FULL) == PAYLOAD
    tier.close()


def test_an_entry_under_anothers_key_is_no_hit(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(record(1), PAYLOAD)
    tier.close()
    spoil(tmp_path, f"UPDATE entries SET key = x'{record(7).key.hex()}', tag = 'linear'")
    tier = open_tier(tmp_path)
    assert tier.get(record(7).key, LINEAR) is None and tier.stats.poisoned == 1
    tier.close()


def test_a_kind_of_state_that_is_unknown_is_passed_over(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(record(1), PAYLOAD)
    tier.close()
    spoil(tmp_path, "UPDATE entries SET tag = 'newer'")
    tier = open_tier(tmp_path, max_bytes=len(PAYLOAD))
    assert tier.records() == []
    assert tier.put(record(2), PAYLOAD), "it can still be removed to make room"
    tier.close()


def test_nobody_without_the_secret_can_plant_an_entry(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, secret=b"theirs")
    tier.put(record(1), PAYLOAD)
    tier.close()
    ours = open_tier(tmp_path, secret=b"ours")
    assert ours.get(record(1).key, FULL) is None and ours.stats.poisoned == 1
    ours.close()
    with pytest.raises(UsageError, match="too long"):
        open_tier(tmp_path, secret=bytes(65))


def test_what_another_model_left_is_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, scope="one model")
    tier.put(record(1), PAYLOAD)
    tier.close()
    other = open_tier(tmp_path, scope="another")
    assert other.records() == [] and other.held_bytes == 0
    other.close()


@pytest.mark.parametrize("damage", ["header", "body", "truncated", "empty"])
def test_a_damaged_file_costs_its_content_and_nothing_else(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    for n in range(1, 4):
        tier.put(record(n), PAYLOAD)
    tier.close()
    path = tmp_path / FILE_NAME
    raw = bytearray(path.read_bytes())
    if damage == "header":
        raw[:100] = b"x" * 100
    elif damage == "body":
        raw[200:] = b"\xa5" * (len(raw) - 200)
    path.write_bytes(bytes({"truncated": raw[: len(raw) // 2], "empty": bytearray()}.get(damage, raw)))
    tier = open_tier(tmp_path)
    for n in range(1, 4):
        assert tier.get(record(n).key, FULL) in (None, PAYLOAD)
    assert tier.put(record(5), PAYLOAD) or tier.put(record(5), PAYLOAD)
    assert tier.get(record(5).key, FULL) == PAYLOAD
    tier.close()


def test_a_file_truncated_under_way_is_misses_then_a_new_file(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=1 << 23)
    for n in range(1, 20):
        tier.put(record(n), PAYLOAD)
    tier._attempt(lambda db: None)
    assert tier._db is not None
    tier._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    tier._db.execute("PRAGMA shrink_memory")
    with (tmp_path / FILE_NAME).open("r+b") as file:
        file.truncate(70_000)
    got = [tier.get(record(n).key, FULL) for n in range(1, 20)]
    assert set(got) <= {None, PAYLOAD} and None in got
    assert tier.stats.poisoned + tier.stats.failures > 0
    assert tier.put(record(1), PAYLOAD) or tier.put(record(1), PAYLOAD)
    assert tier.get(record(1).key, FULL) == PAYLOAD
    tier.close()


def test_a_full_disk_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no room for the second cache tier"):
        open_tier(tmp_path, max_bytes=1 << 60)


def test_a_disk_that_fills_up_later_is_counted_and_does_not_raise(tier: SqliteTier) -> None:
    assert tier.put(record(1), PAYLOAD)
    assert tier._db is not None
    (pages,) = tier._db.execute("PRAGMA page_count").fetchone()
    tier._db.execute(f"PRAGMA max_page_count = {pages + 1}")  # what SQLite says then is what it says of a full disk
    assert not tier.put(record(2), PAYLOAD)
    assert tier.stats.failures == 1 and tier.held_bytes == len(PAYLOAD)
    assert tier.get(record(1).key, FULL) == PAYLOAD


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_directory_that_cannot_be_written_is_said_at_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_tier(path if kind == "a file" else path / "tier")


def test_two_nodes_cannot_share_one(tmp_path: Path, tier: SqliteTier) -> None:
    tier.put(record(1), PAYLOAD)
    with pytest.raises(ConfigError, match="a directory of its own"):
        open_tier(tmp_path)
    assert tier.get(record(1).key, FULL) == PAYLOAD


def test_when_nothing_can_be_kept_any_more_all_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.put(record(1), PAYLOAD)
    monkeypatch.setattr(tier_module, "_damaged", lambda error: True)
    monkeypatch.setattr(SqliteTier, "_open", lambda self: (_ for _ in ()).throw(sqlite3.OperationalError("gone")))
    assert tier._db is not None
    tier._db.execute("DROP TABLE payloads")
    assert tier.get(record(1).key, FULL) is None
    assert not tier.put(record(2), PAYLOAD)
    assert tier.records() == [] and tier.held_bytes == 0
    assert tier.stats.failures == 1


def test_a_payload_must_have_the_size_that_it_claims(tier: SqliteTier) -> None:
    with pytest.raises(UsageError, match="another size"):
        tier.put(record(1), b"short")
