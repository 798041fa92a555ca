"""What an engine says it holds, under our own keys, as the global manager then answers."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.cache.engine_events import Cleared, EngineBatch, EngineHash, Removed, Stored, decode_batch
from prfaas_net.cache.engine_events_mirror import EngineGroup, EngineMirror
from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager
from prfaas_net.errors import IncompatibleError, ProtocolError, RefusedError, UsageError
from prfaas_net.kv import KvKind

FULL, WINDOW, LINEAR = KvKind.FULL, KvKind.WINDOW, KvKind.LINEAR
OURS = 16  # tokens of a block of ours


def u32(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


class Engine:
    """An engine's side: names blocks by a hash of its own; and, on our side, a mirror that feeds a manager."""

    def __init__(self, size: int = OURS, groups: dict[int, EngineGroup] | None = None, **options: Any) -> None:
        self.size = size
        self.mirror = EngineMirror("e", "layout", OURS, groups=groups, **options)
        self.manager = CacheManager("layout", OURS, self.mirror.kinds)
        assert self.manager.apply("e", "x", self.mirror.start(), now=0).applied

    def hashes(self, tokens: list[int], salt: str = "") -> list[EngineHash]:
        names: list[EngineHash] = []
        name = salt.encode()
        for start in range(0, len(tokens) - self.size + 1, self.size):
            name = hashlib.blake2b(name + u32(tokens[start : start + self.size]), digest_size=8).digest()
            names.append(int.from_bytes(name, "big"))
        return names

    def stored(self, tokens: list[int], first: int = 0, last: int | None = None, **changes: Any) -> Stored:
        """Blocks ``first`` to ``last`` of a sequence."""
        names = self.hashes(tokens, changes.pop("salt", ""))
        stop = len(names) if last is None else last
        parent = names[first - 1] if first else None
        part = tokens[first * self.size : stop * self.size]
        return Stored(tuple(names[first:stop]), parent, u32(part), self.size)._replace(**changes)

    def say(self, *events: Stored | Removed | Cleared) -> None:
        for delta in self.mirror.feed(EngineBatch(events)):
            outcome = self.manager.apply("e", "x", delta.to_json(), now=0)
            assert outcome.applied, outcome

    def holds(self, tokens: list[int], salt: str = "", adapter: str = "") -> tuple[int, int]:
        """Usable tokens and rows of a prompt that goes on after ``tokens``."""
        keys = prefix_keys(PrefixScope("layout", OURS, salt, adapter), tokens)
        match = self.manager.match(keys, n_tokens=len(tokens) + 1).node("e")
        return (match.usable_tokens, match.rows_tokens) if match else (0, 0)


PROMPT = list(range(100, 164))  # 4 blocks of ours
OTHER = [*PROMPT[:24], *range(500, 540)]


def test_what_an_engine_says_on_the_wire_is_a_hit() -> None:
    engine = Engine(size=16)
    raw = [0.0, [["BlockStored", [-5, 6], None, list(range(32)), 16]], 0]
    for delta in engine.mirror.feed(decode_batch(msgpack.packb(raw))):
        assert engine.manager.apply("e", "x", delta.to_json(), now=0).applied
    assert engine.holds(list(range(32))) == (32, 32)
    engine.say(Removed(((1 << 64) - 5,)))  # the same name, unsigned
    assert engine.holds(list(range(32))) == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_a_block_of_ours_is_held_while_all_its_parts_are(size: int) -> None:
    """Stored a part at a time; complete with the last one, gone with the first that goes."""
    engine = Engine(size)
    parts = OURS // size
    for i in range(2 * parts):
        engine.say(engine.stored(PROMPT, i, i + 1))
        whole = (i + 1) // parts * OURS
        assert engine.holds(PROMPT) == (whole, whole)
    names = engine.hashes(PROMPT)
    engine.say(Removed((names[2 * parts - 1],)))
    assert engine.holds(PROMPT) == (16, 16)
    engine.say(Removed((names[0],)))
    assert engine.holds(PROMPT) == (0, 0)


