"""Starting, stopping and configuring a gateway."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError, UsageError
from prfaas_net.gateway import Gateway, GatewayConfig

from .conftest import config_for
from .fakes import ByteTokenizer, fake_fleet

NODES = [{"url": "http://127.0.0.1:9001"}]


def load(**settings: Any) -> GatewayConfig:
    return load_config(GatewayConfig, flags={"model": "m", "nodes": NODES, **settings}, environ={})


def test_defaults_are_safe() -> None:
    """Loopback only, the policy that measures best, a bounded body and a deadline."""
    config = load()
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8080)
    assert config.policy == "earliest-finish"
    assert 0 < config.request_deadline <= 3600 and config.max_body == 32 << 20


def test_who_sets_a_threshold_wants_it_applied() -> None:
    """Unless a policy is named too."""
    assert load(threshold_tokens=5).policy == "threshold"
    assert load(threshold_tokens=5, policy="earliest-finish").policy == "earliest-finish"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway.example"])
def test_open_address_without_keys_is_refused(host: str) -> None:
    """Nobody serves the network by accident; with a key it is a decision."""
    with pytest.raises(ConfigError, match="without api_keys"):
        load(http={"host": host})
    assert load(http={"host": host}, api_keys=["long-enough"]).http.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """On the own machine a first look stays simple."""
    assert load(http={"host": host}).http.host == host


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": []}, "needs nodes"),
        ({"nodes": [{"url": "127.0.0.1:9001"}]}, "http://127.0.0.1:9001"),
        ({"nodes": [*NODES, {"url": "http://127.0.0.1:9001/"}]}, "listed twice"),
        ({"policy": "treshold"}, "threshold"),
        ({"threshold": 5}, "did you mean 'threshold_tokens'"),
        ({"request_deadline": "soon"}, "request_deadline"),
        ({"request_deadline": 0}, "request_deadline"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"clusters": [{"name": "a", "kind": "big"}]}, "clusters.0.kind"),
        ({"node_key": "short"}, "at least 8 characters"),
        ({"api_keys": ["short"]}, "at least 8 characters"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, Any], words: str) -> None:
    """What was expected, what was found, what to do."""
    with pytest.raises(ConfigError, match=words):
        load(**settings)


def test_secrets_are_not_shown() -> None:
    """Neither a printed configuration nor an error about it holds a key."""
    config = load(node_key="very-secret-key", api_keys=["other-secret-key"])
    assert "secret-key" not in repr(config) and "secret-key" not in str(config.model_dump())
    with pytest.raises(ConfigError) as caught:
        load(node_key="very-secret-key", http={"host": "0.0.0.0"})
    assert "secret-key" not in caught.value.line()


def test_toml_and_environment(tmp_path: Path) -> None:
    """A file, with the environment over it."""
    path = tmp_path / "gateway.toml"
    path.write_text('model = "m"\nthreshold_tokens = 5\n[http]\nport = 1\n[[nodes]]\nurl = "http://h:1"\n')
    environ = {"PRFAAS_GATEWAY__HTTP__PORT": "2", "PRFAAS_GATEWAY__API_KEYS": "one-long-key, two-long-key"}
    config = load_config(GatewayConfig, path, env_prefix="PRFAAS_GATEWAY__", environ=environ)
    assert (config.http.port, config.threshold_tokens, len(config.api_keys)) == (2, 5, 2)


async def test_port_in_use() -> None:
    """A taken port is one clear line, and leaves nothing running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with fake_fleet() as fleet:
            config = config_for(fleet, http={"port": taken.getsockname()[1]})
            gateway = Gateway(config, ByteTokenizer())
            with pytest.raises(ConfigError, match="port in use"):
                await gateway.start()
            with pytest.raises(UsageError, match="not running"):
                _ = gateway.address


async def test_address_that_is_not_ours() -> None:
    """So is an address of another machine."""
    async with fake_fleet() as fleet:
        config = config_for(fleet, http={"host": "192.0.2.1", "port": 0}, api_keys=["long-enough"])
        with pytest.raises(ConfigError, match="cannot listen on 192"):
            await Gateway(config, ByteTokenizer()).start()


async def test_start_and_stop_again() -> None:
    """A stopped gateway can be started again; stopping twice is harmless."""
    async with fake_fleet() as fleet:
        gateway = Gateway(config_for(fleet), ByteTokenizer())
        for _ in range(2):
            await gateway.start()
            assert gateway.url.startswith("http://127.0.0.1:")
            assert not gateway.fleet.missing_roles()
            async with asyncio.timeout(1):
                await gateway.stop()
                await gateway.stop()


async def test_serve_until() -> None:
    """The whole life in one call."""
    async with fake_fleet() as fleet:
        stop = asyncio.Event()
        serving = asyncio.create_task(Gateway(config_for(fleet), ByteTokenizer()).serve_until(stop))
        await fleet.decode.next_polls(1)
        stop.set()
        async with asyncio.timeout(2):
            await serving
