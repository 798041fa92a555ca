"""Where requests go, and why."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest

from prfaas_net.errors import BusyError, ConfigError, RefusedError, UsageError
from prfaas_net.scheduling import (
    Arrival,
    ClusterKind,
    Decision,
    NodeDown,
    NodeForgotten,
    NodeSeen,
    PolicySettings,
    PrefillEnded,
    RequestEnded,
    Role,
    Router,
    make_policy,
    policy_names,
)

P, D = Role.PREFILL, Role.DECODE
USUAL = (("prfaas", "px", P), ("pd", "pp", P), ("pd", "dd", D))


def make_router(
    policy: str = "threshold",
    nodes: Iterable[tuple[str, str, Role]] = USUAL,
    *,
    threshold_tokens: int = 100,
    kinds: Mapping[str, ClusterKind] | None = None,
    max_model_tokens: int = 100_000,
) -> Router:
    settings = PolicySettings(threshold_tokens=threshold_tokens, rng=random.Random(7))
    router = Router(make_policy(policy, settings), kinds)
    for cluster, node_id, role in nodes:
        router.observe(NodeSeen(node_id, cluster, role, max_model_tokens, 64), now=0.0)
    return router


def decide(router: Router, prompt_tokens: int, name: str = "r", **cached: int) -> Decision:
    decision = router.decide(Arrival(name, prompt_tokens, cached_tokens=cached), now=1.0)
    router.validate_state()
    return decision


@pytest.mark.parametrize(("length", "cluster"), [(1, "pd"), (99, "pd"), (100, "pd"), (101, "prfaas")])
def test_threshold_is_strict(length: int, cluster: str) -> None:
    """l == t stays local; one token more is offloaded."""
    decision = decide(make_router(), length)
    assert decision.prefill_cluster == cluster
    assert (decision.incremental_tokens, decision.threshold_tokens) == (length, 100)


def test_threshold_judges_the_increment_not_the_prompt() -> None:
    """A long prompt whose prefix is cached locally stays local."""
    decision = decide(make_router(), 1_000, pd=900)
    assert (decision.prefill_cluster, decision.cached_tokens, decision.incremental_tokens) == ("pd", 900, 100)


def test_papers_worked_case_under_scarce_bandwidth() -> None:
    """l_total 30K, l_pd 10K, l_prfaas 25K, t 19.4K: offloaded, and PrfaaS computes 5K."""
    decision = decide(make_router(threshold_tokens=19_400), 30_000, pd=10_000, prfaas=25_000)
    assert decision.prefill_cluster == "prfaas"
    assert (decision.cached_tokens, decision.incremental_tokens) == (25_000, 5_000)
    assert "l = 20000 > t = 19400" in decision.reasons[0]


def test_last_prompt_token_is_always_computed() -> None:
    """A prompt that is cached whole still needs its last position for the first output token."""
    decision = decide(make_router(), 50, pd=50)
    assert (decision.cached_tokens, decision.incremental_tokens) == (49, 1)


@pytest.mark.parametrize(
    ("policy", "length", "expected"),
    [("local", 5_000, "pd"), ("remote", 5, "prfaas"), ("threshold", 5, "pd"), ("threshold", 5_000, "prfaas")],
)
def test_policies_go_where_they_say(policy: str, length: int, expected: str) -> None:
    """Each policy's name is its promise."""
    assert decide(make_router(policy), length).prefill_cluster == expected


