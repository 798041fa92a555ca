"""The global KVCache manager beside a plain dictionary, and what it does not believe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas_net.cache import events
from prfaas_net.cache.events import Delta, Removal, Run, Snapshot, parse_event
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager, ClusterMatch, Match, Outcome, Resync
from prfaas_net.errors import UsageError
from prfaas_net.kv import KvKind

FULL, WINDOW, LINEAR = KvKind.FULL, KvKind.WINDOW, KvKind.LINEAR
BLOCK = 4
ROOT = PrefixScope("layout", BLOCK).root
SALTED = PrefixScope("layout", BLOCK, salt="s").root


def chain(n_blocks: int, *, salt: str = "", first: int = 0) -> bytes:
    return prefix_keys(PrefixScope("layout", BLOCK, salt=salt), range(first, first + n_blocks * BLOCK))


def block(keys: bytes, start: int, stop: int | None = None) -> bytes:
    return keys[start * KEY_BYTES : ((start + 1) if stop is None else stop) * KEY_BYTES]


def snapshot(node: str = "a", *, groups: frozenset[KvKind] = frozenset({FULL, LINEAR}), **changes: Any) -> Any:
    stored = tuple(changes.pop("stored", ()))
    fields: dict[str, Any] = {
        "node": node,
        "boot": "b",
        "layout": "layout",
        "block_tokens": BLOCK,
        "seq": 0,
        "groups": groups,
    }
    return Snapshot(**(fields | {"stored": stored} | changes)).to_json()


def hybrid(**options: int) -> CacheManager:
    return CacheManager("layout", BLOCK, frozenset({FULL, LINEAR}), **options)


def lengths(match: Match) -> dict[str, tuple[int, int]]:
    return {node.node_id: (node.usable_tokens, node.rows_tokens) for node in match.nodes}


# -- what a hit is ---------------------------------------------------------------------------------------------------


def test_a_hit_ends_where_the_linear_state_is() -> None:
    """Blocks cached to 4096 tokens with a state at 3072 only: a prefill can start at 3072."""
    keys = chain(1024)
    manager = hybrid()
    manager.apply("a", "x", snapshot(stored=[Run(FULL, keys, ROOT), Run(LINEAR, block(keys, 767))]), now=0)
    assert lengths(manager.match(keys, n_tokens=5000)) == {"a": (3072, 4096)}
    assert manager.match(keys, n_tokens=5000).by_cluster() == {"x": ClusterMatch(3072, 4096)}


def test_without_a_state_there_is_no_hit_but_rows_are_known() -> None:
    keys = chain(8)
    manager = hybrid()
    manager.apply("a", "x", snapshot(stored=[Run(FULL, keys, ROOT)]), now=0)
    assert lengths(manager.match(keys, n_tokens=100)) == {"a": (0, 32)}


def test_every_exact_group_must_be_at_the_same_length() -> None:
    keys = chain(8)
    manager = CacheManager("layout", BLOCK, frozenset({FULL, WINDOW, LINEAR}))
    stored = [
        Run(FULL, keys, ROOT),
        Run(LINEAR, block(keys, 2) + block(keys, 5)),
        Run(WINDOW, block(keys, 2) + block(keys, 6)),
    ]
    groups = frozenset({FULL, WINDOW, LINEAR})
    assert manager.apply("a", "x", snapshot(groups=groups, stored=stored), now=0).applied
    assert lengths(manager.match(keys, n_tokens=100)) == {"a": (12, 32)}


@pytest.mark.parametrize("n_tokens", [0, 1, 4, 5, 16, 17, 32, 33])
def test_the_last_token_is_always_computed(n_tokens: int) -> None:
    keys = chain(n_tokens // BLOCK)
    manager = CacheManager("layout", BLOCK, frozenset({FULL}))
    manager.apply("a", "x", snapshot(groups=frozenset({FULL}), stored=[Run(FULL, chain(8), ROOT)]), now=0)
    most = max(0, n_tokens - 1) // BLOCK * BLOCK
    assert lengths(manager.match(keys, n_tokens=n_tokens)) == ({"a": (most, most)} if most else {})


def test_a_layout_without_full_attention_hits_at_its_states() -> None:
    keys, groups = chain(8), frozenset({LINEAR})
    manager = CacheManager("layout", BLOCK, groups)
    manager.apply("a", "x", snapshot(groups=groups, stored=[Run(LINEAR, block(keys, 1) + block(keys, 6))]), now=0)
    assert lengths(manager.match(keys, n_tokens=100)) == {"a": (28, 0)}
    assert lengths(manager.match(keys, n_tokens=28)) == {"a": (8, 0)}


def test_a_hole_ends_the_rows() -> None:
    keys = chain(8)
    manager = CacheManager("layout", BLOCK, frozenset({FULL}))
    manager.apply("a", "x", snapshot(groups=frozenset({FULL}), stored=[Run(FULL, keys, ROOT)]), now=0)
    manager.apply("a", "x", Delta(1, removed=(Removal(FULL, block(keys, 3)),)), now=0)
    assert lengths(manager.match(keys, n_tokens=100)) == {"a": (12, 12)}


def test_a_block_both_stored_and_removed_in_one_event_is_not_held() -> None:
    keys = chain(1)
    manager = hybrid()
    manager.apply("a", "x", snapshot(), now=0)
    event = Delta(1, stored=(Run(FULL, keys, ROOT),), removed=(Removal(FULL, keys),))
    assert manager.apply("a", "x", event, now=0).applied
    assert manager.n_blocks == 0


def test_salted_prompts_share_nothing_with_plain_ones() -> None:
    plain, salted = chain(4), chain(4, salt="s")
    manager = CacheManager("layout", BLOCK, frozenset({FULL}))
    run = Run(FULL, salted, SALTED, root=True)
    assert manager.apply("a", "x", snapshot(groups=frozenset({FULL}), stored=[run]), now=0).applied
    assert lengths(manager.match(plain, n_tokens=100)) == {}
    assert lengths(manager.match(salted, n_tokens=100)) == {"a": (16, 16)}


def test_a_cluster_has_the_best_of_its_nodes() -> None:
    keys = chain(8)
    manager = hybrid()
    for node, cluster, rows, state in [("a", "x", 8, 2), ("b", "x", 4, 4), ("c", "y", 3, 1)]:
        runs = [Run(FULL, block(keys, 0, rows), ROOT), Run(LINEAR, block(keys, state - 1))]
        manager.apply(node, cluster, snapshot(node, stored=runs), now=0)
    assert manager.match(keys, n_tokens=100).by_cluster() == {"x": ClusterMatch(16, 32), "y": ClusterMatch(4, 12)}
    manager.drop("b")
    assert manager.match(keys, n_tokens=100).by_cluster()["x"] == ClusterMatch(8, 32)


def test_more_nodes_than_fit_one_word_are_told_apart() -> None:
    keys = chain(3)
    manager = CacheManager("layout", BLOCK, frozenset({FULL}))
    for i in range(150):
        run = Run(FULL, block(keys, 0, 1 + i % 3), ROOT)
        manager.apply(f"n{i}", "x", snapshot(f"n{i}", groups=frozenset({FULL}), stored=[run]), now=0)
    found = lengths(manager.match(keys, n_tokens=100))
    assert found == {f"n{i}": ((1 + i % 3) * BLOCK,) * 2 for i in range(150)}


def test_a_node_that_is_silent_is_known() -> None:
    manager = hybrid()
    manager.apply("a", "x", snapshot(), now=1.0)
    manager.apply("b", "x", snapshot("b"), now=5.0)
    assert manager.silent(now=6.0, for_s=5.0) == ["a"]


# -- what is not believed --------------------------------------------------------------------------------------------

KEYS = chain(4)
RUN = {"group": "full", "parent": ROOT.hex(), "keys": KEYS.hex()}
BAD: list[tuple[str, Any, Resync]] = [
    ("a gap", {"event": "delta", "seq": 2}, Resync.GAP),
    ("a repeated number", {"event": "delta", "seq": 0}, Resync.REPEATED),
    ("unknown parent", {"event": "delta", "seq": 1, "stored": [RUN | {"parent": "11" * 16}]}, Resync.UNKNOWN_PARENT),
    ("another salt's root, not said to be one",
     {"event": "delta", "seq": 1, "stored": [RUN | {"parent": SALTED.hex()}]}, Resync.UNKNOWN_PARENT),
    ("a state's key as parent",
     {"event": "delta", "seq": 1, "stored": [{"group": "linear", "keys": "22" * 16}, RUN | {"parent": "22" * 16}]},
     Resync.UNKNOWN_PARENT),
    ("another layout", snapshot(layout="other"), Resync.LAYOUT),
    ("another block size", snapshot(block_tokens=8), Resync.LAYOUT),
    ("other groups", snapshot(groups=frozenset({FULL})), Resync.LAYOUT),
    ("another node's snapshot", snapshot("b"), Resync.MALFORMED),
    ("not an object", [1, 2], Resync.MALFORMED),
    ("null", None, Resync.MALFORMED),
    ("an unknown event", {"event": "x"}, Resync.MALFORMED),
    ("an event of a wrong type", {"event": {}}, Resync.MALFORMED),
    ("a negative number", {"event": "delta", "seq": -1}, Resync.MALFORMED),
    ("a number that is none", {"event": "delta", "seq": True}, Resync.MALFORMED),
    ("an enormous number", {"event": "delta", "seq": 1 << 64}, Resync.MALFORMED),
    ("stored is no list", {"event": "delta", "seq": 1, "stored": {}}, Resync.MALFORMED),
    ("a run is no object", {"event": "delta", "seq": 1, "stored": [[]]}, Resync.MALFORMED),
    ("an unknown group", {"event": "delta", "seq": 1, "stored": [RUN | {"group": "x"}]}, Resync.MALFORMED),
    ("a group of a wrong type", {"event": "delta", "seq": 1, "stored": [RUN | {"group": []}]}, Resync.MALFORMED),
    ("a group the layout lacks", {"event": "delta", "seq": 1, "stored": [{"group": "window", "keys": "22" * 16}]},
     Resync.MALFORMED),
    ("removed from a group the layout lacks",
     {"event": "delta", "seq": 1, "removed": [{"group": "window", "keys": "22" * 16}]}, Resync.MALFORMED),
    ("half a key", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": "00" * 15}]}, Resync.MALFORMED),
    ("no keys", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": ""}]}, Resync.MALFORMED),
    ("not hex", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": "xy" * 16}]}, Resync.MALFORMED),
    ("white space in hex", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": "11 " * 16}]}, Resync.MALFORMED),
    ("keys of a wrong type", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": 7}]}, Resync.MALFORMED),
    ("a key of zeros", {"event": "delta", "seq": 1, "stored": [RUN | {"keys": "00" * 16}]}, Resync.MALFORMED),
    ("two parents", {"event": "delta", "seq": 1, "stored": [RUN | {"parent": ROOT.hex() * 2}]}, Resync.MALFORMED),
    ("no parent", {"event": "delta", "seq": 1, "stored": [{"group": "full", "keys": "11" * 16}]}, Resync.MALFORMED),
    ("a root flag of a wrong type", {"event": "delta", "seq": 1, "stored": [RUN | {"root": 1}]}, Resync.MALFORMED),
    ("removed is no list of objects", {"event": "delta", "seq": 1, "removed": ["00"]}, Resync.MALFORMED),
    ("cleared of a wrong type", {"event": "delta", "seq": 1, "cleared": "yes"}, Resync.MALFORMED),
    ("an enormous id", snapshot(boot="b" * 1000), Resync.MALFORMED),
]  # fmt: skip


@pytest.mark.parametrize(("event", "reason"), [(e, r) for _, e, r in BAD], ids=[name for name, _, _ in BAD])
def test_what_does_not_follow_is_refused_and_the_node_starts_anew(event: Any, reason: Resync) -> None:
    """Counted, its entries dropped, other nodes untouched; the next snapshot is believed."""
    manager = hybrid()
    stored = [Run(FULL, KEYS, ROOT), Run(LINEAR, block(KEYS, 3))]
    for node in ("a", "b"):
        assert manager.apply(node, "x", snapshot(node, stored=stored), now=0).applied
    assert manager.apply("a", "x", event, now=0).resync is reason
    assert manager.counters[f"resync_{reason.value}"] == 1
    assert lengths(manager.match(KEYS, n_tokens=100)) == {"b": (16, 16)}
    assert manager.awaiting() == ["a"]
    assert manager.apply("a", "x", {"event": "delta", "seq": 1}, now=0).resync is Resync.NO_SNAPSHOT
    assert manager.apply("a", "x", snapshot(seq=9, stored=stored), now=0).applied
    assert lengths(manager.match(KEYS, n_tokens=100)) == {"a": (16, 16), "b": (16, 16)}
    assert manager.apply("a", "x", {"event": "delta", "seq": 10}, now=0).applied


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["full", "linear", ROOT.hex(), "11" * 16])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["event", "seq", "stored", "removed", "cleared", "group", "keys", "parent", "root"]), inner
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(body=JSON, field=st.sampled_from(["stored", "removed", "cleared", "groups", "layout", "node", "block_tokens"]))
def test_whatever_a_node_says_is_applied_or_refused(body: Any, field: str) -> None:
    """Any JSON, alone or as a part of an event: never an exception, and no claim after a refusal."""
    manager = hybrid()
    for event in (body, snapshot() | {field: body}, {"event": "delta", "seq": 1, field: body}):
        manager.apply("a", "x", snapshot(stored=[Run(FULL, KEYS, ROOT)]), now=0)
        if not manager.apply("a", "x", event, now=0).applied:
            assert manager.n_blocks == 0


def test_a_node_cannot_fill_the_memory() -> None:
    manager = hybrid(max_node_blocks=100)
    manager.apply("a", "x", snapshot(stored=[Run(FULL, chain(60), ROOT)]), now=0)
    for seq in range(1, 20):  # the same blocks again and again are no more blocks
        event = Delta(seq, stored=(Run(FULL, chain(30), ROOT),))
        assert manager.apply("a", "x", event, now=0).applied
    assert manager.node_blocks("a") == 60
    event = Delta(20, stored=(Run(FULL, chain(50, first=1000), ROOT),))
    assert manager.apply("a", "x", event, now=0).resync is Resync.TOO_LARGE
    assert manager.n_blocks == 0


def test_an_event_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the text of one run, and by all of them together."""
    monkeypatch.setattr(events, "MAX_KEYS_PER_EVENT", 6)
    monkeypatch.setattr(events, "_MAX_DIGITS", 6 * 2 * KEY_BYTES)
    manager = hybrid()
    for runs in ([chain(7)], [chain(4), chain(4)]):
        for field in ("stored", "removed"):
            manager.apply("a", "x", snapshot(), now=0)
            parts = [{"group": "full", "parent": ROOT.hex(), "keys": keys.hex()} for keys in runs]
            outcome = manager.apply("a", "x", {"event": "delta", "seq": 1, field: parts}, now=0)
            assert outcome.resync is Resync.TOO_LARGE
    assert manager.memory_bytes < 1 << 20


