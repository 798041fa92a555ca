"""A configuration that is read anew while requests are on their way."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import ConfigError
from prfaas_net.gateway import Gateway
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.scheduling import LinkSeen
from tests.transport.certificates import Authority

from .conftest import Bench, config_for
from .fakes import ByteTokenizer, Script, fake_fleet

ADMIN, CLIENT = "a-key-of-an-admin", "a-key-of-a-client"
KEYS = [{"name": "root", "key": ADMIN, "admin": True}, {"name": "team", "key": CLIENT}]


class File:
    """Stands for the file: what it says may be changed, or made unreadable."""

    def __init__(self, base: GatewayConfig) -> None:
        self._base = base
        self.changes: dict[str, Any] = {}

    def read(self) -> GatewayConfig:
        try:
            return GatewayConfig.model_validate({**dict(self._base), **self.changes})
        except ValueError as error:
            raise ConfigError("fleet.toml: gateway.policy: what is this") from error


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[tuple[Bench, File]]:
    async with fake_fleet() as fleet, aiohttp.ClientSession() as http:
        file = File(config_for(fleet, api_keys=KEYS, **settings))
        async with Gateway(file.read(), ByteTokenizer(), reread=file.read) as gateway:
            yield Bench(gateway, fleet, http), file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def reload(bench: Bench, key: str = ADMIN) -> tuple[int, Any]:
    status, answer, _ = await bench.post("/v1/reload", {}, headers=bearer(key))
    return status, answer


async def ask(bench: Bench, key: str = CLIENT, **body: Any) -> tuple[int, Any]:
    body = {"prompt": "x" * 50, "max_tokens": 3, "explain": True, **body}
    status, answer, _ = await bench.post("/v1/completions", body, headers=bearer(key))
    return status, answer


async def test_what_is_in_force_changes_for_those_who_come_and_not_for_those_who_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Policy, threshold, bounds and keys; a stream that is in the middle goes on to its end, with its old key."""
    caplog.set_level(logging.INFO, "prfaas_net.gateway.reloading")
    async with opened() as (bench, file), asyncio.timeout(30):
        script = bench.fleet.decode.script = Script(hold_at=2)
        url = f"{bench.gateway.url}/v1/completions"
        body = {"prompt": "Hi", "stream": True, "max_tokens": 4}
        async with bench.http.post(url, json=body, headers=bearer(CLIENT)) as stream:
            await script.gate.reached.wait()
            bench.fleet.decode.script = Script()
            file.changes = {
                "threshold_tokens": 10, "max_prompt_tokens": 60, "ttft_limit": 900, "max_concurrent_requests": 5,
                "api_keys": [KEYS[0], {"name": "new", "key": "a-key-that-is-new"}],
            }  # fmt: skip
            status, answer = await reload(bench)
            assert status == 200
            assert set(answer["applied"]) == set(file.changes) and answer["needs_restart"] == []
            script.gate.go_on.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert (await ask(bench))[0] == 401
        status, answer = await ask(bench, "a-key-that-is-new")
        assert (answer["prfaas"]["threshold_tokens"], answer["prfaas"]["prefilled_in"]) == (10, "prfaas")
        assert (await ask(bench, "a-key-that-is-new", prompt="x" * 61))[0] == 400
        assert "reloaded by key root: " in caplog.text and "threshold_tokens" in caplog.text
        assert ADMIN not in caplog.text and "a-key-that-is-new" not in caplog.text
        assert bench.count("prfaas_reloads_total", outcome="applied") == 1
        bench.assert_nothing_held()


async def test_another_policy_takes_over_between_two_requests() -> None:
    async with opened() as (bench, file):
        assert (await ask(bench))[1]["prfaas"]["policy"] == "threshold"
        file.changes = {"policy": "remote"}
        assert (await reload(bench))[1]["applied"] == ["policy"]
        _, answer = await ask(bench)
        assert (answer["prfaas"]["policy"], answer["prfaas"]["prefilled_in"]) == ("remote", "prfaas")
        bench.assert_nothing_held()


async def test_a_bad_file_is_refused_and_the_old_one_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """With the explanation that a start would give; counted and logged."""
    async with opened() as (bench, file):
        file.changes = {"policy": "treshold"}
        status, answer = await reload(bench)
        assert (status, answer["error"]["code"]) == (400, "bad_configuration")
        assert "expected one of" in answer["error"]["message"] and "'treshold'" in answer["error"]["message"]
        assert (await ask(bench))[0] == 200
        assert bench.gateway.config.policy == "threshold"
        assert "not reloaded, the old configuration goes on" in caplog.text
        assert bench.count("prfaas_reloads_total", outcome="refused") == 1