def test_prefixes_that_part_inside_a_block_are_told_apart() -> None:
    engine = Engine(size=8)
    engine.say(engine.stored(PROMPT), engine.stored(OTHER, 3))
    assert engine.holds(PROMPT) == (64, 64)
    assert engine.holds(OTHER) == (64, 64)
    engine.say(Removed((engine.hashes(PROMPT)[2],)))  # the part that both blocks begin with
    assert engine.holds(PROMPT) == engine.holds(OTHER) == (16, 16)


def test_after_a_parent_never_seen_nothing_is_claimed() -> None:
    engine = Engine()
    engine.say(engine.stored(PROMPT, 2))
    assert engine.mirror.counters["unplaced"] == 2
    assert engine.manager.n_blocks == 0
    engine.say(Removed(tuple(engine.hashes(PROMPT))))
    assert engine.mirror.counters["unknown_removed"] == 4


def test_clearing_leaves_nothing() -> None:
    engine = Engine()
    engine.say(engine.stored(PROMPT), Cleared())
    assert engine.holds(PROMPT) == (0, 0)
    assert engine.mirror.n_blocks == 0
    engine.say(engine.stored(PROMPT))
    assert engine.holds(PROMPT) == (64, 64)


def test_a_block_stays_while_one_medium_has_it() -> None:
    """Offloaded to the CPU tier without tokens, then gone from the GPU, then from there."""
    engine = Engine()
    names = tuple(engine.hashes(PROMPT))
    engine.say(engine.stored(PROMPT), Stored((*names, 77), None, b"", OURS, medium="CPU"))
    assert engine.mirror.counters["unplaced"] == 1  # 77 was never seen
    engine.say(Removed(names))
    assert engine.holds(PROMPT) == (64, 64)
    engine.say(Removed(names))  # twice from the same medium: nothing more
    assert engine.holds(PROMPT) == (64, 64)
    engine.say(Removed(names, medium="CPU"))
    assert engine.holds(PROMPT) == (0, 0)
    assert engine.mirror.n_blocks == 0


def test_salts_and_adapters_have_their_own_keys() -> None:
    engine = Engine()
    engine.say(engine.stored(PROMPT, salt="A", extra_keys=(("A",), (), (), ())))
    engine.say(engine.stored(OTHER, salt="lora", adapter="poet", extra_keys=(("poet",),) * 4))
    assert engine.holds(PROMPT) == (0, 0)
    assert engine.holds(PROMPT, salt="A") == (64, 64)
    assert engine.holds(OTHER) == (0, 0)
    assert engine.holds(OTHER, adapter="poet") == (64, 64)
    engine.say(engine.stored(OTHER, 3, salt="lora"))  # of the same parent, but not the adapter's
    assert engine.mirror.counters["unplaced"] == 1


def test_images_end_what_is_claimed() -> None:
    """What else went into a block's hash is not in our key: that block and those after it are not ours to name."""
    engine = Engine()
    engine.say(engine.stored(PROMPT, extra_keys=((), (("image", 3),), (), ())))
    assert engine.holds(PROMPT) == (16, 16)
    assert engine.mirror.counters["unplaced"] == 3
    engine.say(engine.stored(OTHER, salt="x", extra_keys=((7,), (), (), ())))
    assert engine.mirror.counters["unplaced"] == 7


HYBRID = {
    0: EngineGroup(LINEAR),
    1: EngineGroup(LINEAR),
    2: EngineGroup(FULL),
    3: EngineGroup(WINDOW, window_tokens=25),
}


