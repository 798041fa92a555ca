"""What holds for the router whatever happens in whatever order."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas_net.errors import BusyError, RefusedError
from prfaas_net.scheduling import (
    Arrival,
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

CLUSTERS = ("pd1", "pd2", "prfaas")
NODES = [
    (f"{cluster}-{role.value}-{n}", cluster, role)
    for cluster in CLUSTERS
    for role in (Role.PREFILL, Role.DECODE)
    for n in (1, 2)
    if not (cluster == "prfaas" and role is Role.DECODE)
]


class RouterMachine(RuleBasedStateMachine):
    """Random events against two routers that must agree, with the invariants checked after each."""

    def __init__(self) -> None:
        super().__init__()
        self.routers: list[Router] = []
        self.now = 0.0
        self.count = 0

    def both(self) -> list[Router]:
        if not self.routers:
            self.routers = [Router(make_policy("threshold", PolicySettings(100, random.Random(1)))) for _ in range(2)]
        return self.routers

    @rule(name=st.sampled_from(policy_names()), t=st.integers(0, 500))
    def switch_policy(self, name: str, t: int) -> None:
        for router in self.both():
            router.policy = make_policy(name, PolicySettings(t, random.Random(3)))

    @rule(node=st.sampled_from(NODES), limit=st.sampled_from([300, 2_000]))
    def seen(self, node: tuple[str, str, Role], limit: int) -> None:
        for router in self.both():
            router.observe(NodeSeen(*node, limit), now=self.now)

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
        assert decision.reasons

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        flying = sorted(self.both()[0].state.assignments)
        if not flying:
            return
        request_id = data.draw(st.sampled_from(flying))
        whole = data.draw(st.booleans())
        for router in self.both():
            router.observe(RequestEnded(request_id) if whole else PrefillEnded(request_id), now=self.now)

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


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
