"""Variables for every flag, and ``--check``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas_net.cli.main import command
from prfaas_net.errors import ConfigError

FLEET = """
[gateway]
[node]
node_key = "0123456789abcdef"
kv.shared_key = "fedcba9876543210"
[[clusters]]
name = "prfaas"
kind = "prfaas"
[[links]]
from = "prfaas"
to = "pd"
budget = "40Gbps"
[[nodes]]
node_id = "far"
role = "prefill"
cluster = "prfaas"
listen = "10.8.0.2:9000"
[[nodes]]
node_id = "near"
role = "decode"
listen = "10.0.0.2:9000"
kv.listen = "10.0.0.2:9100"
[[nodes]]
node_id = "either"
role = "prefill"
convertible = true
listen = "10.0.0.3:9000"
kv.listen = "10.0.0.3:9100"
"""


def options(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every option of every command below, with the command it is of."""
    for name, below in group.commands.items():
        if hasattr(below, "commands"):
            yield from options(below, f"{path}_{name}")
        yield from ((f"{path}_{name}", p) for p in below.params if p.param_type_name == "option")


def test_every_flag_has_a_variable() -> None:
    """Named after its command and itself; no two of them alike."""
    named: dict[str, str] = {}
    for where, option in options(command(), "PRFAAS"):
        flag = max(option.opts, key=len)
        assert isinstance(option.envvar, str), f"{where} {flag} has no variable"
        assert re.fullmatch(r"PRFAAS_[A-Z0-9]+(_[A-Z0-9]+)*", option.envvar)
        if option.envvar != "PRFAAS_API_KEY":
            expected = re.sub(r"[-_]+", "_", f"{where}_{flag}").upper()
            assert option.envvar == expected
            assert named.setdefault(option.envvar, f"{where} {flag}") == f"{where} {flag}"
    assert len(named) > 60
    assert {"PRFAAS_GATEWAY_LISTEN", "PRFAAS_DECODE_NODE", "PRFAAS_BENCH_TRANSPORT_LINK"} <= set(named)


def run(*args: str) -> int:
    """Exit code of a command in this process."""
    return int(command().main(list(args), prog_name="prfaas", standalone_mode=False) or 0)


def test_a_variable_is_a_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And a flag on the command line goes over it."""
    monkeypatch.setenv("PRFAAS_GATEWAY_NODE", "http://127.0.0.1:1 http://127.0.0.1:2")
    monkeypatch.setenv("PRFAAS_GATEWAY_THRESHOLD", "4711")
    monkeypatch.setenv("PRFAAS_GATEWAY_CHECK", "1")
    assert run("gateway") == 0
    assert "t = 4,711 tokens" in (shown := capsys.readouterr().out)
    assert "http://127.0.0.1:2" in shown
    assert run("gateway", "--threshold", "12") == 0
    assert "t = 12 tokens" in capsys.readouterr().out


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gateway",), "asks         3 nodes"),
        (("prefill", "--node", "far"), "to pd: paced to 20.0 Gbps, 4 connections"),
        (("decode",), "takes KVCache at 10.0.0.2:9100, with the shared key"),
        (("pd", "--node", "either"), "pd node either of cluster pd"),
        (("prefill", "--node", "far", "--budget", "1Gbps"), "to pd: paced to 1.00 Gbps"),
    ],
)
def test_a_check_explains_and_starts_nothing(
    fleet: Path, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole fleet, then the daemon itself; no secret."""
    assert run(*args, "--config", str(fleet), "--check") == 0
    shown = capsys.readouterr().out
    assert "fleet of 3 nodes in 2 clusters" in shown and "link prfaas > pd" in shown
    assert words in shown
    assert "0 errors" in shown.splitlines()[-1]
    assert "0123456789abcdef" not in shown and "fedcba9876543210" not in shown


def test_a_check_ends_with_2_where_a_start_would_fail(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every error at once, each told once; and what others may read."""
    fleet.write_text(FLEET.replace("kv.shared_key", "# "))
    fleet.chmod(0o644)
    assert run("decode", "--config", str(fleet), "--check") == 2
    shown = capsys.readouterr().out.splitlines()
    assert sum("will not take KVCache at 10.0.0.2" in line for line in shown) == 1
    assert any("either: will not take KVCache at 10.0.0.3" in line for line in shown)
    assert any("others may read it" in line for line in shown)
    assert shown[-1] == "2 errors, 1 warnings"


def test_a_file_of_one_daemon_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same words, and with the files that it names."""
    file = tmp_path / "gateway.toml"
    file.write_text(
        'model = "m"\napi_keys = ["a-key-in-the-file"]\nnodes = [{url = "http://10.0.0.2:9000"}]\n'
        '[http.tls]\ncertificate = "/nowhere.pem"\nkey = "/nowhere.key"\n'
    )
    assert run("gateway", "--config", str(file), "--check") == 2
    shown = capsys.readouterr().out
    for words in (
        "https://127.0.0.1:8080", "cannot use the certificate and key", "keep its hash instead",
        "no API key is an admin's",
        "prompts reach http://10.0.0.2:9000 in clear", "others may read it",
    ):  # fmt: skip
        assert words in shown, words
    assert "a-key-in-the-file" not in shown


def test_a_file_that_cannot_be_read_is_one_line(fleet: Path) -> None:
    """The same with and without --check."""
    fleet.write_text(FLEET + "[[nodes]]\nnode_id = 'x'\nroles = 'decode'\n")
    for args in (("gateway",), ("decode", "--check")):
        with pytest.raises(ConfigError, match="did you mean 'role'"):
            run(*args, "--config", str(fleet))