def test_a_hybrid_engine_hits_where_every_group_agrees() -> None:
    """Two groups of linear layers, told of before the rows that they follow; a window of two blocks and a half."""
    engine = Engine(size=8, groups=HYBRID)
    states = [engine.stored(PROMPT, 5, 6, group=group, kind="mamba") for group in (0, 1)]
    rows = engine.stored(PROMPT, group=2, kind="mla_attention")
    window = engine.stored(PROMPT, 2, 6, group=3, kind="sliding_window")
    engine.say(states[0], window, rows)
    assert engine.holds(PROMPT) == (0, 64)  # one group of linear layers is missing
    engine.say(states[1])
    assert engine.holds(PROMPT) == (48, 64)
    names = engine.hashes(PROMPT)
    engine.say(Removed((names[2],), group=3))  # the window reaches back 24 tokens from 48: blocks 3, 4, 5
    assert engine.holds(PROMPT) == (48, 64)
    engine.say(Removed((names[3],), group=3))
    assert engine.holds(PROMPT) == (0, 64)
    engine.say(engine.stored(PROMPT, 3, 6, group=3))
    assert engine.holds(PROMPT) == (48, 64)
    engine.say(Removed((names[5],), group=0))
    assert engine.holds(PROMPT) == (0, 64)


def test_a_block_removed_before_its_parent_came_stays_removed() -> None:
    engine = Engine(size=8, groups=HYBRID)
    state = engine.stored(PROMPT, 5, 6, group=0)
    rows = engine.stored(PROMPT, group=2)
    engine.say(state, Removed(state.hashes, group=0), rows)
    engine.say(*(engine.stored(PROMPT, *span, group=group) for group, span in [(1, (5, 6)), (3, (0, 6))]))
    assert engine.holds(PROMPT) == (0, 64)


def test_a_part_that_only_another_group_holds_does_not_count() -> None:
    engine = Engine(size=8, groups={0: EngineGroup(LINEAR), 1: EngineGroup(FULL)})
    engine.say(engine.stored(PROMPT, 0, 1, group=0), engine.stored(PROMPT, 1, 2, group=1))
    engine.say(engine.stored(PROMPT, 1, 2, group=0))
    assert engine.holds(PROMPT) == (0, 0)
    engine.say(engine.stored(PROMPT, 0, 2, group=1))
    assert engine.holds(PROMPT) == (16, 16)


def test_a_block_after_one_that_is_not_whole_is_told_once_that_is() -> None:
    engine = Engine(size=8)
    engine.say(engine.stored(PROMPT, 0, 4), Removed((engine.hashes(PROMPT)[2],)))
    engine.say(engine.stored(PROMPT, 4, 6))
    assert engine.manager.n_blocks == 1
    engine.say(engine.stored(PROMPT, 2))
    assert engine.holds(PROMPT) == (64, 64)


def test_what_follows_half_a_block_whose_beginning_is_gone_is_not_placed() -> None:
    """Neither its key nor its parts can be known."""
    engine = Engine(size=4)
    names = engine.hashes(PROMPT)
    engine.say(engine.stored(PROMPT, 0, 3), Removed((names[0],)))
    engine.say(engine.stored(PROMPT, 3, 4))
    assert engine.mirror.counters["unplaced"] == 1
    assert engine.manager.n_blocks == 0


def test_a_window_that_reaches_back_over_unknown_blocks_is_not_claimed() -> None:
    groups = {0: EngineGroup(FULL), 1: EngineGroup(WINDOW, window_tokens=33)}
    engine = Engine(groups=groups)
    names = engine.hashes(PROMPT)
    engine.say(engine.stored(PROMPT), engine.stored(PROMPT, 1, group=1))
    assert engine.holds(PROMPT) == (64, 64)
    engine.say(Removed((names[1],)), Removed((names[1],), group=1), engine.stored(PROMPT, 2, 3, group=1))
    assert engine.holds(PROMPT) == (0, 16)
    engine.say(engine.stored(PROMPT, 1, 2))
    assert engine.holds(PROMPT) == (64, 64)  # the window at 64 needs blocks 2 and 3 only


