"""A gateway that is told to leave finishes what it holds; a node that is leaving gets nothing new."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from tests.waiting import until

from .conftest import open_bench
from .fakes import Gate, Script
from .test_fleet import quiet, watched
from .test_ladder import ANSWER, spare_nodes

ASK = {"prompt": "Hi", "stream": True, "max_tokens": len(ANSWER)}


async def test_a_leaving_gateway_ends_what_it_has_and_takes_nothing_new() -> None:
    """The stream in flight is whole; a new request is sent away, with when to try again; probes say why."""
    async with open_bench() as bench:
        gate = Gate()
        bench.fleet.decode.script = Script(hold_at=3, gate=gate)
        async with bench.http.post(f"{bench.gateway.url}/v1/completions", data=orjson.dumps(ASK)) as stream:
            draining = asyncio.create_task(bench.gateway.drain())
            await until(lambda: bench.gateway._serving is not None and bench.gateway._serving.draining)
            status, body, headers = await bench.post("/v1/completions", {"prompt": "Hi"})
            assert (status, body["error"]["type"]) == (503, "overloaded_error")
            assert headers["Retry-After"] == "1" and headers["Connection"] == "close"
            for path, expected in (("/ready", 503), ("/health", 503), ("/live", 200)):
                status, body = await bench.get(path)
                assert status == expected
                assert body["status"] == ("ok" if path == "/live" else "draining")
            assert not draining.done()
            gate.go_on.set()
            raw = await stream.read()
        await draining
        assert raw.endswith(b"data: [DONE]\n\n") and raw.count(b"data: {") == len(ANSWER)
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


async def test_the_time_to_leave_is_bounded() -> None:
    """A stream that never ends is ended with an error of its own, and everything that it held is given back."""
    async with open_bench(drain_timeout=0.05) as bench:
        bench.fleet.decode.script = Script(hold_at=3)
        async with bench.http.post(f"{bench.gateway.url}/v1/completions", data=orjson.dumps(ASK)) as stream:
            async with asyncio.timeout(5):
                await bench.gateway.drain()
                await bench.gateway.stop()
            raw = await stream.read()
        last: Any = orjson.loads(raw.split(b"data: ")[-1])
        assert "stopping" in last["error"]["message"]
        await bench.fleet.all_idle()


async def test_an_idle_gateway_leaves_at_once() -> None:
    """Nothing is waited for."""
    async with open_bench(drain_timeout=3600) as bench, asyncio.timeout(5):
        await bench.gateway.drain()


async def test_a_leaving_node_is_believed_at_once() -> None:
    """No request is tried there any more after its first word of it; what it has, it keeps."""
    async with open_bench(prepare=spare_nodes, fleet={"poll_interval": 3600}) as bench:
        gate = Gate()
        bench.fleet.decode.script = Script(hold_at=3, gate=gate)
        seen = watched(bench.gateway, bench.fleet.decode)
        async with bench.http.post(f"{bench.gateway.url}/v1/completions", data=orjson.dumps(ASK)) as stream:
            bench.fleet.decode.info["draining"] = True
            await bench.gateway.fleet.poll(seen)
            assert not seen.up and "about to leave" in str(seen.problem)
            other = await bench.complete(explain=True)
            assert other["prfaas"]["decode_node"] == "pd-decode-1" and not other["prfaas"]["fallbacks"]
            gate.go_on.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        await bench.fleet.all_idle()
        bench.assert_nothing_held()


async def test_a_node_that_leaves_and_comes_back_is_used_again() -> None:
    """Under a new boot id, as after an upgrade."""
    from .fakes import fake_fleet

    async with fake_fleet() as fleet, quiet(fleet) as gateway:
        seen = watched(gateway, fleet.near)
        fleet.near.info["draining"] = True
        await gateway.fleet.poll(seen)
        fleet.near.info.update(draining=False, boot_id="boot-2")
        for _ in range(2):
            await gateway.fleet.poll(seen)
        assert seen.up
