"""What stands in front of nodes, started as processes of their own: our gateway, and routers that are installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prfaas_net.bench.instant_node import MODEL
from prfaas_net.bench.processes import Child
from prfaas_net.errors import DeadlineError, PeerError

__all__ = ["FrontEnd", "engine_gateway", "gateway", "pinned", "router_version", "vllm_router"]

START_S = 60.0
HTTP_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class FrontEnd:
    """One that is running.

    Attributes:
        port: where it takes requests, on the loopback address.
        pid: for its CPU time; None for the node itself.
    """

    name: str
    port: int
    pid: int | None = None


def pinned(cores: Sequence[int] | None) -> list[str]:
    """Command in front of another that keeps it on these cores."""
    return ["taskset", "-c", ",".join(map(str, cores))] if cores else []


@contextmanager
def gateway(node_ports: Sequence[int], cores: Sequence[int] | None) -> Iterator[FrontEnd]:
    """Our gateway before nodes of our protocol."""
    nodes = [part for port in node_ports for part in ("--node", f"http://127.0.0.1:{port}")]
    with _gateway("prfaas", nodes, cores) as front_end:
        yield front_end


@contextmanager
def engine_gateway(worker_port: int, cores: Sequence[int] | None) -> Iterator[FrontEnd]:
    """Our gateway before an engine's OpenAI API, as a vLLM server that serves requests end to end."""
    node = f'[[nodes]]\nurl = "http://127.0.0.1:{worker_port}"\nkind = "vllm"\nrole = "both"\ncluster = "pd"\n'
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(node)
        file.flush()
        with _gateway("prfaas, vllm", ["--config", file.name], cores) as front_end:
            yield front_end


@contextmanager
def _gateway(name: str, flags: Sequence[str], cores: Sequence[int] | None) -> Iterator[FrontEnd]:
    command = ["gateway", "--listen", "127.0.0.1:0", "--served-model-name", MODEL, *flags]
    # The daemons read it, and end when that process does.
    environ = {"PRFAAS_PARENT_PID": str(os.getpid())}
    with Child("prfaas_net.cli", *command, prefix=pinned(cores), env=environ) as child:
        try:
            port = int(child.answer(timeout_s=START_S)["address"][1])
            _await_ready(port, "/ready")
            yield FrontEnd(name, port, child.pid)
        finally:
            try:
                os.kill(child.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass  # it has ended


def router_version(python: str) -> str | None:
    """The version of vllm-router that this interpreter has, if any."""
    asks = "from importlib.metadata import version; import vllm_router; print(version('vllm-router'))"
    try:
        asked = subprocess.run([python, "-c", asks], capture_output=True, text=True, check=False, timeout=START_S)
    except OSError:
        return None  # there is no such interpreter
    return asked.stdout.strip() if asked.returncode == 0 else None


@contextmanager
def vllm_router(python: str, worker_port: int, cores: Sequence[int] | None) -> Iterator[FrontEnd]:
    """vllm-router before an engine's OpenAI API, with what it has as its defaults."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as also_free:
        port, metrics_port = free.getsockname()[1], also_free.getsockname()[1]
    command = [
        *pinned(cores), python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics_port), "--worker-urls", f"http://127.0.0.1:{worker_port}",
        "--log-level", "warning",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            _await_ready(port, "/readiness", process)
            yield FrontEnd("vllm-router", port, process.pid)
        except DeadlineError as error:
            said.seek(0)
            raise PeerError("vllm-router did not start", found=said.read()[-500:].decode(errors="replace")) from error
        finally:
            process.terminate()
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(port: int, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and (process is None or process.poll() is None):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HTTP_TIMEOUT_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise DeadlineError(f"port {port} does not get ready", found=f"not in {START_S:g} s, or it ended")
