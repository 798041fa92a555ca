"""One file, and every daemon of a fleet started from it as a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from prfaas_net.gateway.keys import KeyHash, new_key
from prfaas_net.localfleet.fleet import _free_port
from prfaas_net.localfleet.processes import Process

pytestmark = pytest.mark.e2e

FLEET = """
node_key = "{node_key}"

[gateway]
policy = "remote"
threshold_tokens = 100
fleet.poll_interval = "200ms"
http.port = {gateway_port}
join.token_hash = "{token_hash}"
[[gateway.api_keys]]
name = "operator"
hash = "{key_hash}"
admin = true

[node.kv]
arena = "64MiB"
shared_key = "{kv_key}"

[[clusters]]
name = "prfaas"
kind = "prfaas"

[[links]]
from = "prfaas"
to = "pd"
budget = "{budget}"
connections = 2

[[nodes]]
node_id = "far"
role = "prefill"
cluster = "prfaas"
listen = "127.0.0.1:{far_port}"

[[nodes]]
node_id = "guest"
role = "decode"
cluster = "pd"
join.gateways = ["http://127.0.0.1:{gateway_port}"]
join.token = "{token}"
"""


async def test_a_fleet_starts_from_one_file_reloads_it_and_lets_a_node_go(tmp_path: Path) -> None:
    """The decode node joins; the reload reaches the prefill node's links; a guest that is told to end leaves first."""
    key, token = new_key(), new_key()
    names = {
        "gateway_port": _free_port(), "far_port": _free_port(), "node_key": "n" * 20, "kv_key": "k" * 20,
        "key_hash": str(KeyHash.of(key)), "token": token, "token_hash": str(KeyHash.of(token)),
    }  # fmt: skip
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(budget="10Gbps", **names))
    url = f"http://127.0.0.1:{names['gateway_port']}"
    session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"})
    async with AsyncExitStack() as stack, session, asyncio.timeout(55):

        async def start(*command: str) -> Process:
            process = await Process.start(command[0], [*command, "--config", str(file)])
            stack.push_async_callback(process.stop)
            return process

        _, _, guest = await asyncio.gather(start("gateway"), start("prefill", "--node", "far"), start("decode"))

        async def ready(status: int) -> None:
            while True:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == status:
                        return
                await asyncio.sleep(0.05)

        await ready(200)
        body = {"prompt": "Hello there", "max_tokens": 4, "explain": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            record = (await answer.json())["prfaas"]
        assert (record["prefill_node"], record["decode_node"], record["key_name"]) == ("far", "guest", "operator")

        file.write_text(FLEET.format(budget="5Gbps", **names).replace("threshold_tokens = 100", "threshold_tokens = 7"))
        async with session.post(f"{url}/v1/reload") as answer:
            told = await answer.json()
        assert told["applied"] == ["threshold_tokens", "links"]
        assert told["nodes"]["far"] == {"applied": ["kv.links"], "needs_restart": []}
        assert told["nodes"]["guest"]["applied"] == []

        await guest.stop()
        await ready(503)
        async with session.get(f"{url}/health") as answer:
            assert [node["node"] for node in (await answer.json())["nodes"]] == ["far"]
