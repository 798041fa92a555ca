"""A gateway and its nodes over HTTPS, with every secret there is: who is let in, and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError
from prfaas_net.gateway import Gateway, GatewayConfig
from prfaas_net.gateway.keys import KeyHash
from prfaas_net.nodes.join_messages import JOIN_PATH
from tests.gateway.fakes import ByteTokenizer
from tests.nodes.conftest import Hand, Nodes
from tests.transport.certificates import Authority
from tests.waiting import until

SECRETS = {
    "node_key": "secret-of-the-nodes-7d1f", "kv_key": "secret-of-the-kv-stream-9a2c",
    "plain": "secret-api-key-in-file-4e4e", "hashed": "secret-api-key-hashed-1b7a",
    "token": "secret-join-token-55aa-0f0f",
    "wrong": "secret-wrong-guess-8c8c",
}  # fmt: skip
COMPLETION = {"prompt": "Hello", "max_tokens": 4}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def https(authority: Authority, name: str, **more: object) -> dict[str, Any]:
    files = authority.issue(name)
    return {"certificate": str(files.certificate), "key": str(files.key), **more}


@asynccontextmanager
async def fleet(nodes: Nodes, authority: Authority, **gateway: Any) -> AsyncIterator[tuple[Hand, Gateway]]:
    """A prefill and a decode node, and a gateway that lists the first and is joined by the second."""
    config: dict[str, Any] = {
        "model": "hash", "policy": "remote", "node_key": SECRETS["node_key"],
        "http": {"port": 0, "tls": https(authority, "gateway")},
        "api_keys": [SECRETS["plain"], {"name": "team", "hash": str(KeyHash.of(SECRETS["hashed"]))}],
        "join": {"token_hash": str(KeyHash.of(SECRETS["token"]))},
        "fleet": {"poll_interval": "50ms", "poll_timeout": "10s", "tls": {"ca": str(authority.path)}},
        **gateway,
    }  # fmt: skip
    common = {"node_key": SECRETS["node_key"], "kv": {"arena": "8MiB", "shared_key": SECRETS["kv_key"]}}
    prefill = {**common, "tls": https(authority, "prefill")}
    decode = {**common, "tls": https(authority, "decode")}
    async with nodes(prefill=prefill, decode=decode) as hand:
        listed = hand.prefill_node.config.url_at(hand.prefill_node.control.address)
        config.setdefault("nodes", [{"url": listed}])
        settings = load_config(GatewayConfig, flags=config, environ={})
        async with Gateway(settings, ByteTokenizer()) as running:
            yield hand, running


def trusting(authority: Authority, show: dict[str, Any] | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.path)
    if show is not None:
        context.load_cert_chain(show["certificate"], show["key"])
    return context


def join_call(hand: Hand) -> dict[str, str]:
    info = hand.decode_node.info()
    url = hand.decode_node.config.url_at(hand.decode_node.control.address)
    return {"url": url, **{name: getattr(info, name) for name in ("node_id", "boot_id", "role", "cluster")}}


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, key: str, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    sent = {"Authorization": f"Bearer {key}", **(headers or {})}
    async with session.post(url, data=data, headers=sent) as answer:
        return answer.status, await answer.text()


async def test_no_secret_is_in_a_log_a_view_or_an_error(
    nodes: Nodes, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is asked, rightly and wrongly: not the keys in force, and not what somebody guessed."""
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    connector = aiohttp.TCPConnector(ssl=trusting(authority))
    async with (
        fleet(nodes, authority) as (hand, gateway),
        aiohttp.ClientSession(connector=connector) as session,
        asyncio.timeout(50),
    ):
        base = gateway.url
        assert base.startswith("https://")

        async def said(path: str, body: Any, key: str, **headers: str) -> int:
            status, text = await post(session, f"{base}{path}", body, key, headers)
            shown.append(text)
            return status

        assert await said(JOIN_PATH, join_call(hand), SECRETS["wrong"]) == 401
        assert await said(JOIN_PATH, {**join_call(hand), "role": "prefill"}, SECRETS["token"]) == 409
        assert await said(JOIN_PATH, join_call(hand), SECRETS["token"]) == 200
        for key in (SECRETS["plain"], SECRETS["hashed"]):
            assert await said("/v1/completions", {**COMPLETION, "explain": True}, key) == 200
        assert await said("/v1/completions", COMPLETION, SECRETS["wrong"]) == 401
        assert await said("/v1/completions", COMPLETION, SECRETS["wrong"] + "x" * 9000) in (400, 431)
        assert await said("/v1/completions", b"{", SECRETS["plain"]) == 400
        assert await said("/v1/reload", {}, SECRETS["plain"]) == 403
        assert await said("/v1/completions", COMPLETION, SECRETS["hashed"], **{"X-Request-ID": "known"}) == 200
        shows = {"Authorization": f"Bearer {SECRETS['plain']}"}
        for path in (
            "/v1/models",
            "/v1/fleet",
            "/v1/cache",
            "/v1/plan",
            "/v1/requests/known",
            "/health",
            "/metrics",
            "/",
        ):
            async with session.get(f"{base}{path}", headers=shows) as answer:
                assert answer.status == 200, path
                shown.append(await answer.text())
        for node in (hand.prefill_node, hand.decode_node):
            at = node.config.url_at(node.control.address)
            for path in ("/v1/node", "/v1/links", "/v1/state/events", "/health", "/metrics"):
                async with session.get(f"{at}{path}", headers=shows) as answer:
                    shown.append(await answer.text())
            shown.append((await post(session, f"{at}/v1/reload", {}, SECRETS["wrong"]))[1])
        shown.append(repr(gateway.config) + repr(hand.prefill_node.config) + str(hand.decode_node.config))
        await hand.settled()
    shown.append(caplog.text)
    assert "key_name" in "".join(shown) and "team" in "".join(shown)
    for name, secret in SECRETS.items():
        for text in shown:
            assert secret not in text, f"{name} is shown: {text[max(0, text.index(secret) - 200) :][:300]}"