def test_random_policy_uses_every_cluster_and_repeats_with_its_seed() -> None:
    """The only randomness is the source that was passed in."""
    runs = []
    for _ in range(2):
        router = make_router("random")
        runs.append([decide(router, 10, f"r{i}").prefill_cluster for i in range(40)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {"pd", "prfaas"}


def test_long_prompt_falls_back_to_local_when_no_prfaas_node_is_up() -> None:
    """A dead PrfaaS cluster costs speed, not answers, and the decision says so."""
    router = make_router()
    router.observe(NodeDown("px"), now=0.5)
    decision = decide(router, 5_000)
    assert decision.prefill_cluster == "pd"
    assert any("no PrfaaS prefill node is up" in reason for reason in decision.reasons)


def test_short_prompt_falls_back_to_prfaas_when_no_local_prefill_is_up() -> None:
    """The other direction holds too."""
    router = make_router()
    router.observe(NodeDown("pp"), now=0.5)
    decision = decide(router, 5)
    assert decision.prefill_cluster == "prfaas"
    assert any("no PD prefill node is up" in reason for reason in decision.reasons)


def test_local_means_the_cluster_that_decodes() -> None:
    """With two PD clusters, a short prompt is prefilled beside its decode node."""
    nodes = (("a", "pa", P), ("b", "pb", P), ("b", "db", D), ("a", "da", D))
    router = make_router(nodes=nodes)
    first, second = decide(router, 5, "one"), decide(router, 5, "two")
    assert (first.prefill_node, first.decode_node) == ("pa", "da")
    assert (second.prefill_node, second.decode_node) == ("pb", "db")


def test_local_prefers_another_pd_cluster_over_prfaas() -> None:
    """Without a prefill node beside the decode node, the next PD cluster serves."""
    nodes = (("a", "da", D), ("b", "pb", P), ("b", "db", D), ("x", "px", P))
    decision = decide(make_router(nodes=nodes), 5)
    assert (decision.decode_node, decision.prefill_node) == ("da", "pb")


def test_least_loaded_node_is_chosen_and_ties_go_by_name() -> None:
    """Queued prompt tokens decide, then the name."""
    nodes = (("prfaas", "p2", P), ("prfaas", "p1", P), ("pd", "dd", D))
    router = make_router(nodes=nodes)
    assert decide(router, 1_000, "a").prefill_node == "p1"
    assert decide(router, 200, "b").prefill_node == "p2"
    assert decide(router, 200, "c").prefill_node == "p2"
    router.observe(PrefillEnded("a"), now=2.0)
    router.validate_state()
    assert decide(router, 200, "d").prefill_node == "p1"


def test_decode_load_ends_with_the_request() -> None:
    """A decode node counts a request until it has ended, a prefill node until the prompt is computed."""
    router = make_router()
    decide(router, 10)
    router.observe(PrefillEnded("r"), now=2.0)
    assert (router.state.nodes["pp"].running_requests, router.state.nodes["dd"].running_requests) == (0, 1)
    router.observe(RequestEnded("r"), now=3.0)
    router.observe(RequestEnded("r"), now=3.0)
    assert router.state.nodes["dd"].running_requests == 0
    router.validate_state()


@pytest.mark.parametrize(("down", "role"), [("dd", "decode"), ("pp", "prefill")])
def test_no_node_of_a_role_is_an_error_that_says_what_to_do(down: str, role: str) -> None:
    """Nothing is assigned when nobody could serve it."""
    router = make_router(nodes=(("pd", "pp", P), ("pd", "dd", D)))
    router.observe(NodeDown(down), now=0.5)
    with pytest.raises(BusyError, match=f"no {role} node is up.*start a {role} node"):
        decide(router, 5)
    assert not router.state.assignments
    router.observe(NodeSeen(down, "pd", P if role == "prefill" else D, 1_000), now=0.7)
    assert decide(router, 5).request_id == "r"


def test_sequence_longer_than_any_node_is_refused() -> None:
    """Prompt and output together must fit."""
    router = make_router(max_model_tokens=100)
    with pytest.raises(RefusedError, match="at most 100 tokens"):
        router.decide(Arrival("r", 90, 11), now=1.0)
    assert router.decide(Arrival("r", 90, 10), now=1.0).prefill_node == "pp"
    assert router.state.max_model_tokens == 100


def test_request_id_in_flight_is_not_taken_twice() -> None:
    """Two requests never share a charge."""
    router = make_router()
    decide(router, 10)
    with pytest.raises(UsageError, match="in flight"):
        decide(router, 10)


def test_declared_kind_wins_over_the_inferred_one() -> None:
    """A cluster that has no decode node can still be declared a PD cluster."""
    nodes = (("home", "hp", P), ("far", "fp", P), ("pd", "dd", D))
    router = make_router(nodes=nodes, kinds={"home": ClusterKind.PD, "far": ClusterKind.PRFAAS})
    assert decide(router, 5).prefill_cluster == "home"
    assert decide(router, 5_000, "long").prefill_cluster == "far"


def test_forgotten_node_takes_its_load_along_and_brings_it_back() -> None:
    """Loads stay the sum of what is in flight, whatever nodes do."""
    router = make_router()
    decide(router, 10)
    for node_id in ("pp", "dd"):
        router.observe(NodeForgotten(node_id), now=2.0)
        router.validate_state()
    for cluster, node_id, role in USUAL:
        router.observe(NodeSeen(node_id, cluster, role, 100_000), now=3.0)
        router.validate_state()
    assert router.state.nodes["pp"].pending_tokens == 10
    router.observe(RequestEnded("r"), now=4.0)
    router.validate_state()


def test_story_tells_what_happened_to_a_request() -> None:
    """Arrival, decision and end, in order, with their times."""
    router = make_router()
    decision = decide(router, 10)
    router.observe(RequestEnded("r"), now=3.0)
    assert router.story("r") == [
        (1.0, Arrival("r", 10)),
        (1.0, decision),
        (3.0, RequestEnded("r")),
    ]


def test_unknown_policy_names_those_there_are() -> None:
    """A typo in a configuration is one clear line."""
    with pytest.raises(ConfigError, match="earliest-finish, local, random, remote, threshold"):
        make_policy("treshold", PolicySettings())
    assert policy_names() == ["earliest-finish", "local", "random", "remote", "threshold"]


def test_bad_settings_are_refused() -> None:
    """A policy is never made from what it cannot use."""
    with pytest.raises(ConfigError, match="random source"):
        make_policy("random", PolicySettings())
    with pytest.raises(ConfigError, match="negative"):
        make_policy("threshold", PolicySettings(threshold_tokens=-1))
    with pytest.raises(UsageError, match="at least one"):
        Arrival("r", 0)
