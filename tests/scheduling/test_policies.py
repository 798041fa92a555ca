"""What the two thoughtful policies do: thresholds with both predicates, and predictions on every candidate."""

from __future__ import annotations

from random import Random

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import (
    Arrival,
    Bandwidth,
    ClusterKind,
    Decision,
    DecodeProfile,
    EarliestFinishPolicy,
    KvSize,
    LinkSeen,
    NodeDown,
    NodeProfile,
    NodeSeen,
    OverloadedError,
    PiecewiseLinear,
    PolicySettings,
    Predictor,
    PrefillEnded,
    QueueSeen,
    Role,
    Router,
    ThresholdPolicy,
    ThresholdSet,
    TransferLanded,
    TransferProgress,
    make_policy,
    policy_names,
)
from prfaas_net.units import MiB

G = 1e9
# 1,000 tokens take a second remotely, two and a half locally; each is a MiB.
FAST = NodeProfile("fast", PiecewiseLinear.straight(0.0, 0.001))
SLOW = NodeProfile("slow", PiecewiseLinear.straight(0.0, 0.0025), DecodeProfile(step_s=0.5, max_batch=4))
KV = KvSize(0, MiB)
KINDS = {"prfaas": ClusterKind.PRFAAS, "pd": ClusterKind.PD, "pd2": ClusterKind.PD}


def fleet(
    policy: str = "earliest-finish", *, t: int = 1_000, remote: int = 1, local: int = 1, bps: float = 100 * G
) -> Router:
    router = Router(make_policy(policy, PolicySettings(t)), KINDS, Predictor(KV, pipelined=True))
    for i in range(remote):
        router.observe(NodeSeen(f"x{i}", "prfaas", Role.PREFILL, 1 << 20, profile=FAST), now=0.0)
    for i in range(local):
        router.observe(NodeSeen(f"p{i}", "pd", Role.PREFILL, 1 << 20, profile=SLOW), now=0.0)
    router.observe(NodeSeen("d0", "pd", Role.DECODE, 1 << 20, profile=SLOW, max_batch=4), now=0.0)
    for source, destination in (("prfaas", "pd"), ("pd", "prfaas")):
        link(router, bps=bps, source=source, destination=destination)
    return router


def link(
    router: Router, *, state: LinkState = LinkState.CLEAR, bps: float | None = 100 * G, now: float = 0.0,
    source: str = "prfaas", destination: str = "pd", budget: float = 100 * G,
) -> None:  # fmt: skip
    router.observe(LinkSeen(source, destination, state, bps, budget), now=now)


def decide(
    router: Router, tokens: int, name: str = "r", *, now: float = 0.0, limit_s: float | None = None, **cached: int
) -> Decision:
    decision = router.decide(Arrival(name, tokens, 1, cached, ttft_limit_s=limit_s), now=now)
    router.validate_state()
    return decision


# Thresholds.


def test_papers_worked_case_under_abundant_bandwidth() -> None:
    """l_total 30K, l_pd 10K, l_prfaas 25K, t 19.4K: PD-P computes 5K after a copy of the 25K prefix."""
    router = fleet("threshold", t=19_400)
    decision = decide(router, 30_000, pd=10_000, prfaas=25_000)
    assert (decision.prefill_cluster, decision.copy_from, decision.cached_tokens) == ("pd", "prfaas", 25_000)
    assert decision.incremental_tokens == 5_000


def test_without_a_verdict_bandwidth_is_taken_to_be_scarce() -> None:
    """Nothing is copied over a link that nobody has described."""
    router = Router(make_policy("threshold", PolicySettings(19_400)), KINDS)
    for node in (NodeSeen("x", "prfaas", Role.PREFILL, 1 << 20), NodeSeen("p", "pd", Role.PREFILL, 1 << 20)):
        router.observe(node, now=0.0)
    router.observe(NodeSeen("d", "pd", Role.DECODE, 1 << 20), now=0.0)
    assert decide(router, 30_000, pd=10_000, prfaas=25_000).prefill_cluster == "prfaas"


def test_the_predicate_changes_with_the_link_and_not_with_every_wink_of_it() -> None:
    """Congestion makes bandwidth scarce at once; between the marks nothing changes; and not twice in 5 s."""
    router = fleet("threshold")
    policy = router.policy
    assert isinstance(policy, ThresholdPolicy)

    def after(now: float, state: LinkState = LinkState.CLEAR, bps: float = 100 * G) -> Bandwidth:
        link(router, state=state, bps=bps, now=now)
        return policy.bandwidth

    assert policy.bandwidth is Bandwidth.ABUNDANT
    assert after(10.0, LinkState.CONGESTED) is Bandwidth.SCARCE
    assert after(12.0) is Bandwidth.SCARCE
    assert after(16.0) is Bandwidth.ABUNDANT
    assert after(30.0, bps=40 * G) is Bandwidth.ABUNDANT
    assert after(40.0, bps=20 * G) is Bandwidth.SCARCE
    assert after(50.0, bps=40 * G) is Bandwidth.SCARCE
    assert after(60.0, LinkState.HOST_LIMITED) is Bandwidth.ABUNDANT