def test_nodes_are_bounded_in_number() -> None:
    manager = hybrid(max_nodes=2)
    outcomes = [manager.apply(node, "x", snapshot(node), now=0) for node in "abc"]
    assert [outcome.resync for outcome in outcomes] == [None, None, Resync.TOO_LARGE]
    manager.drop("a")
    assert manager.apply("c", "x", snapshot("c"), now=0).applied


def test_keys_that_are_no_keys_are_a_callers_error() -> None:
    manager = hybrid()
    manager.apply("a", "x", snapshot(), now=0)
    assert manager.match(b"", n_tokens=0) == Match()
    with pytest.raises(UsageError):
        manager.match(b"half a key", n_tokens=100)
    with pytest.raises(UsageError):
        CacheManager("layout", BLOCK, frozenset())


def test_events_survive_the_wire() -> None:
    runs = (Run(FULL, chain(2), ROOT), Run(FULL, chain(2, salt="s"), SALTED, root=True), Run(LINEAR, chain(1)))
    for event in (
        Snapshot("a", "b", "layout", 4, 7, frozenset({FULL, LINEAR}), runs),
        Delta(8, runs, (Removal(LINEAR, chain(1)),), cleared=True),
        Delta(9),
    ):
        assert parse_event(event.to_json()) == event


