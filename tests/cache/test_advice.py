"""What the manager would have moved: hot prefixes to more nodes, useful ones to other clusters, and nothing twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.cache.advice import AdvicePolicy, Advisor, CopyPrefix, Instruction, Replicate
from prfaas_net.cache.events import Run, Snapshot
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager
from prfaas_net.errors import UsageError
from prfaas_net.kv import KvKind

BLOCK = 4
SCOPE = PrefixScope("layout", BLOCK)
NODES = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b"}


def prefix(n_blocks: int, first: int = 0) -> bytes:
    return prefix_keys(SCOPE, range(first, first + n_blocks * BLOCK))


HOT = prefix(8)
N = 8 * BLOCK


@dataclass
class Costs:
    """A second a token to compute, a kilobit a token to move."""

    bps: dict[tuple[str, str], float] = field(default_factory=lambda: {("a", "b"): 1e5, ("b", "a"): 1e5})

    def kv_bytes(self, start_tokens: int, stop_tokens: int) -> int:
        return 125 * (stop_tokens - start_tokens)

    def prefill_s(self, cluster: str, start_tokens: int, stop_tokens: int) -> float:
        return float(stop_tokens - start_tokens)

    def bandwidth_bps(self, source_cluster: str, target_cluster: str) -> float:
        return self.bps.get((source_cluster, target_cluster), 0.0)


class Fleet:
    """A manager, an advisor, and prefixes that are used evenly."""

    def __init__(self, **policy: Any) -> None:
        self.manager = CacheManager("layout", BLOCK, frozenset({KvKind.FULL}))
        self.advisor = Advisor(AdvicePolicy(half_life_s=10, node_hits_per_s=2, **policy))
        self.now = 0.0

    def hold(self, node: str, keys: bytes = HOT) -> None:
        run = Run(KvKind.FULL, keys, SCOPE.root)
        event = Snapshot(node, "b", "layout", BLOCK, 0, frozenset({KvKind.FULL}), (run,))
        assert self.manager.apply(node, NODES[node], event, now=self.now).applied

    def use(self, per_s: float, for_s: float = 100.0, *, cluster: str = "a", keys: bytes = HOT, **kind: bool) -> None:
        private = kind.get("private", False)
        for _ in range(int(per_s * for_s)):
            self.now += 1 / per_s
            self.advisor.used(keys, len(keys) // KEY_BYTES * BLOCK, cluster, private=private, now=self.now)

    def advise(self, costs: Costs | None = None) -> list[Instruction]:
        return self.advisor.advise(self.manager, NODES, costs or Costs(), now=self.now)


def test_a_steady_use_is_seen_at_its_rate_and_forgotten_by_half() -> None:
    fleet = Fleet()
    fleet.use(5.0)
    rate = fleet.advisor.rate(HOT[-KEY_BYTES:], now=fleet.now)
    assert rate == pytest.approx(5.0, rel=0.05)
    assert fleet.advisor.rate(HOT[-KEY_BYTES:], now=fleet.now + 10) == pytest.approx(rate / 2)
    assert fleet.advisor.rate(b"?" * KEY_BYTES, now=fleet.now) == 0


def test_a_prefix_hotter_than_its_holders_can_serve_is_replicated() -> None:
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(2.0)
    assert fleet.advise() == []  # what one node serves
    fleet.use(3.0)
    (step,) = fleet.advise()
    assert isinstance(step, Replicate)
    assert (step.source, step.target_node, step.keys, step.n_tokens, step.kv_bytes) == ("a1", "a2", HOT, N, 125 * N)
    assert "on 1 nodes that serve 2.0" in step.reason


def test_a_replica_needs_only_the_increment() -> None:
    fleet = Fleet()
    fleet.hold("a1")
    fleet.hold("a2", prefix(3))
    fleet.hold("a3", prefix(3))
    fleet.use(3.0)
    (step,) = fleet.advise()
    assert step.kv_bytes == 125 * (N - 12)


def test_the_next_replica_waits_until_the_last_one_shows() -> None:
    """Hysteresis: one at a time, and no more than the demand needs."""
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(10.0)
    (step,) = fleet.advise()
    assert fleet.advise() == []
    fleet.advisor.done(step, ok=True, now=fleet.now)
    assert fleet.advise() == []  # done, but the node has not said that it holds it
    fleet.hold("a2")
    (step,) = fleet.advise()
    assert isinstance(step, Replicate)
    assert step.target_node == "a3"
    fleet.advisor.done(step, ok=True, now=fleet.now)
    fleet.hold("a3")
    assert fleet.advise() == []  # no node is left


def test_a_replica_that_was_lost_is_thought_of_again_after_the_demand_fell() -> None:
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(5.0)
    (step,) = fleet.advise()
    fleet.advisor.done(step, ok=True, now=fleet.now)
    fleet.use(5.0, 10.0)
    assert fleet.advise() == []
    fleet.now += 100
    assert fleet.advise() == []
    fleet.use(5.0)
    assert len(fleet.advise()) == 1


def test_after_a_failure_another_node_is_tried_and_the_same_one_later() -> None:
    fleet = Fleet(retry_s=30)
    fleet.hold("a1")
    fleet.use(5.0)
    targets = []
    for _ in range(3):
        for step in fleet.advise():
            assert isinstance(step, Replicate)
            targets.append(step.target_node)
            fleet.advisor.done(step, ok=False, now=fleet.now)
            fleet.advisor.done(step, ok=False, now=fleet.now)  # reported twice, counted once
    assert targets == ["a2", "a3"]
    assert fleet.advisor.counters["failed"] == 2
    fleet.use(5.0, 31)
    assert [step.target for step in fleet.advise()] == ["node a2"]


def test_a_step_that_nobody_reports_on_counts_as_failed() -> None:
    fleet = Fleet(deadline_s=5)
    fleet.hold("a1")
    fleet.use(5.0)
    (first,) = fleet.advise()
    fleet.use(5.0, 6)
    (second,) = fleet.advise()
    assert second.target != first.target
    assert fleet.advisor.counters["expired"] == 1
    assert fleet.advisor.outstanding == (second,)


def test_a_cluster_gets_what_is_faster_to_move_than_to_compute() -> None:
    """32 tokens: 32 s to compute, 32 kilobits to move."""
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(1.0, cluster="b")
    (step,) = fleet.advise()
    assert isinstance(step, CopyPrefix)
    assert (step.source, step.target_cluster, step.kv_bytes) == ("a1", "b", 125 * N)


@pytest.mark.parametrize("bps", [0.0, 1e3 * 1.4])
def test_what_is_not_clearly_faster_to_move_is_computed(bps: float) -> None:
    """Without a way, or with one on which moving takes 0.7 of the time of computing."""
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(1.0, cluster="b")
    assert fleet.advise(Costs({("a", "b"): bps})) == []


def test_only_the_increment_is_weighed() -> None:
    """The cluster can start at 28 of 32 tokens: four are computed or moved."""
    fleet = Fleet()
    fleet.hold("a1")
    fleet.hold("b1", prefix(7))
    fleet.use(1.0, cluster="b")
    (step,) = fleet.advise()
    assert step.kv_bytes == 125 * 4


def test_the_nearest_holder_is_the_source() -> None:
    fleet = Fleet()
    fleet.hold("a1")
    fleet.hold("b1")
    NODES["c1"] = "c"
    try:
        fleet.use(1.0, cluster="c")
        (step,) = fleet.advise(Costs({("a", "c"): 1e4, ("b", "c"): 1e5}))
        assert step.source == "b1"
    finally:
        del NODES["c1"]


def test_a_private_prefix_stays_in_its_cluster() -> None:
    for allowed in (False, True):
        fleet = Fleet(copy_private=allowed)
        fleet.hold("a1")
        fleet.use(1.0, cluster="b", private=True)
        assert len(fleet.advise()) == int(allowed)


def test_a_rare_prefix_is_not_copied() -> None:
    fleet = Fleet(copy_hits_per_s=0.5)
    fleet.hold("a1")
    fleet.use(0.4, cluster="b")
    assert fleet.advise() == []


def test_only_so_many_are_out_and_none_twice() -> None:
    fleet = Fleet(max_outstanding=2)
    several = [prefix(8, first) for first in (1000, 2000, 3000)]
    fleet.manager = CacheManager("layout", BLOCK, frozenset({KvKind.FULL}))
    runs = tuple(Run(KvKind.FULL, keys, SCOPE.root) for keys in several)
    event = Snapshot("a1", "b", "layout", BLOCK, 0, frozenset({KvKind.FULL}), runs)
    fleet.manager.apply("a1", "a", event, now=0)
    for keys in several:
        fleet.use(1.0, 10, cluster="b", keys=keys)
    first = fleet.advise()
    assert len(first) == 2
    assert fleet.advise() == []
    fleet.advisor.done(first[0], ok=True, now=fleet.now)
    (third,) = fleet.advise()
    assert third.keys not in {first[1].keys}
    assert set(fleet.advisor.outstanding) == {first[1], third}


def test_the_beginning_of_what_is_on_its_way_is_not_sent_too() -> None:
    fleet = Fleet()
    fleet.hold("a1")
    fleet.use(2.0, 20, cluster="b", keys=prefix(4))
    fleet.use(2.0, 20, cluster="b")
    (step,) = fleet.advise()
    assert step.keys == HOT


def test_a_copy_that_failed_waits() -> None:
    fleet = Fleet(retry_s=30)
    fleet.hold("a1")
    fleet.use(1.0, cluster="b")
    (step,) = fleet.advise()
    fleet.advisor.done(step, ok=False, now=fleet.now)
    assert fleet.advise() == []
    fleet.use(1.0, 31, cluster="b")
    assert [again.target for again in fleet.advise()] == ["cluster b"]


def test_rates_are_right_after_a_very_long_time() -> None:
    """600 half-lives: counts are scaled before a float ends."""
    fleet = Fleet()
    fleet.use(5.0)
    fleet.now += 6000
    assert fleet.advisor.rate(HOT[-KEY_BYTES:], now=fleet.now) == pytest.approx(0, abs=1e-9)
    fleet.use(5.0)
    assert fleet.advisor.rate(HOT[-KEY_BYTES:], now=fleet.now) == pytest.approx(5.0, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(uses=st.lists(st.tuples(st.integers(0, 60), st.floats(0, 5)), max_size=300))
def test_memory_is_bounded_and_no_rate_is_overstated(uses: list[tuple[int, float]]) -> None:
    """Whatever is used in whatever order; also after so long that the counts were scaled."""
    advisor = Advisor(AdvicePolicy(half_life_s=0.5, tracked=8))
    true: dict[bytes, float] = {}
    now, half_life_s = 0.0, 0.5
    for which, pause_s in uses:
        now += pause_s
        keys = prefix(1, 1000 * which)
        true = {key: count * 0.5 ** (pause_s / half_life_s) for key, count in true.items()}
        true[keys] = true.get(keys, 0.0) + 1
        advisor.used(keys, BLOCK, "a", private=False, now=now)
    assert len(advisor._uses) <= 8
    for key, count in true.items():
        assert advisor.rate(key, now=now) <= count * 0.6932 / half_life_s + 1e-9


def test_the_busiest_is_kept_among_many_that_come_once() -> None:
    advisor = Advisor(AdvicePolicy(tracked=10))
    for i in range(1000):
        advisor.used(HOT, N, "a", private=False, now=i)
        advisor.used(prefix(1, 10_000 + 8 * i), BLOCK, "a", private=False, now=i)
    assert advisor.rate(HOT[-KEY_BYTES:], now=1000) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("wrong", [{"low": 2.0}, {"low": 0.0}, {"half_life_s": 0.0}, {"tracked": 0}, {"examined": 0}])
def test_a_policy_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        AdvicePolicy(**wrong)
    with pytest.raises(UsageError):
        Advisor().used(b"half", 4, "a", private=False, now=0)