async def test_what_only_a_restart_changes_is_said_and_left_alone() -> None:
    async with opened() as (bench, file):
        file.changes = {"model": "other", "max_body": 100, "threshold_tokens": 7}
        _, answer = await reload(bench)
        assert (answer["applied"], sorted(answer["needs_restart"])) == (["threshold_tokens"], ["max_body", "model"])
        assert (await ask(bench, model="fake"))[0] == 200
        assert (await reload(bench))[1]["applied"] == []
        assert bench.count("prfaas_reloads_total", outcome="unchanged") == 1


async def test_only_an_admin_may() -> None:
    """Not a client, not whoever has no key; and not a gateway without a file."""
    async with opened() as (bench, _):
        assert (await reload(bench, CLIENT))[0] == 403
        assert (await reload(bench, "a-key-of-nobody"))[0] == 401
    async with fake_fleet() as fleet, aiohttp.ClientSession() as http:
        async with Gateway(config_for(fleet), ByteTokenizer()) as gateway:
            status, answer = await reload(Bench(gateway, fleet, http))
            assert status == 403 and "admin = true" in answer["error"]["message"]
        async with Gateway(config_for(fleet, api_keys=KEYS), ByteTokenizer()) as gateway:
            status, answer = await reload(Bench(gateway, fleet, http))
            assert status == 400 and "--config" in answer["error"]["message"]


async def test_nodes_are_told_and_what_they_say_is_passed_on() -> None:
    """Each of those that are up; one that cannot is no reason for the gateway not to."""

    async def reloaded(request: web.Request) -> web.Response:
        return web.json_response({"applied": ["kv.links"], "needs_restart": []})

    async with opened() as (bench, file):
        near = bench.fleet.near
        near.extra_routes.append(web.post("/v1/reload", reloaded))
        await near.stop()
        await near.start()
        file.changes = {"threshold_tokens": 7}
        async with asyncio.timeout(10):
            while not all(node.up for node in bench.gateway.fleet.nodes):
                await near.next_polls(1)
            _, answer = await reload(bench)
        assert answer["nodes"]["pd-prefill-0"] == {"applied": ["kv.links"], "needs_restart": []}
        assert "404" in answer["nodes"]["prfaas-0"]["error"]
        assert answer["applied"] == ["threshold_tokens"]


async def test_the_budgets_of_links_are_counted_on_from_the_start_and_change_with_the_file() -> None:
    """Whatever else is known of a link stays."""
    async with opened(links=[{"from": "prfaas", "to": "pd", "budget": "40Gbps"}]) as (bench, file):
        link = bench.gateway.router.state.links["prfaas", "pd"]
        assert (link.budget_bps, link.rate_bps, link.state) == (40e9, 40e9, LinkState.IDLE)
        bench.gateway._note(LinkSeen("prfaas", "pd", LinkState.BUILDING, 3e9))
        file.changes = {"links": [{"from": "prfaas", "to": "pd", "budget": "20Gbps"}]}
        assert (await reload(bench))[1]["applied"] == ["links"]
        assert (link.budget_bps, link.available_bps, link.state) == (20e9, 3e9, LinkState.BUILDING)


async def test_a_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    """Whoever connects from then on is shown the new one; files that do not fit change nothing."""
    authority = Authority(tmp_path)
    files, renewed = authority.issue("one"), authority.issue("two")
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.path)

    async def serial(gateway: Gateway) -> object:
        _, writer = await asyncio.open_connection(*gateway.address, ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        writer.close()
        await writer.wait_closed()
        return shown

    async with fake_fleet() as fleet, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
        file = File(config_for(fleet, api_keys=KEYS, http={"port": 0, "tls": tls}))
        async with Gateway(file.read(), ByteTokenizer(), reread=file.read) as gateway:
            bench, before = Bench(gateway, fleet, http), await serial(gateway)
            files.certificate.write_bytes(renewed.certificate.read_bytes())
            status, answer = await reload(bench)
            assert status == 400 and "cannot use the certificate and key" in answer["error"]["message"]
            assert await serial(gateway) == before
            files.key.write_bytes(renewed.key.read_bytes())
            assert (await reload(bench))[0] == 200
            assert await serial(gateway) != before
