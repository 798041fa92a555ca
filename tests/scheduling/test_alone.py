"""Servers that compute prompts themselves: chosen for their cache and their load, or only where nobody else does it."""

from __future__ import annotations

import pytest

from prfaas_net.errors import BusyError
from prfaas_net.scheduling import (
    Alone,
    Arrival,
    Decision,
    NodeDown,
    NodeSeen,
    PolicySettings,
    PrefillEnded,
    QueueSeen,
    RequestEnded,
    Role,
    Router,
    make_policy,
)

POLICIES = ["threshold", "earliest-finish", "local"]


def router_of(*nodes: NodeSeen, policy: str = "threshold", t: int = 1000) -> Router:
    router = Router(make_policy(policy, PolicySettings(t)))
    for node in nodes:
        router.observe(node, now=0.0)
    return router


def whole(name: str, cluster: str = "pd") -> NodeSeen:
    return NodeSeen(name, cluster, Role.DECODE, 1 << 20, alone=Alone.ONLY)


def helper(name: str = "d", cluster: str = "pd") -> NodeSeen:
    return NodeSeen(name, cluster, Role.DECODE, 1 << 20, alone=Alone.SPARE)


def prefill(name: str, cluster: str) -> NodeSeen:
    return NodeSeen(name, cluster, Role.PREFILL, 1 << 20)


def decide(
    router: Router, tokens: int = 100, name: str = "r", *, excluded: tuple[str, ...] = (), **cached: int
) -> Decision:
    arrival = Arrival(name, tokens, 1, node_cached_tokens=cached, excluded_nodes=excluded)
    decision = router.decide(arrival, now=0.0)
    router.validate_state()
    return decision


def nodes_of(decision: Decision) -> tuple[str, str]:
    return decision.prefill_node, decision.decode_node


@pytest.mark.parametrize("policy", POLICIES)
def test_one_server_serves_a_request_end_to_end(policy: str) -> None:
    """It is charged once for the prompt and once for the answer, and gets both back."""
    router = router_of(whole("a"), policy=policy)
    assert nodes_of(decide(router)) == ("a", "a")
    node = router.state.nodes["a"]
    assert (node.pending_tokens, node.running_requests) == (100, 2)
    router.observe(PrefillEnded("r"), now=1.0)
    assert (node.pending_tokens, node.running_requests) == (0, 1)
    router.observe(RequestEnded("r"), now=2.0)
    router.validate_state()
    assert node.running_requests == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_server_that_has_the_prefix_is_chosen(policy: str) -> None:
    router = router_of(*map(whole, "abc"), policy=policy)
    assert nodes_of(decide(router, 1000, b=900)) == ("b", "b")


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_spread_over_servers(policy: str) -> None:
    router = router_of(*map(whole, "abc"), policy=policy)
    chosen = [nodes_of(decide(router, name=str(i)))[1] for i in range(6)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


def test_a_cached_prefix_does_not_outweigh_any_load() -> None:
    """Of two servers the one with the prefix is taken until it runs far more than the other."""
    router = router_of(whole("a"), whole("b"))
    router.observe(QueueSeen("a", 0, foreign_requests=9), now=0.0)
    assert nodes_of(decide(router, 1000, a=900)) == ("b", "b")
    router.observe(QueueSeen("a", 0, foreign_requests=5), now=0.0)
    assert nodes_of(decide(router, 1000, "s", a=900)) == ("a", "a")


def test_short_prompts_stay_with_a_decode_server_that_can_do_both() -> None:
    """The threshold sends the long ones to the prefill cluster."""
    router = router_of(prefill("x", "prfaas"), helper())
    assert nodes_of(decide(router, 100)) == ("d", "d")
    assert nodes_of(decide(router, 5000, "long")) == ("x", "d")


def test_a_decode_server_computes_only_where_its_cluster_has_no_prefill_server() -> None:
    router = router_of(prefill("p", "pd"), helper())
    assert nodes_of(decide(router)) == ("p", "d")
    assert nodes_of(decide(router, name="again", excluded=("p",))) == ("d", "d")
    router.observe(NodeDown("p"), now=0.0)
    assert nodes_of(decide(router, name="later")) == ("d", "d")


def test_a_server_that_serves_end_to_end_takes_no_prompt_from_others() -> None:
    router = router_of(prefill("x", "prfaas"), whole("a"))
    assert nodes_of(decide(router, 5000)) == ("a", "a")
    with pytest.raises(BusyError):
        decide(router, 5000, "again", excluded=("a",))


def test_the_longest_request_is_what_any_way_of_serving_admits() -> None:
    router = router_of(NodeSeen("a", "pd", Role.DECODE, 500, alone=Alone.ONLY))
    assert router.state.max_model_tokens == 500
    router.observe(prefill("x", "prfaas"), now=0.0)
    router.observe(NodeSeen("d", "pd", Role.DECODE, 800), now=0.0)
    assert router.state.max_model_tokens == 800
