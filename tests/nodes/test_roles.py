"""A PD node changes its role while it serves, drops nothing, and goes on as it was if the change breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from prfaas_net.clock import ManualClock
from prfaas_net.errors import BusyError
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.pd import PdNode
from prfaas_net.nodes.role import RoleKeeper
from prfaas_net.nodes.role_lease import RoleLease
from prfaas_net.nodes.role_messages import LeaseCall, RoleCall
from tests.nodes.conftest import Event, Stream
from tests.nodes.hash_engine import HashEngine
from tests.waiting import until

PROMPT = [3 * i % 997 for i in range(100)]


def generate(max_tokens: int) -> list[int]:
    """The answer of a single process."""
    return HashEngine().generate(PROMPT, Sampling(max_tokens=max_tokens))


class Pair:
    """Two PD nodes, the first of which prefills at first, and a gateway's hand."""

    def __init__(self, nodes: dict[str, PdNode], session: aiohttp.ClientSession) -> None:
        self.nodes = nodes
        self.session = session

    @contextlib.asynccontextmanager
    async def call(self, node: str, path: str, body: Event) -> AsyncIterator[Stream]:
        url = "http://{}:{}".format(*self.nodes[node].control.address) + path
        async with self.session.post(url, data=orjson.dumps(body)) as response:
            yield Stream(response)

    def decode(self, node: str, name: str = "r", n_tokens: int = 100, **sampling: Any) -> Any:
        engine = self.nodes[node].prefill.engine
        body = {
            "request_id": name, "prompt_tokens": n_tokens, "layout": engine.layout.fingerprint, "chunk_tokens": 64,
            "source_cluster": "pd", "deadline_s": 10.0, "sampling": {"max_tokens": 8} | sampling,
        }  # fmt: skip
        return self.call(node, "/v1/decode", body)

    def prefill(self, node: str, ticket: Event, name: str = "r", **sampling: Any) -> Any:
        body = {
            "request_id": name, "token_ids": PROMPT, "ticket": ticket, "deadline_s": 10.0,
            "sampling": {"max_tokens": 8} | sampling,
        }  # fmt: skip
        return self.call(node, "/v1/prefill", body)

    def change(self, node: str, role: str, deadline_s: float = 10.0, **more: Any) -> Any:
        return self.call(node, "/v1/role", {"role": role, "deadline_s": deadline_s, **more})

    async def become(self, node: str, role: str, **more: Any) -> Event:
        async with self.change(node, role, **more) as stream:
            done: Event = await stream.until("done")
        return done

    async def info(self, node: str) -> Event:
        url = "http://{}:{}/v1/node".format(*self.nodes[node].control.address)
        async with self.session.get(url) as answer:
            body: Event = await answer.json()
        return body

    async def tokens(self, prefill: str, decode: str, **sampling: Any) -> list[int]:
        """Serve the prompt."""
        async with self.decode(decode, **sampling) as answer:
            ticket = (await answer.next())["ticket"]
            async with self.prefill(prefill, ticket, **sampling) as work:
                events = await answer.all()
                await work.all()
        return [event["token"] for event in events if event["event"] == "token"]


@contextlib.asynccontextmanager
async def pair(**engines: HashEngine) -> AsyncIterator[Pair]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = {}
        for name, role in (("a", "prefill"), ("b", "decode")):
            config = NodeConfig.model_validate({"role": role, "node_id": name, "kv": {"arena": "8MiB"}})
            node = nodes[name] = PdNode(config, engines.get(name) or HashEngine())
            await node.start()
            stack.push_async_callback(node.close)
        yield Pair(nodes, await stack.enter_async_context(aiohttp.ClientSession()))


async def test_two_nodes_trade_places() -> None:
    """What each of them answers in its new role is right, and what it had cached is still of use."""
    async with pair() as fleet:
        expected = generate(8)
        assert await fleet.tokens("a", "b") == expected
        for node, role in (("a", "decode"), ("b", "prefill")):
            done = await fleet.become(node, role)
            assert (done["role"], done["changed"]) == (role, True)
            assert (await fleet.info(node))["role"] == role
        assert await fleet.tokens("b", "a") == expected
        assert await fleet.become("a", "decode") | {"took_s": 0} == {
            "event": "done", "role": "decode", "changed": False, "held": 0, "took_s": 0,
        }  # fmt: skip


async def test_what_a_node_holds_runs_to_its_end_and_what_comes_is_sent_elsewhere() -> None:
    """A decode that was there before the change is answered whole; a new one is refused as "no room"; then it turns."""
    async with pair(b=HashEngine(step_seconds=0.01)) as fleet:
        async with fleet.decode("b", max_tokens=100) as answer:
            ticket = (await answer.next())["ticket"]
            async with fleet.change("b", "prefill") as change:
                assert await change.next() == {
                    "event": "draining", "role": "decode", "next_role": "prefill", "held": 1,
                }  # fmt: skip
                info = await fleet.info("b")
                assert (info["role"], info["next_role"], info["convertible"]) == ("decode", "prefill", True)
                for refused in (fleet.decode("b", "late"), fleet.prefill("b", ticket, "late")):
                    async with refused as late:
                        assert late.response.status == 503
                        assert (await late.response.json())["code"] == BusyError.code
                async with fleet.prefill("a", ticket, max_tokens=100) as work:
                    events = await answer.all()
                    await work.all()
                assert [e["token"] for e in events if e["event"] == "token"] == generate(100)
                assert (await change.until("done"))["role"] == "prefill"
        assert fleet.nodes["b"].ground.memory.used_bytes == 0