def test_the_planner_moves_the_threshold() -> None:
    """From the next request on."""
    router = fleet("threshold", t=1_000)
    assert decide(router, 1_500, "a").prefill_cluster == "prfaas"
    router.observe(ThresholdSet(2_000), now=1.0)
    decision = decide(router, 1_500, "b", now=1.0)
    assert (decision.prefill_cluster, decision.threshold_tokens) == ("pd", 2_000)
    with pytest.raises(ConfigError, match="negative"):
        router.observe(ThresholdSet(-1), now=2.0)


# Earliest finish.


def test_the_sooner_candidate_is_chosen_and_its_time_is_told() -> None:
    """Alone, the faster hardware is; the decision says what it expects."""
    decision = decide(fleet(), 4_000)
    assert (decision.prefill_node, decision.prefill_s, decision.ttft_s) == ("x0", 4.0, 4.0)
    assert decision.fallback == ("p0",)
    assert "4.00 s on x0, 10.00 s on p0" in decision.reasons[0]


def test_a_queue_sends_the_next_one_elsewhere() -> None:
    """When the fast node is busy for long enough, the slow one is sooner."""
    router = fleet()
    assert [decide(router, 4_000, f"r{i}").prefill_node for i in range(3)] == ["x0", "p0", "x0"]


def test_work_goes_on_while_nothing_is_said() -> None:
    """A queue shortens with time, without an event."""
    router = fleet(local=0)
    decide(router, 4_000, "a")
    assert decide(router, 1_000, "b", now=3.0).wait_s == pytest.approx(1.0)
    router.observe(PrefillEnded("a"), now=5.0)
    # It took 5 s and not 4: the pace is learned, and the next one is expected to take as much longer.
    assert decide(router, 1_000, "c", now=5.0).wait_s == pytest.approx(1.0)
    assert router.state.nodes["x0"].pace == pytest.approx(1.25)


def test_a_cached_prefix_counts_as_time_saved() -> None:
    """The slow node wins if it has most of the prompt."""
    router = fleet()
    assert decide(router, 10_000, pd=9_000).prefill_node == "p0"
    assert decide(router, 10_000, "s", pd=5_000).prefill_node == "x0"


def test_the_node_that_holds_more_of_the_prompt_is_preferred_within_its_cluster() -> None:
    """What one node holds for itself counts there only."""
    router = fleet(remote=3, local=0)
    arrival = Arrival("r", 4_000, node_cached_tokens={"x2": 3_000})
    decision = router.decide(arrival, now=0.0)
    assert (decision.prefill_node, decision.incremental_tokens) == ("x2", 1_000)


def test_a_prefix_is_copied_when_that_is_sooner() -> None:
    """A copy over a wide link saves computing; over a thin one it does not."""
    wide = decide(fleet(remote=0), 10_000, prfaas=9_000)
    assert (wide.prefill_node, wide.copy_from, wide.incremental_tokens) == ("p0", "prfaas", 1_000)
    thin = decide(fleet(remote=0, bps=1 * G), 10_000, prfaas=9_000)
    assert (thin.prefill_node, thin.copy_from, thin.incremental_tokens) == ("p0", None, 10_000)


def test_a_thin_link_keeps_requests_at_home() -> None:
    """4,000 MiB take 33 s at 1 Gbps, and 10 s to compute locally."""
    assert decide(fleet(bps=1 * G), 4_000).prefill_node == "p0"


def test_what_was_promised_to_a_link_counts_until_it_has_landed() -> None:
    """Progress and landing free it."""
    router = fleet(remote=4, local=0, bps=10 * G)
    first = decide(router, 4_000, "a")
    second = decide(router, 4_000, "b")
    bits = 8 * 4_000 * MiB
    assert first.ttft_s == pytest.approx(4.0)
    assert second.ttft_s == pytest.approx(2 * bits / (10 * G))
    router.observe(TransferProgress("a", 1_000 * MiB), now=1.0)
    router.validate_state()
    assert router.state.links["prfaas", "pd"].promised_bits == pytest.approx(1.25 * bits)
    router.observe(TransferLanded("a"), now=2.0)
    router.observe(TransferLanded("a"), now=2.0)
    router.validate_state()
    assert router.state.links["prfaas", "pd"].promised_bits == pytest.approx(bits)