async def test_a_gateway_verifies_its_nodes(nodes: Nodes, authority: Authority, tmp_path: Path) -> None:
    """One whose certificate somebody else has signed is not talked to, and the problem says why."""
    other = tmp_path / "other"
    other.mkdir()
    strange = {"poll_interval": "50ms", "poll_timeout": "10s", "tls": {"ca": str(Authority(other, "strange").path)}}
    async with fleet(nodes, authority, fleet=strange) as (_, gateway):
        assert not gateway.fleet.nodes[0].up
        assert "certificate verify failed" in str(gateway.fleet.nodes[0].problem)
    async with fleet(nodes, authority) as (_, gateway):
        await until(lambda: gateway.fleet.nodes[0].up, within_s=15)


async def test_only_clients_with_a_certificate_are_let_in_where_that_is_asked(
    nodes: Nodes, authority: Authority
) -> None:
    """The handshake ends it; whoever speaks no TLS gets no answer either."""
    http = {"port": 0, "tls": https(authority, "gateway", client_ca=str(authority.path))}
    async with fleet(nodes, authority, http=http) as (_, gateway):
        for context, lets_in in ((trusting(authority, https(authority, "client")), True), (trusting(authority), False)):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                try:
                    async with session.get(f"{gateway.url}/live") as answer:
                        assert lets_in and answer.status == 200
                except aiohttp.ClientError:
                    assert not lets_in
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(gateway.url.replace("https", "http") + "/live")


async def test_files_that_cannot_be_used_are_one_line(nodes: Nodes, tmp_path: Path) -> None:
    """Before anything listens."""
    missing = {"certificate": str(tmp_path / "none.crt"), "key": str(tmp_path / "none.key")}
    config = {"model": "m", "nodes": [{"url": "https://127.0.0.1:1"}], "http": {"port": 0, "tls": missing}}
    with pytest.raises(ConfigError, match=r"cannot use the certificate and key in .*none\.crt"):
        await Gateway(load_config(GatewayConfig, flags=config, environ={}), ByteTokenizer()).start()
    with pytest.raises(ConfigError, match=r"cannot use the certificate and key in .*none\.crt"):
        async with nodes(decode={"tls": missing}):
            pass
