"""The command line: what a user types wrongly gets one line, what is started is ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PRFAAS = [sys.executable, "-m", "prfaas_net.cli"]
MODEL = Path(__file__).parents[2] / "prfaas_net" / "data" / "demo_model"


def prfaas(*args: str, within_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    command = [*PRFAAS, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=users_environ(), check=False)


def users_environ() -> dict[str, str]:
    """Ours, without our settings and without asyncio's debug mode, which writes of its own to stderr."""
    ours = ("PRFAAS", "PYTHONASYNCIODEBUG")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def broken_model(tmp_path: Path, config: str) -> Path:
    (tmp_path / "config.json").write_text(config)
    return tmp_path


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """What the user sees: exactly one line, no traceback, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("prfaas: ")
    return lines[0]


def test_help_and_version() -> None:
    """The commands are listed; the version is the package's."""
    shown = prfaas("--help")
    assert shown.returncode == 0
    assert all(re.search(rf"\b{name}\b", shown.stdout) for name in ("up", "prefill", "decode", "gateway", "relay"))
    assert prfaas("version").stdout.startswith("prfaas-net ")


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    """Names the directory or the missing file."""
    for command in ("prefill", "decode", "up"):
        assert str(tmp_path) in one_line(prfaas(command, "--model", str(tmp_path)))


def test_an_unsupported_model_type(tmp_path: Path) -> None:
    """Names the type that was found and those that are known."""
    line = one_line(prfaas("prefill", "--model", str(broken_model(tmp_path, '{"model_type": "mamba9"}'))))
    assert "mamba9" in line
    assert "kimi_linear" in line


def test_a_port_in_use(taken_port: int) -> None:
    """Names the port and what to do, for every command that listens."""
    address = f"127.0.0.1:{taken_port}"
    for args in (
        ("prefill", "--listen", address),
        ("decode", "--listen", address),
        ("decode", "--kv-listen", address),
        ("gateway", "--node", "http://127.0.0.1:1", "--listen", address),
        ("relay", "--target", "127.0.0.1:1", "--listen", address),
    ):
        line = one_line(prfaas(*args))
        assert str(taken_port) in line
        assert "port" in line or "cannot listen" in line


def test_up_with_its_port_in_use_ends_everything(taken_port: int) -> None:
    """One line that names the port; no process stays."""
    result = prfaas("up", "--port", str(taken_port), within_s=60)
    assert str(taken_port) in one_line(result)
    assert not children_of_this_test()


def test_a_bad_configuration_file(tmp_path: Path) -> None:
    """Unknown keys suggest the nearest name."""
    file = tmp_path / "node.toml"
    file.write_text("[kv]\narenas = '1GiB'\n")
    assert "did you mean 'arena'?" in one_line(prfaas("decode", "--config", str(file)))


def test_an_open_address_without_a_key() -> None:
    """Refused with what to set."""
    assert "without authentication" in one_line(prfaas("decode", "--listen", "0.0.0.0:0"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_daemon_says_when_it_is_ready_and_ends_when_told(number: signal.Signals) -> None:
    """One JSON line, then silence; SIGINT and SIGTERM end it with 0."""
    command = [*PRFAAS, "decode"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=users_environ()
    ) as daemon:
        assert daemon.stdout is not None
        ready = json.loads(daemon.stdout.readline())
        assert ready["ready"] is True
        assert ready["kv_address"][1] > 0
        daemon.send_signal(number)
        assert daemon.wait(5) == 0
        assert daemon.stderr is not None
        assert daemon.stderr.read() == ""


def children_of_this_test() -> list[int]:
    """Processes that run our commands and were started by this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
            environ = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "prfaas_net.cli" in command and f"PYTEST_OF={os.getpid()}\0" in environ:
            found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a test starts carries this process's id, so that only its own are looked for."""
    monkeypatch.setenv("PYTEST_OF", str(os.getpid()))


def wait_for_no_children(within_s: float) -> float:
    started = time.monotonic()
    while children_of_this_test():
        assert time.monotonic() - started < within_s, children_of_this_test()
        time.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_up_ends_all_five_within_two_seconds(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM, and even kill -9 leave no process."""
    args = ["up", "--port", "0", "--output", str(tmp_path / "demo.json"), "--max-tokens", "2"]
    with subprocess.Popen([*PRFAAS, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        for line in up.stdout:
            if line.startswith("  gateway"):
                break
        assert len(children_of_this_test()) == 6
        up.send_signal(number)
        started = time.monotonic()
        up.wait(5)
        wait_for_no_children(2.0)
        assert time.monotonic() - started < 2.0
