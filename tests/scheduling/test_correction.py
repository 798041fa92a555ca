"""What landings teach a router, and how it forgets."""

from __future__ import annotations

import pytest

from prfaas_net.scheduling import (
    Arrival,
    Correction,
    NodeProfile,
    NodeSeen,
    PiecewiseLinear,
    PolicySettings,
    PrefillEnded,
    RequestEnded,
    Role,
    Router,
    TransferLanded,
    make_policy,
)


def test_lateness_counts_while_landings_say_so_and_is_forgotten_without_them() -> None:
    """Believed for half a minute after the last landing, then less and less."""
    correction = Correction()
    for second in range(40):
        correction.arrived(10.0 - correction.bias_at(second), now=float(second))
    told = correction.bias_at(39.0)
    assert told == pytest.approx(10.0, rel=0.02)
    assert correction.bias_at(39.0 + 30.0) == told
    assert correction.bias_at(39.0 + 60.0) == pytest.approx(told / 2.718, rel=0.01)
    assert correction.bias_at(39.0 + 300.0) < 0.01


def test_a_new_landing_starts_from_what_is_left() -> None:
    """What had been forgotten is not brought back by it."""
    correction = Correction(bias_s=50.0, landed=100, landed_s=0.0)
    correction.arrived(0.0, now=600.0)
    assert correction.bias_at(600.0) < 0.01


def test_a_node_behind_a_link_that_was_bad_is_tried_again() -> None:
    """A router that is told nothing of links learns from late landings to stay at home, and not for ever."""
    router = Router(make_policy("earliest-finish", PolicySettings()))
    fast, slow = PiecewiseLinear.straight(0.0, 1e-3), PiecewiseLinear.straight(0.0, 3e-3)
    for node_id, cluster, role, curve in (
        ("far", "prfaas", Role.PREFILL, fast), ("near", "pd", Role.PREFILL, slow), ("decode", "pd", Role.DECODE, slow),
    ):  # fmt: skip
        router.observe(NodeSeen(node_id, cluster, role, 1 << 20, profile=NodeProfile(node_id, curve)), now=0.0)
    where: list[str] = []
    now = 0.0

    def ask(late_s: float) -> str:
        """One prompt of 1,000 tokens; what is computed far away lands ``late_s`` late."""
        nonlocal now
        name = f"r{len(where)}"
        decision = router.decide(Arrival(name, 1_000), now=now)
        now += decision.prefill_s
        router.observe(PrefillEnded(name), now=now)
        now += late_s if decision.prefill_node == "far" else 0.0
        for event in (TransferLanded(name), RequestEnded(name)):
            router.observe(event, now=now)
        router.validate_state()
        where.append(decision.prefill_node)
        now += 1.0
        return decision.prefill_node

    assert ask(0.0) == "far"
    while ask(20.0) == "far":
        assert len(where) < 20, "late landings teach nothing"
    assert {ask(0.0) for _ in range(5)} == {"near"}
    now += 300.0
    assert {ask(0.0) for _ in range(5)} == {"far"}
