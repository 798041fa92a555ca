"""The planner of a gateway over nodes that can change their role: what it says, what it does, and what can go wrong."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from prfaas_net.clock import ManualClock
from prfaas_net.errors import ConfigError, LinkError
from prfaas_net.gateway import Gateway, GatewayConfig
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.gateway.planning_config import PlannerSection
from prfaas_net.gateway.planning_events import ChangeBegan, ChangeEnded, LeaseMoved, Planned, ThresholdMoved
from prfaas_net.gateway.planning_lease import PlannerLease
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.nodes.pd import PdNode
from prfaas_net.nodes.prefill import PrefillNode
from prfaas_net.nodes.role_lease import RoleLease
from prfaas_net.nodes.role_messages import LeaseCall
from prfaas_net.scheduling import Role
from tests.nodes.hash_engine import LAYOUT, HashEngine
from tests.waiting import until as until_within

from .fakes import ByteTokenizer

pytestmark = pytest.mark.timeout(120)

PROMPT = [7 * i % 997 for i in range(200)]
# Answers that no decode node keeps up with, and answers that are no work at all.
LONG, SHORT = 1_000_000, 1
QUICK = {
    "period": 0.2, "window": 600, "least_requests": 4, "confirmations": 1, "dwell": 0, "drain_limit": 30, "lease": 10,
}  # fmt: skip


async def until(condition: Callable[[], object]) -> None:
    """Wait for what takes milliseconds on an idle machine."""
    await until_within(condition, within_s=30.0)


class Fleet:
    """One PrfaaS node and PD nodes in this process, a gateway or two, and who asks them."""

    def __init__(self, nodes: dict[str, PdNode], urls: Sequence[str], http: aiohttp.ClientSession) -> None:
        self.nodes = nodes
        self.http = http
        self.urls = urls
        self._stack = contextlib.AsyncExitStack()

    async def gateway(self, mode: str = "act", **planner: Any) -> Gateway:
        """One more gateway."""
        config = GatewayConfig.model_validate(
            {
                "http": {"port": 0}, "model": "hash-model", "threshold_tokens": 100, "request_deadline": 60,
                "nodes": [{"url": url} for url in self.urls], "fleet": {"poll_interval": 0.05, "poll_timeout": 10},
                "planner": {**QUICK, "mode": mode, **planner},
            }
        )  # fmt: skip
        gateway = Gateway(config, ByteTokenizer())
        await gateway.start()
        self._stack.push_async_callback(gateway.stop)
        return gateway

    async def complete(self, gateway: Gateway, max_tokens: int = 4) -> list[int]:
        """The answer to the prompt."""
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "explain": True}
        async with self.http.post(
            f"{gateway.url}/v1/completions", data=orjson.dumps(body | {"return_token_ids": True})
        ) as answer:
            found = await answer.json()
        assert answer.status == 200, found
        tokens: list[int] = found["choices"][0]["token_ids"]
        return tokens

    async def get(self, gateway: Gateway, path: str) -> Any:
        async with self.http.get(f"{gateway.url}{path}") as answer:
            return await answer.json()

    @contextlib.asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """A call that a decode node holds, on behalf of somebody else."""
        body = {
            "request_id": "held", "prompt_tokens": 10, "layout": LAYOUT.fingerprint, "chunk_tokens": 64,
            "source_cluster": "pd", "deadline_s": 60.0, "sampling": {"max_tokens": 8},
        }  # fmt: skip
        url = "http://{}:{}/v1/decode".format(*self.nodes[name].control.address)
        async with self.http.post(url, data=orjson.dumps(body)) as response:
            await response.content.readline()
            yield
            response.close()

    def roles(self) -> dict[str, str]:
        return {name: node.roles.role for name, node in self.nodes.items()}

    async def close(self) -> None:
        await self._stack.aclose()


def see(gateway: Gateway, output_tokens: int, n: int = 20) -> None:
    """Let the planner have seen requests with answers of this length."""
    for i in range(n):
        record = RequestRecord(f"r{i}", incremental_tokens=200 + i, output_tokens=output_tokens)
        gateway.planning.served(record)


def ended(gateway: Gateway) -> list[ChangeEnded]:
    return [event for event in gateway.planning.log.events if isinstance(event, ChangeEnded)]


def changing(gateway: Gateway) -> str | None:
    """The node that this gateway is changing, once that node has been told."""
    rows = gateway.planning.summary()["changing"]
    return next((row["node"] for row in rows if row["held"]), None)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """PD nodes pd-0 (prefill), pd-1 and pd-2 (decode)."""
    profile = tmp_path / "profile.json"
    body = {
        "layout": LAYOUT.fingerprint, "prefill": [{"tokens": 1, "seconds": 0.01}, {"tokens": 1000, "seconds": 1.0}],
        "decode": [{"batch": 64, "step_seconds": 0.001}],
    }  # fmt: skip
    profile.write_bytes(orjson.dumps(body))
    common = {"kv": {"arena": "8MiB"}, "profile": profile}
    async with contextlib.AsyncExitStack() as stack:
        config = NodeConfig.model_validate({"role": "prefill", "node_id": "far", "cluster": "prfaas", **common})
        far = PrefillNode(config, HashEngine())
        nodes = {}
        for i, role in enumerate(("prefill", "decode", "decode")):
            config = NodeConfig.model_validate({"role": role, "node_id": f"pd-{i}", "cluster": "pd", **common})
            nodes[f"pd-{i}"] = PdNode(config, HashEngine())
        everybody: list[PrefillNode | PdNode] = [far, *nodes.values()]
        for node in everybody:
            await node.start()
            stack.push_async_callback(node.close)
        urls = ["http://{}:{}".format(*node.control.address) for node in everybody]
        fleet = Fleet(nodes, urls, await stack.enter_async_context(aiohttp.ClientSession()))
        stack.push_async_callback(fleet.close)
        yield fleet


async def test_advice_tells_what_would_be_done_and_does_nothing(fleet: Fleet) -> None:
    """The default: the plan, its reasons, and the roles as they were."""
    gateway = await fleet.gateway("advise")
    see(gateway, SHORT)
    await until(lambda: gateway.planning.planner.plan is not None)
    plan = await fleet.get(gateway, "/v1/plan")
    assert (plan["mode"], plan["acting"], plan["acts"], plan["changing"]) == ("advise", False, None, [])
    assert plan["plan"]["moves"] == [{"cluster": "pd", "before": "decode", "after": "prefill", "nodes": 1}]
    assert plan["present"]["splits"] == {"pd": {"prefill": 1, "decode": 2}}
    assert plan["best"]["splits"] == {"pd": {"prefill": 2, "decode": 1}}
    assert "pd 2:1 would carry" in plan["why"]
    assert {event["event"] for event in plan["events"]} <= {"Planned"}
    assert fleet.roles() == {"pd-0": "prefill", "pd-1": "decode", "pd-2": "decode"}
    assert gateway.router.policy.threshold_tokens == 100  # type: ignore[attr-defined]
    metrics = gateway.instruments.metrics.registry
    assert metrics.get_sample_value("prfaas_planner_plans_total", {"outcome": "advised"})
    where = {"cluster": "pd", "role": "prefill", "split": "best"}
    assert metrics.get_sample_value("prfaas_planner_instances", where) == 2


async def test_what_is_missing_for_a_plan_is_said(fleet: Fleet) -> None:
    """Before there were requests enough, and where the planner is off."""
    gateway = await fleet.gateway("advise")
    await until(lambda: any(isinstance(event, Planned) for event in gateway.planning.log.events))
    assert "fewer than 4 say nothing" in (await fleet.get(gateway, "/v1/plan"))["why"]
    off = await fleet.gateway("off")
    see(off, SHORT)
    plan = await fleet.get(off, "/v1/plan")
    assert (plan["mode"], plan["plan"], plan["next_look_s"]) == ("off", None, None)


async def test_roles_and_threshold_follow_the_plan_and_requests_are_served_meanwhile(fleet: Fleet) -> None:
    """Short answers, then long ones: a node is drained, converts, and serves in its new role; all of it is told."""
    gateway = await fleet.gateway()
    expected = HashEngine().generate(PROMPT, Sampling(max_tokens=4))
    see(gateway, SHORT)
    await until(lambda: len(ended(gateway)) == 1)
    assert sorted(fleet.roles().values()) == ["decode", "prefill", "prefill"]
    assert await fleet.complete(gateway) == expected
    see(gateway, LONG, 200)
    await until(lambda: len(ended(gateway)) == 2)
    assert sorted(fleet.roles().values()) == ["decode", "decode", "prefill"]
    assert await fleet.complete(gateway) == expected
    kinds = [type(event) for event in gateway.planning.log.events if not isinstance(event, Planned)]
    assert kinds.count(ChangeBegan) == kinds.count(ChangeEnded) == 2
    assert LeaseMoved in kinds and ThresholdMoved in kinds
    assert gateway.router.policy.threshold_tokens == gateway.planning.planner.threshold_tokens  # type: ignore[attr-defined]
    metrics = gateway.instruments.metrics.registry
    for role in ("prefill", "decode"):
        labels = {"role": role, "outcome": "converted"}
        assert metrics.get_sample_value("prfaas_planner_role_changes_total", labels) == 1
    shown = await fleet.get(gateway, "/v1/fleet")
    assert shown["planner"]["acting"] and shown["planner"]["mode"] == "act"
    assert {n["node"]: n["role"] for n in shown["nodes"] if n["convertible"]} == fleet.roles()
    gateway.router.validate_state()


async def test_a_node_that_drains_gets_no_new_work_and_ends_what_it_has(fleet: Fleet) -> None:
    """The router knows the moment that the node says so; what comes goes to the others; nothing is ended."""
    gateway = await fleet.gateway()
    async with fleet.holding("pd-1"), fleet.holding("pd-2"):
        see(gateway, SHORT)
        await until(lambda: changing(gateway))
        node = changing(gateway)
        assert node is not None
        await until(lambda: gateway.router.state.nodes[node].next_role is Role.PREFILL)
        assert not gateway.router.state.nodes[node].up
        for _ in range(3):
            assert await fleet.complete(gateway) == HashEngine().generate(PROMPT, Sampling(max_tokens=4))
        assert fleet.nodes[node].roles.held == 1
        shown = {n["node"]: n for n in (await fleet.get(gateway, "/v1/fleet"))["nodes"]}
        assert (shown[node]["up"], shown[node]["role"], shown[node]["next_role"]) == (True, "decode", "prefill")
        gateway.router.validate_state()
    await until(lambda: [event.outcome for event in ended(gateway)] == ["converted"])
    await until(lambda: gateway.router.state.nodes[node].role is Role.PREFILL)
    assert gateway.router.state.nodes[node].up


async def test_a_gateway_that_dies_in_the_middle_leaves_the_node_as_it_was(fleet: Fleet) -> None:
    """And another one takes over, when the lease of the first has run out."""
    first = await fleet.gateway(lease=2)
    async with fleet.holding("pd-1"), fleet.holding("pd-2"):
        see(first, SHORT)
        await until(lambda: changing(first))
        node = changing(first)
        assert node is not None
        # As if it were gone: its connections break, and it gives nothing back.
        first.planning._lease._until_s = float("-inf")
        await first.stop()
        await until(lambda: fleet.nodes[node].roles.next_role is None)
        assert fleet.nodes[node].roles.role == "decode"
    second = await fleet.gateway()
    assert await fleet.complete(second) == HashEngine().generate(PROMPT, Sampling(max_tokens=4))
    see(second, SHORT)
    await until(lambda: [event.outcome for event in ended(second)] == ["converted"])


async def test_a_node_that_dies_in_the_middle_is_given_up_and_the_others_go_on(fleet: Fleet) -> None:
    """The change is lost, the planner looks again, and requests are served without the node."""
    gateway = await fleet.gateway(dwell=600)
    async with fleet.holding("pd-1"), fleet.holding("pd-2"):
        see(gateway, SHORT)
        await until(lambda: changing(gateway))
        node = changing(gateway)
        assert node is not None
        await fleet.nodes[node].close()
        await until(lambda: ended(gateway))
        assert ended(gateway)[0].outcome == "lost"
        assert not gateway.planning.planner.changing
        await until(lambda: not gateway.router.state.nodes[node].up)
        assert gateway.router.state.nodes[node].next_role is None
        assert await fleet.complete(gateway) == HashEngine().generate(PROMPT, Sampling(max_tokens=4))
        gateway.router.validate_state()


async def test_a_change_is_called_off_when_the_others_of_the_role_are_gone(fleet: Fleet) -> None:
    """The last decode node goes on decoding, although it was about to change."""
    gateway = await fleet.gateway(dwell=600)
    async with fleet.holding("pd-1"), fleet.holding("pd-2"):
        see(gateway, SHORT)
        await until(lambda: changing(gateway))
        node = changing(gateway)
        other = "pd-1" if node == "pd-2" else "pd-2"
        await fleet.nodes[other].close()
        await until(lambda: ended(gateway))
        assert (ended(gateway)[0].node, ended(gateway)[0].outcome) == (node, "called_off")
        assert "last decode node" in ended(gateway)[0].detail
    await until(lambda: all(n.roles.next_role is None for n in fleet.nodes.values()))
    assert fleet.nodes[str(node)].roles.role == "decode"
    await until(lambda: gateway.router.state.nodes[str(node)].up)
    assert await fleet.complete(gateway) == HashEngine().generate(PROMPT, Sampling(max_tokens=4))


async def test_a_node_that_does_not_drain_in_time_goes_on_as_it_was(fleet: Fleet) -> None:
    """The planner is told what was left, and does not try again before its dwell is over."""
    gateway = await fleet.gateway(drain_limit=0.1, dwell=600)
    async with fleet.holding("pd-1"), fleet.holding("pd-2"):
        see(gateway, SHORT)
        await until(lambda: ended(gateway))
        assert (ended(gateway)[0].outcome, ended(gateway)[0].detail) == ("kept", "1 calls were left")
        looks = len(gateway.planning.log.events)
        await until(lambda: len(gateway.planning.log.events) > looks + 2)
        assert len(ended(gateway)) == 1
    assert fleet.roles() == {"pd-0": "prefill", "pd-1": "decode", "pd-2": "decode"}


async def test_of_two_gateways_one_changes_roles(fleet: Fleet) -> None:
    """Both look; the one with the lease acts; when it stops, the other does."""
    first = await fleet.gateway()
    await until(lambda: first.planning.summary()["acting"])
    second = await fleet.gateway(lease=3)
    see(second, SHORT)
    await until(lambda: second.planning.planner.plan is not None)
    await until(lambda: second.planning.describe()["acts"] == first.planning.name)
    plan = await fleet.get(second, "/v1/plan")
    assert not plan["acting"] and plan["gateway"] == second.planning.name
    assert plan["plan"]["moves"] and not ended(second)
    assert fleet.roles() == {"pd-0": "prefill", "pd-1": "decode", "pd-2": "decode"}
    await first.stop()
    await until(lambda: [event.outcome for event in ended(second)] == ["converted"])


async def test_a_node_that_refuses_a_change_is_left_alone(fleet: Fleet) -> None:
    """Somebody else holds its lease: the refusal is told, and nothing waits for it."""
    gateway = await fleet.gateway(dwell=600, lease=3)
    await until(lambda: gateway.planning.summary()["acting"])
    for name in ("pd-1", "pd-2"):
        lease = fleet.nodes[name].roles.lease
        now = fleet.nodes[name].roles.clock.now()
        lease.ask(LeaseCall(holder=gateway.planning.name, ttl_s=0.0), now=now)
        assert lease.ask(LeaseCall(holder="somebody", ttl_s=600.0), now=now).granted
    see(gateway, SHORT)
    await until(lambda: ended(gateway) or not gateway.planning.summary()["acting"])
    assert all(event.outcome == "refused" for event in ended(gateway))
    assert fleet.roles() == {"pd-0": "prefill", "pd-1": "decode", "pd-2": "decode"}
    await until(lambda: not gateway.planning.summary()["acting"])


# -- the lease alone --------------------------------------------------------------------------------------------------


class Voters:
    """Nodes with leases that some gateways can reach and others cannot; stands in for their client."""

    def __init__(self, n: int) -> None:
        self.clock = ManualClock(100.0)
        self.leases = {f"n{i}": RoleLease() for i in range(n)}
        self.reachable: dict[str, set[str]] = {}

    def nodes(self, *known: str) -> list[WatchedNode]:
        """As a gateway sees them that has heard of these alone."""
        watched = []
        for name in self.leases:
            info = NodeInfo(
                node_id=name, boot_id="b", cluster="pd", role="decode", model="m", layout="l", max_model_tokens=1,
                vocab_size=1, prefill_chunk_tokens=1, convertible=True,
            )  # fmt: skip
            watched.append(WatchedNode(name, info if name in known else None, up=name in known))
        return watched

    def lease(self, holder: str) -> PlannerLease:
        return PlannerLease(self, holder, self.clock, ttl_s=9.0)  # type: ignore[arg-type]

    async def open(self, node_id: str, url: str, path: str, call: LeaseCall) -> Any:
        if url not in self.reachable.get(call.holder, self.leases):
            raise LinkError("out of reach")
        answer = self.leases[url].ask(call, now=self.clock.now())

        class Answer:
            async def next(self) -> dict[str, Any]:
                return answer.model_dump()

            def close(self) -> None: ...

        return Answer()


async def test_more_than_half_of_the_nodes_make_a_lease() -> None:
    """A gateway that is cut off from most of them never acts; nor does one that has heard of few of them only."""
    voters = Voters(3)
    a, b = voters.lease("a"), voters.lease("b")
    everything = voters.nodes("n0", "n1", "n2")
    voters.reachable = {"a": {"n2"}, "b": {"n0", "n1", "n2"}}
    assert not await a.renew(everything)
    voters.clock.advance(20.0)
    assert not await a.renew(voters.nodes("n2")), "it took a part of the fleet for the whole"
    voters.clock.advance(20.0)
    assert await b.renew(everything)
    assert a.other is None and not a.held(voters.clock.now())


async def test_a_lease_is_renewed_lost_and_taken_over() -> None:
    """It is asked for again before it runs out; a holder that falls silent stops before another one begins."""
    voters = Voters(3)
    a, b = voters.lease("a"), voters.lease("b")
    nodes = voters.nodes("n0", "n1", "n2")
    assert await a.renew(nodes) and not await b.renew(nodes)
    assert b.other == "a"
    for _ in range(5):
        voters.clock.advance(4.0)
        assert await a.renew(nodes) and not await b.renew(nodes)
    voters.reachable = {"a": set()}
    voters.clock.advance(8.9)
    assert await a.renew(nodes) and not await b.renew(nodes)
    voters.clock.advance(0.2)
    assert not a.held(voters.clock.now())
    voters.clock.advance(3.0)
    assert await b.renew(nodes)
    voters.reachable = {}
    assert not await a.renew(nodes) and a.other == "b"


async def test_a_lease_that_one_node_does_not_grant_is_given_back() -> None:
    """Two gateways cannot block each other with halves; a holder that is refused stops acting at once."""
    voters = Voters(4)
    a, b = voters.lease("a"), voters.lease("b")
    nodes = voters.nodes("n0", "n1", "n2", "n3")
    assert await a.renew(nodes)
    voters.leases["n3"] = RoleLease()
    voters.leases["n3"].ask(LeaseCall(holder="b", ttl_s=600.0), now=voters.clock.now())
    voters.clock.advance(4.0)
    assert not await a.renew(nodes)
    assert voters.leases["n0"].holder(voters.clock.now()) is None
    assert await b.renew(nodes)


@pytest.mark.parametrize(
    ("raw", "mode"), [({}, "advise"), ({"planner": "act"}, "act"), ({"planner": {"mode": "off"}}, "off")]
)
def test_a_planner_is_configured_by_a_word_or_a_table(raw: dict[str, Any], mode: str) -> None:
    """And only advises unless told otherwise."""
    config = GatewayConfig.model_validate({"model": "m", "nodes": [{"url": "http://127.0.0.1:1"}], **raw})
    assert config.planner.mode == mode


def test_a_planner_whose_window_is_shorter_than_its_period_is_refused() -> None:
    """It would not see what came in between."""
    with pytest.raises(ConfigError, match="window"):
        PlannerSection(period=100, window=50)
