"""API keys: what is kept of them, whose they are, and how many requests each may have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from prfaas_net.cli.main import app
from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.keys import Key, KeyHash, KeyRing, new_key
from prfaas_net.nodes.config import NodeConfig

from .conftest import open_bench
from .fakes import Script

COMPLETIONS = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_found_by_its_hash_and_by_nothing_else() -> None:
    """The salt makes two hashes of one key differ; both fit it, and only it."""
    key = new_key()
    one, other = KeyHash.of(key), KeyHash.of(key)
    assert str(one) != str(other) and key not in str(one)
    for stored in (one, KeyHash.parse(str(other))):
        ring = KeyRing([Key("a", KeyHash.of(new_key())), Key("b", stored)])
        for _ in range(2):  # looked up, then remembered
            found = ring.find(key)
            assert found is not None and found.name == "b"
        for wrong in ("", key[:-1], key + "x", str(stored), "caf\u00e9", "\ud800"):
            assert ring.find(wrong) is None
    assert len(new_key()) >= 43 and new_key() != new_key()


def test_wrong_keys_are_not_remembered() -> None:
    """A flood of them neither fills the memory nor pushes out the good ones."""
    key = new_key()
    ring = KeyRing([Key("a", KeyHash.of(key))])
    assert ring.find(key) is not None
    for number in range(100):
        assert ring.find(f"wrong-{number}") is None
    assert len(ring._known) == 1


@pytest.mark.parametrize("text", ["", "my-plain-key", "hmac-sha256:00:00", "hmac-sha256:zz:zz", "md5:" + "0" * 32])
def test_what_is_no_hash_is_refused_and_not_shown(text: str) -> None:
    """It may be a key that was put there by mistake."""
    with pytest.raises(ConfigError, match="not the hash of a key") as caught:
        KeyHash.parse(text)
    assert not text or text not in caught.value.line()


def load(**settings: Any) -> GatewayConfig:
    flags = {"model": "m", "nodes": [{"url": "http://127.0.0.1:9001"}], **settings}
    return load_config(GatewayConfig, flags=flags, environ={})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([{"name": "a"}], "a hash, or else a key"),
        ([{"name": "a", "hash": str(KeyHash.of("k")), "key": "long-enough"}], "a hash, or else a key"),
        ([{"hash": "long-enough-secret"}], "not the hash of a key"),
        ([{"key": "long-enough", "names": "a"}], "did you mean 'name'"),
        ([{"name": "a", "key": "long-enough"}, {"name": "a", "key": "other-enough"}], "listed twice"),
        ([{"key": "long-enough", "max_concurrent_requests": 0}], "max_concurrent_requests"),
    ],
)
def test_bad_keys_are_one_clear_line(keys: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(api_keys=keys)
    assert "enough-secret" not in caught.value.line()


@pytest.mark.parametrize("given", ["short-secret", 7])
def test_a_secret_that_does_not_fit_is_not_shown(given: object) -> None:
    """The place is named, and what is expected there."""
    with pytest.raises(ConfigError, match="node_key") as caught:
        load_config(NodeConfig, flags={"role": "decode", "node_key": given}, environ={})
    assert repr(given) not in caught.value.line()


def test_a_new_key_and_its_hash_belong_together() -> None:
    """What ``prfaas key new`` prints goes into the file as it is."""
    shown = CliRunner().invoke(app, ["key", "new", "--name", "team-a", "--admin"]).stdout.splitlines()
    key = next(line for line in shown if line.startswith("pfs-"))
    rows = dict(line.split(" = ", 1) for line in shown if " = " in line)
    config = load(api_keys=[{"name": "team-a", "hash": rows["hash"].strip('"'), "admin": True}])
    found = KeyRing(config.holders).find(key)
    assert found is not None
    assert (found.name, found.admin) == ("team-a", True)
    assert CliRunner().invoke(app, ["key", "new", "--json"]).stdout.count("hmac-sha256:") == 1


async def test_a_record_says_whose_request_it_was() -> None:
    """By the key's name; the key itself is nowhere in it."""
    key = new_key()
    async with open_bench(api_keys=[{"name": "team-a", "hash": str(KeyHash.of(key))}, "other-key-here"]) as bench:
        for given, name in ((key, "team-a"), ("other-key-here", "key-2")):
            status, answer, _ = await bench.post(
                COMPLETIONS, {"prompt": "Hi", "explain": True, "n": 2}, headers=bearer(given)
            )
            assert status == 200
            assert [record["key_name"] for record in answer["prfaas"]] == [name, name]
            assert given not in str(answer)


async def test_one_key_cannot_take_the_place_of_the_others() -> None:
    """Its bound answers 429 and names it; other keys are served on; it is free again afterwards."""
    few, many = new_key(), new_key()
    keys = [
        {"name": "few", "hash": str(KeyHash.of(few)), "max_concurrent_requests": 1},
        {"name": "many", "hash": str(KeyHash.of(many))},
    ]
    async with open_bench(api_keys=keys) as bench:
        script = bench.fleet.decode.script = Script(hold_at=0)
        first = asyncio.create_task(bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=bearer(few)))
        await script.gate.reached.wait()
        status, answer, headers = await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=bearer(few))
        assert (status, answer["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
        assert "'few'" in answer["error"]["message"] and few not in answer["error"]["message"]
        second = asyncio.create_task(bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=bearer(many)))
        async with asyncio.timeout(5):
            while len(bench.fleet.decode.calls) < 2:
                await bench.fleet.decode.next_polls(1)
        script.gate.go_on.set()
        assert (await first)[0] == (await second)[0] == 200
        assert (await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=bearer(few)))[0] == 200
        assert (await bench.post(COMPLETIONS, {"prompt": "Hi", "n": 2}, headers=bearer(few)))[0] == 429