# -- beside a model --------------------------------------------------------------------------------------------------

# A small tree of prefixes: two chains of 12 that share their first 5 blocks, long enough for both ways into the index.
TREE = {"p": chain(40), "q": chain(5) + prefix_keys(PrefixScope("other", BLOCK), range(35 * BLOCK))}
NODES = [f"n{i}" for i in range(5)]


class Beside(RuleBasedStateMachine):
    """The manager and a dictionary of sets are told the same; every match is the model's."""

    @initialize(groups=st.sampled_from([{FULL}, {FULL, LINEAR}, {FULL, WINDOW, LINEAR}, {LINEAR}, {WINDOW, LINEAR}]))
    def start(self, groups: set[KvKind]) -> None:
        self.groups = frozenset(groups)
        self.manager = CacheManager("layout", BLOCK, self.groups)
        self.seq: dict[str, int] = {}
        self.held: dict[str, dict[KvKind, set[bytes]]] = {}

    def say(self, node: str, event: Any) -> Outcome:
        return self.manager.apply(node, f"c{NODES.index(node) % 2}", event, now=0)

    def lose(self, node: str) -> None:
        self.seq.pop(node, None)
        self.held.pop(node, None)

    def take(self, node: str, runs: list[Run]) -> bool:
        """The model's own judgement of stored runs."""
        held = self.held[node]
        for run in runs:
            if run.group is FULL and run.parent != ROOT and run.parent not in held[FULL]:
                self.lose(node)
                return False
            for start in range(0, len(run.keys), KEY_BYTES):
                held[run.group].add(run.keys[start : start + KEY_BYTES])
        return True

    def runs(self, data: st.DataObject) -> list[Run]:
        runs = []
        for _ in range(data.draw(st.integers(0, 3))):
            keys = TREE[data.draw(st.sampled_from("pq"))]
            group = data.draw(st.sampled_from(sorted(self.groups)))
            start = data.draw(st.integers(0, 39) | st.just(0))
            stop = data.draw(st.integers(start + 1, 40) | st.just(start + 1))
            parent = b"" if group is not FULL else block(keys, start - 1) if start else ROOT
            runs.append(Run(group, block(keys, start, stop), parent))
        return runs

    @rule(node=st.sampled_from(NODES), seq=st.integers(0, 100), data=st.data())
    def snapshot(self, node: str, seq: int, data: st.DataObject) -> None:
        runs = self.runs(data)
        self.seq[node], self.held[node] = seq, {group: set() for group in self.groups}
        event = snapshot(node, groups=self.groups, seq=seq, stored=runs)
        assert self.say(node, event).applied is self.take(node, runs)

    @rule(node=st.sampled_from(NODES), data=st.data(), cleared=st.sampled_from([False] * 5 + [True]))
    def delta(self, node: str, data: st.DataObject, cleared: bool) -> None:
        runs = self.runs(data)
        removed = [Removal(run.group, run.keys) for run in self.runs(data)]
        event = Delta(self.seq.get(node, 0) + 1, tuple(runs), tuple(removed), cleared).to_json()
        if node not in self.seq:
            assert self.say(node, event).resync is Resync.NO_SNAPSHOT
            return
        self.seq[node] += 1
        if cleared:
            self.held[node] = {group: set() for group in self.groups}
        right = self.take(node, runs)
        assert self.say(node, event).applied is right
        for removal in removed if right else ():
            for start in range(0, len(removal.keys), KEY_BYTES):
                self.held[node][removal.group].discard(removal.keys[start : start + KEY_BYTES])

    @precondition(lambda self: self.seq)
    @rule(data=st.data(), jump=st.sampled_from([-5, -1, 0, 2, 3]))
    def wrong_number(self, data: st.DataObject, jump: int) -> None:
        node = data.draw(st.sampled_from(sorted(self.seq)))
        seq = self.seq[node] + jump
        reason = self.say(node, {"event": "delta", "seq": seq}).resync
        assert reason is (Resync.MALFORMED if seq < 0 else Resync.GAP if jump > 0 else Resync.REPEATED)
        self.lose(node)

    @rule(node=st.sampled_from(NODES))
    def leave(self, node: str) -> None:
        self.manager.drop(node)
        self.lose(node)

    @rule(tree=st.sampled_from("pq"), n_tokens=st.integers(0, 45 * BLOCK))
    def match(self, tree: str, n_tokens: int) -> None:
        keys = TREE[tree][: n_tokens // BLOCK * KEY_BYTES]
        blocks = [block(keys, i) for i in range(min(len(keys) // KEY_BYTES, max(0, n_tokens - 1) // BLOCK))]
        expected = {}
        for node, held in self.held.items():
            rows = next((i for i, key in enumerate(blocks) if key not in held.get(FULL, set())), len(blocks))
            reach = rows if FULL in self.groups else len(blocks)
            exact = self.groups - {FULL}
            usable = [m for m in range(1, reach + 1) if all(blocks[m - 1] in held[group] for group in exact)]
            sizes = (max(usable, default=0) * BLOCK, rows * BLOCK if FULL in self.groups else 0)
            if any(sizes):
                expected[node] = sizes
        assert lengths(self.manager.match(keys, n_tokens=n_tokens)) == expected

    @invariant()
    def sizes_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        everything = {key for held in self.held.values() for keys in held.values() for key in keys}
        assert self.manager.n_blocks == len(everything)
        for node in NODES:
            assert self.manager.node_blocks(node) == sum(map(len, self.held.get(node, {}).values()))


TestBesideAModel = Beside.TestCase
TestBesideAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