BAD: dict[str, tuple[Any, type[Exception]]] = {
    "blocks that do not divide ours": ({"block_tokens": 7, "tokens": u32([1] * 28)}, IncompatibleError),
    "blocks of no tokens": ({"block_tokens": 0}, IncompatibleError),
    "a group that was not configured": ({"group": 1}, IncompatibleError),
    "a group of another kind": ({"kind": "mamba"}, IncompatibleError),
    "a kind unheard of": ({"kind": "telepathy"}, IncompatibleError),
    "one hash for two blocks": ({"hashes": (1, 1, 2, 3)}, ProtocolError),
    "more blocks than are kept track of": ({"hashes": tuple(range(8)), "tokens": u32([1] * 128)}, RefusedError),
}


@pytest.mark.parametrize(("changes", "error"), BAD.values(), ids=BAD.keys())
def test_what_contradicts_the_configuration_or_itself_is_refused(changes: Any, error: type[Exception]) -> None:
    engine = Engine(max_blocks=6)
    with pytest.raises(error):
        engine.say(engine.stored(PROMPT)._replace(**changes))


def test_blocks_of_changing_size_must_not_cross_ours() -> None:
    engine = Engine(size=4)
    engine.say(engine.stored(PROMPT, 0, 3))
    with pytest.raises(IncompatibleError):
        engine.say(Stored((9,), engine.hashes(PROMPT)[2], u32([1] * 8), 8))


def test_tokens_of_another_number_of_blocks_are_not_placed() -> None:
    engine = Engine()
    engine.say(engine.stored(PROMPT)._replace(tokens=u32([1] * 17)))
    assert engine.mirror.counters["unplaced"] == 4


def test_media_are_bounded_and_an_engine_has_groups() -> None:
    engine = Engine()
    with pytest.raises(RefusedError):
        engine.say(*(engine.stored(PROMPT, medium=str(i)) for i in range(65)))
    with pytest.raises(UsageError):
        EngineMirror("e", "layout", OURS, groups={})


# -- beside a model --------------------------------------------------------------------------------------------------

# Eight prompts over a small alphabet of parts, so that they share prefixes that end anywhere.
WORDS = ["12345678", "12345699", "12388888", "19999999", "77777777", "12", "1234567", "123"]
PROMPTS = [[int(digit) * 10 + i for digit in word for i in range(8)] for word in WORDS]
STEP = st.tuples(st.sampled_from(["store", "remove", "evict"]), st.integers(0, 7), st.integers(0, 8))


def held_rows(engine: Engine, held: set[EngineHash], tokens: list[int]) -> int:
    """The model: blocks of ours from the start whose parts are all there."""
    n_parts = next((i for i, name in enumerate(engine.hashes(tokens)) if name not in held), len(engine.hashes(tokens)))
    return n_parts * engine.size // OURS * OURS


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=25), size=st.sampled_from([4, 8]), arbitrary=st.booleans())
def test_no_claim_goes_beyond_what_the_engine_holds(
    steps: list[tuple[str, int, int]], size: int, arbitrary: bool
) -> None:
    """Exactly what it holds when blocks go last first, as engines evict; never more, in whatever order they go."""
    engine = Engine(size)
    held: set[EngineHash] = set()
    for action, which, where in steps:
        names = engine.hashes(PROMPTS[which])
        if action == "store":
            first = next((i for i, name in enumerate(names) if name not in held), len(names))
            if first < len(names):
                engine.say(engine.stored(PROMPTS[which], first))
                held |= set(names[first:])
        elif arbitrary:
            gone = names[where % len(names)]
            engine.say(Removed((gone,)))
            held.discard(gone)
        else:
            mine = [name for name in names if name in held][-1 - where :]
            others = {n for i, p in enumerate(PROMPTS) if i != which for n in engine.hashes(p)}
            gone_last = [name for name in mine if name not in others]
            engine.say(Removed(tuple(reversed(gone_last))))
            held -= set(gone_last)
        for tokens in PROMPTS:
            true = held_rows(engine, held, tokens)
            claimed = engine.holds(tokens)[1]
            assert claimed <= true if arbitrary else claimed == true
    engine.say(Removed(tuple(held)))
    assert engine.manager.n_blocks == engine.mirror.n_blocks == 0
