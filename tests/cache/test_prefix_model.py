"""Whatever happens in whatever order, the prefix cache does what a plain dictionary says.

The machine keeps the memory as a list of small tuples that say whose content each block has, copies what it is told
to copy, and so sees whether an entry ever points at anything but its own content.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.prefix_tree import Entry, PrefixHit, RunPlan
from prfaas_net.errors import BusyError, RefusedError
from prfaas_net.kv import KvKind

FULL, WINDOW, LINEAR = KvKind
TOKENS = 2
POOL_BLOCKS = 24
BLOCK_BYTES = 10
# Few, and with common beginnings: most prompts come again.
LONGEST = ("aabba", "aabab", "abbb", "bab")
PROMPTS = st.sampled_from([prompt[:n] for prompt in LONGEST for n in range(2, 6)])
SCOPE = PrefixScope("layout", TOKENS)


def keys_of(prompt: str) -> bytes:
    return prefix_keys(SCOPE, [ord(letter) for letter in prompt for _ in range(TOKENS)])


class CacheMachine(RuleBasedStateMachine):
    """One cache beside its model."""

    groups: ClassVar[dict[KvKind, int]]
    rows_alone = False

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(POOL_BLOCKS, BLOCK_BYTES, self.groups, TOKENS, rows_alone=self.rows_alone)
        self.states = [group for group in self.groups if group is not FULL]
        self.memory: list[Any] = [None] * POOL_BLOCKS
        self.names: dict[bytes, str] = {}
        # The model: what can be matched, as (kind of state, prompt).
        self.stored: set[tuple[KvKind, str]] = set()
        self.filling: dict[Entry, list[int]] = {}
        self.hits: list[tuple[PrefixHit, list[list[int]]]] = []
        self.outdated: set[PrefixHit] = set()  # hits of before everything was dropped
        self.runs: list[RunPlan] = []
        self.now = self.dropped_at = 0.0

    # --- what may happen ---

    @rule(prompt=PROMPTS, first=st.integers(0, 3), state=st.booleans())
    def insert(self, prompt: str, first: int, state: bool) -> None:
        self._learn(prompt)
        first = min(first, len(prompt) - 1)
        keys = keys_of(prompt)
        entries = self.cache.insert_rows(keys, first, len(prompt) - first, now=self._tick())
        if state and (entry := self.cache.insert_state(keys, len(prompt) - 1, now=self.now)) is not None:
            entries.append(entry)
        for entry in entries:
            assert entry.filling and entry not in self.filling
            self.filling[entry] = entry.blocks()

    @rule(prompt=PROMPTS)
    def insert_whole(self, prompt: str) -> None:
        self.insert(prompt, 0, True)
        for entry in [*self.filling]:
            self._commit(entry)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(sorted(self.filling, key=lambda e: (e.index, e.key, e.is_rows)))))

    def _commit(self, entry: Entry) -> None:
        blocks = self.filling.pop(entry)
        assert entry.blocks() == blocks, "it moved while it was written"
        for block, content in self._contents(entry):
            self.memory[block] = content
        forgotten = entry.forgotten
        self.cache.commit([entry])
        self._follow()
        above = (FULL, self.names[entry.key][:-1])
        if not forgotten and (above in self.stored or entry.index == 0 or FULL not in self.groups):
            waits_for_rows = not entry.is_rows and FULL in self.groups and entry.node.rows in self.filling
            assert waits_for_rows or all((group, self.names[entry.key]) in self.stored for group in entry.parts)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.filling, key=lambda e: (e.index, e.key, e.is_rows))))
        del self.filling[entry]
        self.cache.abandon([entry])

    @rule(prompt=PROMPTS, need_state=st.booleans(), extra_tokens=st.integers(0, TOKENS))
    def match(self, prompt: str, need_state: bool, extra_tokens: int) -> None:
        self._tick()
        hit = self._match(prompt, need_state, extra_tokens)
        self.hits.append((hit, [entry.blocks() for entry in hit.entries()]))

    def _match(self, prompt: str, need_state: bool, extra_tokens: int) -> PrefixHit:
        self._learn(prompt)
        n_tokens = len(prompt) * TOKENS + extra_tokens
        hit = self.cache.match(keys_of(prompt), n_tokens=n_tokens, need_state=need_state, now=self.now)
        assert hit.length_tokens == self._expected_tokens(prompt, n_tokens, need_state)
        assert (hit.state is not None) == bool(hit.length_tokens and need_state and self.states)
        assert [entry.index for entry in hit.rows] == list(range(len(hit.rows)))
        for entry in hit.entries():
            assert not entry.filling
            assert all(self.memory[block] == content for block, content in self._contents(entry))
        return hit

    @precondition(lambda self: self.hits)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hit, places = self.hits.pop(data.draw(st.integers(0, len(self.hits) - 1)))
        assert [entry.blocks() for entry in hit.entries()] == places, "it moved while it was read"
        for entry in hit.entries():
            assert all(self.memory[block] == content for block, content in self._contents(entry))
        self.cache.release(hit)

    @rule(n_blocks=st.integers(1, 8) | st.integers(1, POOL_BLOCKS + 1))
    def reserve_run(self, n_blocks: int) -> None:
        before = (self.cache.pool.n_free, self.cache.pool.n_prefix)
        if n_blocks > POOL_BLOCKS:
            with pytest.raises(RefusedError):
                self.cache.reserve_run(n_blocks * BLOCK_BYTES, now=self._tick())
            return
        try:
            plan = self.cache.reserve_run(n_blocks * BLOCK_BYTES - 1, now=self._tick())
        except BusyError:
            plan = None
        if plan is None:
            assert (self.cache.pool.n_free, self.cache.pool.n_prefix) == before
            assert self.runs or self.hits or self.filling, "nothing is in use, yet there is no room"
            return
        assert plan.n_blocks == n_blocks
        targets = {target for _, target in plan.moves}
        window = set(range(plan.first_block, plan.first_block + n_blocks))
        assert not targets & window and {source for source, _ in plan.moves} <= window
        for source, target in plan.moves:
            self.memory[target] = self.memory[source]
        for block in window:
            self.memory[block] = "a sequence"
        self.runs.append(plan)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def release_run(self, data: st.DataObject) -> None:
        plan = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        window = range(plan.first_block, plan.first_block + plan.n_blocks)
        assert all(self.memory[block] == "a sequence" for block in window)
        self.cache.release_run(plan)

    @precondition(lambda self: self.now - self.dropped_at > 25)
    @rule()
    def drop_all(self) -> None:
        self.dropped_at = self.now
        self.cache.drop_all()
        self.outdated = {hit for hit, _ in self.hits}
        self._follow()
        assert not self.stored

    # --- what always holds ---

    @invariant()
    def every_block_is_one_thing(self) -> None:
        pool = self.cache.pool
        assert pool.n_free + pool.n_prefix + pool.n_transfer == POOL_BLOCKS
        assert pool.n_transfer == sum(plan.n_blocks for plan in self.runs)
        self.cache.validate()

    @invariant()
    def the_changes_tell_what_is_there(self) -> None:
        self._follow()
        there = [(change.group, self.names[change.key]) for change in self.cache.snapshot_changes()]
        assert len(there) == len(set(there)) and set(there) == self.stored

    @invariant()
    def every_prompt_gets_what_is_there_and_no_more(self) -> None:
        for prompt in LONGEST:
            for need_state in (True, False):
                self.cache.release(self._match(prompt, need_state, 1))

    def teardown(self) -> None:
        """When all users let go and the cache is dropped, every block is free."""
        for hit, _ in self.hits:
            self.cache.release(hit)
        for plan in self.runs:
            self.cache.release_run(plan)
        self.cache.abandon(self.filling)
        self.cache.drop_all()
        self.cache.validate()
        assert self.cache.pool.n_free == POOL_BLOCKS
        assert not any(self.cache.stats.bytes_held.values())

    # --- the model ---

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _learn(self, prompt: str) -> None:
        keys = keys_of(prompt)
        for i in range(len(prompt)):
            self.names[keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]] = prompt[: i + 1]

    def _contents(self, entry: Entry) -> list[tuple[int, object]]:
        """What each of its blocks must hold."""
        name = self.names[entry.key]
        return [(b, (name, g, i)) for g, blocks in entry.parts.items() for i, b in enumerate(blocks)]

    def _follow(self) -> None:
        """Apply the cache's changes to the model; none of them may be one that must not be."""
        pinned = {
            (group, self.names[entry.key])
            for hit, _ in self.hits
            if hit not in self.outdated
            for entry in hit.entries()
            for group in entry.parts
        }
        for change in self.cache.drain_changes():
            if change.kind == "cleared":
                self.stored.clear()
                continue
            assert change.group is not None
            name = self.names[change.key]
            assert change.parent == (keys_of(name)[-2 * KEY_BYTES : -KEY_BYTES])
            what = (change.group, name)
            if change.kind == "stored":
                assert what not in self.stored
                assert FULL not in self.groups or len(name) == 1 or (FULL, name[:-1]) in self.stored
                self.stored.add(what)
            else:
                assert what not in pinned, "evicted while it was read"
                self.stored.remove(what)
                if change.group is FULL:
                    assert not any(g is FULL and other[:-1] == name for g, other in self.stored)

    def _expected_tokens(self, prompt: str, n_tokens: int, need_state: bool) -> int:
        self._follow()
        best = 0
        for n in range(1, min(len(prompt), (n_tokens - 1) // TOKENS) + 1):
            if FULL in self.groups and (FULL, prompt[:n]) not in self.stored:
                break
            if need_state and self.states:
                best = n if all((group, prompt[:n]) in self.stored for group in self.states) else best
            else:
                best = n if FULL in self.groups else 0
        return best * TOKENS


class HybridMachine(CacheMachine):
    groups: ClassVar[dict[KvKind, int]] = {FULL: 2 * BLOCK_BYTES, LINEAR: 3 * BLOCK_BYTES}


class ThreeKindsOnDecodeMachine(CacheMachine):
    groups: ClassVar[dict[KvKind, int]] = {FULL: BLOCK_BYTES, WINDOW: BLOCK_BYTES + 1, LINEAR: BLOCK_BYTES}
    rows_alone = True


class DenseMachine(CacheMachine):
    groups: ClassVar[dict[KvKind, int]] = {FULL: 2 * BLOCK_BYTES - 3}


class LinearMachine(CacheMachine):
    groups: ClassVar[dict[KvKind, int]] = {LINEAR: 4 * BLOCK_BYTES}


@pytest.mark.parametrize("machine", [HybridMachine, ThreeKindsOnDecodeMachine, DenseMachine, LinearMachine])
def test_the_cache_does_what_a_dictionary_says(machine: type[CacheMachine]) -> None:
    """Conservation, no leak, nothing half filled, no hit without its state, pinned stays, contents survive moves."""
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)
    case().runTest()