async def test_a_node_that_does_not_drain_in_time_keeps_its_role() -> None:
    """It says so, and takes work again."""
    async with pair() as fleet, fleet.decode("b") as held:
        await held.next()
        done = await fleet.become("b", "prefill", deadline_s=0.05)
        assert (done["role"], done["changed"], done["held"]) == ("decode", False, 1)
        async with fleet.decode("b", "another") as again:
            assert (await again.next())["event"] == "reserved"


async def test_a_change_whose_caller_is_gone_is_called_off() -> None:
    """The open answer owns the change: when the gateway dies, the node goes on as it was."""
    async with pair() as fleet, fleet.decode("b") as held:
        await held.next()
        async with fleet.change("b", "prefill") as change:
            await change.next()
            change.response.close()
        await until(lambda: fleet.nodes["b"].roles.next_role is None)
        assert fleet.nodes["b"].roles.role == "decode"
        async with fleet.decode("b", "another") as again:
            assert (await again.next())["event"] == "reserved"


async def test_one_change_at_a_time() -> None:
    """A second caller is refused while the first one's change is under way, and does not disturb it."""
    async with pair() as fleet, fleet.decode("b") as held:
        await held.next()
        async with fleet.change("b", "prefill") as first:
            await first.next()
            async with fleet.change("b", "prefill") as second:
                assert second.response.status == 503
            assert fleet.nodes["b"].roles.next_role == "prefill"


async def test_the_state_that_is_streamed_tells_of_the_change() -> None:
    """Draining, then the new role, each the moment that it is so; links are told of in the prefill role only."""
    async with pair() as fleet, fleet.decode("b") as held:
        await held.next()
        url = "http://{}:{}/v1/state/events".format(*fleet.nodes["b"].control.address)
        async with fleet.session.get(url) as response:
            states = Stream(response)

            async def until_it_says(role: str, next_role: str | None) -> Event:
                while True:
                    state = await states.next()
                    if (state["role"], state["next_role"]) == (role, next_role):
                        return state

            assert (await until_it_says("decode", None))["links"] == []
            async with fleet.change("b", "prefill") as change:
                await until_it_says("decode", "prefill")
                held.response.close()
                await change.until("done")
                await until_it_says("prefill", None)


async def test_only_the_planner_with_the_lease_changes_roles() -> None:
    """Others are told who has it, until it is given back or has run out."""
    async with pair() as fleet:

        async def ask(holder: str, ttl_s: float) -> Event:
            async with fleet.call("a", "/v1/lease", {"holder": holder, "ttl_s": ttl_s}) as stream:
                return await stream.next()

        assert (await ask("gw-1", 60.0))["granted"]
        refusal = await ask("gw-2", 60.0)
        assert not refusal["granted"] and refusal["holder"] == "gw-1" and refusal["left_s"] > 0
        for holder in ("gw-2", None):
            async with fleet.change("a", "decode", holder=holder) as refused:
                assert refused.response.status == 503
        assert (await fleet.become("a", "decode", holder="gw-1"))["changed"]
        assert (await ask("gw-1", 0.0))["holder"] is None
        assert (await ask("gw-2", 60.0))["granted"]


def test_a_lease_ends_by_itself() -> None:
    """A planner that dies holds nobody up for longer than it had asked for."""
    lease = RoleLease()
    assert lease.ask(LeaseCall(holder="a", ttl_s=10.0), now=0.0).granted
    assert not lease.ask(LeaseCall(holder="b", ttl_s=10.0), now=9.9).granted
    assert lease.ask(LeaseCall(holder="b", ttl_s=10.0), now=10.0).granted
    assert not lease.allows("a", now=11.0) and not lease.allows(None, now=11.0)
    assert lease.allows(None, now=20.0)


async def test_a_call_that_ends_while_it_is_being_refused_does_not_confuse_the_count() -> None:
    """Refused calls are not held; the drain ends with the last one that was."""
    said: list[Event] = []
    ends: list[tuple[str, float]] = []
    keeper = RoleKeeper("decode", on_end=lambda *end: ends.append(end), clock=ManualClock())
    with keeper.admitted("decode"):
        change = asyncio.create_task(keeper.change(RoleCall(role="prefill", deadline_s=5.0), said.append))
        await until(lambda: keeper.next_role == "prefill")
        for role in ("decode", "prefill"):
            with pytest.raises(BusyError), keeper.admitted(role):
                pass
        assert keeper.held == 1
    await change
    assert [event["event"] for event in said] == ["draining", "done"]
    assert (keeper.role, keeper.held, ends) == ("prefill", 0, [("converted", 0.0)])