@pytest.mark.parametrize("policy", policy_names())
def test_a_dead_link_is_refused_and_the_answer_says_so(policy: str) -> None:
    """Whatever the policy, as long as there is another way."""
    settings = PolicySettings(1_000, Random(1))
    router = fleet()
    router.policy = make_policy(policy, settings)
    link(router, state=LinkState.DOWN, now=1.0)
    decision = decide(router, 4_000, now=1.0)
    assert decision.prefill_node == "p0"
    assert "1 refused: their link is down" in decision.reasons
    router.observe(NodeDown("p0"), now=2.0)
    assert router.decide(Arrival("no-other-way", 4_000), now=2.0).prefill_node == "x0"


@pytest.mark.parametrize(("patience_s", "node"), [(None, "x0"), (3.0, "x0"), (1.0, "p0")])
def test_a_link_is_refused_when_it_is_later_than_home_by_more_than_patience_allows(
    patience_s: float | None, node: str
) -> None:
    """22 s over the link and 20 s at home, in a queue: others are better served by the link, up to that bound."""
    router = fleet(bps=1.5 * G)
    router.policy = make_policy("earliest-finish", PolicySettings(link_patience_s=patience_s))
    assert decide(router, 4_000, "a").prefill_node == "p0"
    assert decide(router, 4_000, "b").prefill_node == node


def test_a_congested_link_without_a_measure_is_counted_on_for_half() -> None:
    """A verdict that measured what is available is believed instead; never beyond the budget."""
    router = fleet()
    load = router.state.links["prfaas", "pd"]
    link(router, state=LinkState.CONGESTED, bps=None)
    assert load.rate_bps == 50 * G
    link(router, state=LinkState.CONGESTED, bps=30 * G)
    assert load.rate_bps == 30 * G
    link(router, bps=400 * G)
    assert load.rate_bps == 100 * G


def test_a_link_that_has_little_to_send_is_counted_on_for_its_budget() -> None:
    """What an idle link was seen to carry is a lower bound; only without a budget is it all there is."""
    router = fleet()
    load = router.state.links["prfaas", "pd"]
    for state in (LinkState.IDLE, LinkState.APP_LIMITED):
        link(router, state=state, bps=1 * G)
        assert load.rate_bps == 100 * G
    load.budget_bps = 0.0
    assert load.rate_bps == 1 * G


def test_others_queues_count_too() -> None:
    """What another gateway has put there, as the node says."""
    router = fleet()
    router.observe(QueueSeen("x0", 20_000), now=0.0)
    assert decide(router, 4_000).prefill_node == "p0"


def test_a_busy_fast_node_is_left_to_those_who_need_it_more() -> None:
    """With a price for those behind, an idle slow node is taken although it ends later; without one, greed decides."""
    chosen = {}
    for price in (0.0, 3.0):
        router = Router(EarliestFinishPolicy(price), KINDS, Predictor(KV))
        curve = NodeProfile("short", PiecewiseLinear.of([0, 500, 5_000], [0.0, 0.5, 20.0]))
        router.observe(NodeSeen("x0", "prfaas", Role.PREFILL, 1 << 20, profile=FAST), now=0.0)
        router.observe(NodeSeen("p0", "pd", Role.PREFILL, 1 << 20, profile=curve), now=0.0)
        router.observe(NodeSeen("d0", "pd", Role.DECODE, 1 << 20), now=0.0)
        decide(router, 1_000, "a")
        chosen[price] = decide(router, 1_300, "b").prefill_node
    assert chosen == {0.0: "x0", 3.0: "p0"}


def test_a_request_decodes_where_there_is_a_place() -> None:
    """A full batch in one PD cluster, room in the other."""
    router = fleet()
    router.observe(NodeSeen("d9", "pd2", Role.DECODE, 1 << 20, profile=SLOW, max_batch=4), now=0.0)
    router.observe(LinkSeen("prfaas", "pd2", LinkState.CLEAR, 100 * G, 100 * G), now=0.0)
    taken = [decide(router, 100, f"r{i}").decode_node for i in range(8)]
    assert taken.count("d0") <= 5 and taken.count("d9") >= 3


# Admission.


def test_who_cannot_be_served_in_time_is_told_at_once() -> None:
    """With what there is at best, and when to come back; nothing is charged."""
    router = fleet()
    for i in range(4):
        decide(router, 8_000, f"r{i}")
    with pytest.raises(OverloadedError, match=r"within 5\.0 s") as caught:
        decide(router, 4_000, "late", limit_s=5.0)
    assert caught.value.http_status == 429 and caught.value.retry_after_s > 1.0
    assert "late" not in router.state.assignments
    router.validate_state()
    assert decide(router, 4_000, "patient", limit_s=60.0).request_id == "patient"


def test_a_policy_that_would_miss_the_limit_is_overruled_by_a_candidate_that_meets_it() -> None:
    """The threshold says local; only the other one is in time."""
    router = fleet("threshold", t=100_000)
    assert decide(router, 4_000, "a").prefill_node == "p0"
    assert decide(router, 4_000, "b", limit_s=6.0).prefill_node == "x0"
