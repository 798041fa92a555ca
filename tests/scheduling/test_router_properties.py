"""What holds for the router whatever happens in whatever order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import BusyError, ConfigError, RefusedError
from prfaas_net.scheduling import (
    Arrival,
    Decision,
    KvSize,
    LinkSeen,
    NodeDown,
    NodeForgotten,
    NodeProfile,
    NodeSeen,
    PiecewiseLinear,
    PolicySettings,
    Predictor,
    PrefillEnded,
    QueueSeen,
    RequestEnded,
    Role,
    Router,
    ThresholdSet,
    TransferLanded,
    TransferProgress,
    dump_log,
    load_log,
    make_policy,
    policy_names,
    replay,
)

CLUSTERS = ["pd1", "pd2", "prfaas"]
NODES = [
    (f"{cluster}-{role.value}-{n}", cluster, role)
    for cluster in CLUSTERS
    for role in (Role.PREFILL, Role.DECODE)
    for n in (1, 2)
    if not (cluster == "prfaas" and role is Role.DECODE)
]


PROFILE = NodeProfile("some", PiecewiseLinear.straight(0.1, 1e-3))


def fresh_router(policy: str) -> Router:
    return Router(make_policy(policy, PolicySettings(100, random.Random(1))), predictor=Predictor(KvSize(1e6, 1e4)))


class RouterMachine(RuleBasedStateMachine):
    """Random events against two routers that must agree, with the invariants checked after each."""

    def __init__(self) -> None:
        super().__init__()
        self.routers: list[Router] = []
        self.now = 0.0
        self.count = 0

    def both(self) -> list[Router]:
        if not self.routers:
            self.routers = [fresh_router("threshold") for _ in range(2)]
        return self.routers

    def tell(self, event: Any) -> None:
        for router in self.both():
            router.observe(event, now=self.now)

    @rule(name=st.sampled_from(policy_names()), t=st.integers(0, 500))
    def switch_policy(self, name: str, t: int) -> None:
        for router in self.both():
            router.policy = make_policy(name, PolicySettings(t, random.Random(3)))

    @rule(node=st.sampled_from(NODES), limit=st.sampled_from([300, 2_000]), known=st.booleans())
    def seen(self, node: tuple[str, str, Role], limit: int, known: bool) -> None:
        self.tell(NodeSeen(*node, limit, profile=PROFILE if known else None, max_batch=3 if known else 0))

    @rule(
        node=st.sampled_from([node for node in NODES if node[1] != "prfaas"]),
        role=st.sampled_from(Role),
        drains=st.booleans(),
    )
    def converts(self, node: tuple[str, str, Role], role: Role, drains: bool) -> None:
        """A node has another role, or is about to have one, whatever it was given before."""
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        seen = NodeSeen(node[0], node[1], role, 2_000, profile=PROFILE, max_batch=3, convertible=True)
        self.tell(replace(seen, next_role=other if drains else None))

    @rule(
        ends=st.sampled_from([(a, b) for a in CLUSTERS for b in CLUSTERS if a != b]),
        state=st.sampled_from(LinkState),
        bps=st.sampled_from([None, 1e6, 1e9]),
    )
    def link(self, ends: tuple[str, str], state: LinkState, bps: float | None) -> None:
        self.tell(LinkSeen(*ends, state, bps, 1e9, 0.02))

    @rule(node=st.sampled_from(NODES), tokens=st.integers(0, 10_000))
    def queue(self, node: tuple[str, str, Role], tokens: int) -> None:
        self.tell(QueueSeen(node[0], tokens))

    @rule(t=st.integers(0, 500))
    def planned(self, t: int) -> None:
        self.tell(ThresholdSet(t))

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=st.sampled_from(NODES), forget=st.booleans())
    def lost(self, node: tuple[str, str, Role], forget: bool) -> None:
        for router in self.both():
            router.observe(NodeForgotten(node[0]) if forget else NodeDown(node[0]), now=self.now)

    @rule(
        prompt=st.integers(1, 1_000),
        output=st.integers(1, 50),
        cached=st.dictionaries(st.sampled_from(CLUSTERS), st.integers(0, 1_200)),
    )
    def arrive(self, prompt: int, output: int, cached: dict[str, int]) -> None:
        self.count += 1
        self.now += 0.5
        arrival = Arrival(f"r{self.count}", prompt, output, cached)
        answers = [self._answer(router, arrival) for router in self.both()]
        assert answers[0] == answers[1]
        if isinstance(answers[0], Decision):
            self._check(self.routers[0], arrival, answers[0])

    def _answer(self, router: Router, arrival: Arrival) -> Decision | str:
        try:
            return router.decide(arrival, now=self.now)
        except (BusyError, RefusedError) as error:
            # Refused only when it is true that some role has nobody who could take it.
            needed = arrival.prompt_tokens + arrival.output_tokens
            roles = [list(router.state.up(role, room_for_tokens=needed)) for role in Role]
            assert not all(roles), router.story(arrival.request_id)
            return error.line()

    def _check(self, router: Router, arrival: Arrival, decision: Decision) -> None:
        prefill = router.state.nodes[decision.prefill_node]
        decode = router.state.nodes[decision.decode_node]
        assert prefill.up and prefill.role is Role.PREFILL and prefill.cluster == decision.prefill_cluster
        assert decode.up and decode.role is Role.DECODE and decode.cluster == decision.decode_cluster
        assert decision.incremental_tokens + decision.cached_tokens == arrival.prompt_tokens
        assert decision.incremental_tokens >= 1
        assert prefill.next_role is decode.next_role is None, "a node that drains was given work"
        assert decision.reasons

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        flying = sorted(self.both()[0].state.assignments)
        if not flying:
            return
        request_id = data.draw(st.sampled_from(flying))
        left = data.draw(st.floats(0, 1e8))
        events = [PrefillEnded(request_id), TransferProgress(request_id, left), TransferLanded(request_id)]
        self.tell(data.draw(st.sampled_from([*events, RequestEnded(request_id)])))

    @invariant()
    def holds(self) -> None:
        for router in self.routers:
            router.validate_state()

    def teardown(self) -> None:
        for router in self.routers:
            for request_id in list(router.state.assignments):
                router.observe(RequestEnded(request_id), now=self.now)
            router.validate_state()
            assert all(n.pending_tokens == n.running_requests == 0 for n in router.state.nodes.values())
            assert all(link.promised_bits == link.transfers == 0 for link in router.state.links.values())


@pytest.mark.parametrize("policy", policy_names())
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_any_log_replayed_gives_the_same_decisions(policy: str, seed: int) -> None:
    """Random arrivals, ends and verdicts: through JSON, into a fresh router, decision by decision."""
    rng, router, now = random.Random(seed), fresh_router(policy), 0.0
    for node in NODES:
        router.observe(NodeSeen(*node, 5_000, profile=PROFILE, max_batch=4), now=now)
    for number in range(60):
        now += rng.expovariate(2.0)
        cached = {name: rng.randrange(1_000) for name in CLUSTERS if rng.random() < 0.4}
        try:
            router.decide(Arrival(f"r{number}", rng.randrange(1, 3_000), 5, cached, ttft_limit_s=20.0), now=now)
        except BusyError:
            pass
        flying = sorted(router.state.assignments)
        if flying and rng.random() < 0.8:
            kind: Any = rng.choice([PrefillEnded, TransferLanded, RequestEnded])
            router.observe(kind(rng.choice(flying)), now=now)
        if rng.random() < 0.3:
            source, destination = rng.sample(CLUSTERS, 2)
            event = LinkSeen(source, destination, rng.choice(list(LinkState)), rng.choice([None, 1e7, 1e9]), 1e9)
            router.observe(event, now=now)
        router.validate_state()
    pairs = list(replay(load_log(dump_log(router.log())), fresh_router(policy)))
    assert pairs
    assert all(old == new for old, new in pairs)


def test_a_line_that_is_not_of_a_log_is_refused() -> None:
    """With its number."""
    with pytest.raises(ConfigError, match="line 2"):
        load_log(dump_log([(0.0, RequestEnded("r"))]) + b'{"now": 1, "event": "Nothing"}')


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
