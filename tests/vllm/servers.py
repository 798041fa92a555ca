"""vLLM servers as processes: a prefill server and a decode server of one model, and what one asks of them."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prfaas_net.localfleet.processes import Process
from prfaas_net.transport.relay import Relay, Shape

__all__ = ["PYTHON", "Answer", "Client", "Pair", "Server", "free_port", "gateway"]

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
# Half a minute on two idle cores; several times that when they are shared.
READY_S = 480.0
STOP_S = 10.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Server:
    """One vLLM server; ``stop`` ends it and all that it started, whatever state it is in."""

    name: str
    port: int
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str, model: Path, log: Path, transfer: dict[str, Any], arguments: list[str]) -> Server:
        port = free_port()
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024",
            "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--kv-transfer-config", json.dumps(transfer),
            *arguments,
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, **ENVIRONMENT}, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        return cls(name, port, log, process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def wait_ready(self) -> None:
        """Until it answers.

        Raises:
            AssertionError: it ended, or was not ready in time; with the end of its log.
        """
        give_up = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.last_words()}"
            assert time.monotonic() < give_up, f"{self.name} is not ready:\n{self.last_words()}"
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        """As a machine that loses its power."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # gone already
        self.process.wait(STOP_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass  # it is killed below
        self.kill()


@dataclass
class Answer:
    """What a server said.

    Attributes:
        status: of HTTP.
        tokens: that were generated.
    """

    status: int
    body: dict[str, Any] = field(repr=False)

    @property
    def tokens(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.body.get("kv_transfer_params") or {})


@dataclass
class Pair:
    """A prefill server, a decode server, and the addresses at which a path between them can be laid.

    Attributes:
        control, kv: where each connector listens, and where the other side is told to dial instead.
    """

    model: str
    directory: Path
    prefill: Server
    decode: Server
    control: tuple[int, int]
    kv: tuple[int, int]

    @classmethod
    def start(cls, model: str, directory: Path, logs: Path, arguments: list[str], prefill: list[str]) -> Pair:
        """Both at once: that is what costs the time.

        Args:
            arguments: for both; ``prefill``: for the prefill server alone.
        """
        control, kv = (free_port(), free_port()), (free_port(), free_port())
        common = {"kv_connector": "PrfaasConnector", "kv_connector_module_path": "prfaas_net.connectors.vllm"}
        # Generous, for machines that have other things to do; what is to fail here fails by itself.
        patience = {"connect_timeout": "60s", "connections": 2}
        here, there = "127.0.0.1", {"deadline": "60s", "pairing": "30s", "chunk_tokens": 128, "kv": patience}
        first = Server.start(
            "prefill", directory, logs / f"{model}-prefill.log",
            common | {
                "kv_role": "kv_producer",
                "kv_connector_extra_config": there | {
                    "listen": f"{here}:{control[0]}", "advertise": f"{here}:{control[1]}",
                },
            },
            [*arguments, *prefill],
        )  # fmt: skip
        try:
            second = Server.start(
                "decode", directory, logs / f"{model}-decode.log",
                common | {
                    "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": there | {
                        "kv": patience | {"listen": f"{here}:{kv[0]}", "advertise": {"*": f"{here}:{kv[1]}"}},
                    },
                },
                arguments,
            )  # fmt: skip
        except BaseException:
            first.kill()
            raise
        return cls(model, directory, first, second, control, kv)

    def wait_ready(self) -> None:
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    @asynccontextmanager
    async def path(self, rate_bps: int | None = None, rtt_s: float = 0.0) -> AsyncIterator[Relay]:
        """A path between the sites for as long as the block lasts; yields the relay that KVCache crosses."""
        shape = Shape(rate_bps, rtt_s / 2, 64 << 10)
        relays = [Relay(("127.0.0.1", there), shape, shape) for there, _ in (self.kv, self.control)]
        try:
            for relay, (_, port) in zip(relays, (self.kv, self.control), strict=True):
                await relay.start("127.0.0.1", port)
            yield relays[0]
        finally:
            await asyncio.gather(*(relay.close() for relay in relays))


class Client:
    """Asks servers; one a test."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Client]:
        # vLLM closes connections that were idle for 5 s, perhaps in the moment in which one is used again.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            yield cls(session)

    async def ask(
        self,
        server: Server | str,
        prompt: list[int],
        n_tokens: int,
        params: dict[str, Any] | None = None,
        *,
        salt: str = "",
    ) -> Answer:
        """One completion, greedy.

        Args:
            server: or the URL of a gateway.
            salt: prompts with different salts share no cached blocks; empty: what was cached counts.
        """
        body: dict[str, Any] = {
            "model": "tiny", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        body |= {"kv_transfer_params": params} if params else {}
        body |= {"cache_salt": salt} if salt else {}
        url = server if isinstance(server, str) else server.url
        async with self._session.post(f"{url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
            return Answer(response.status, answer)

    async def alone(self, server: Server, prompt: list[int], n_tokens: int) -> list[int]:
        """What the server answers by itself, with nothing cached."""
        return (await self.ask(server, prompt, n_tokens, salt=uuid.uuid4().hex)).tokens

    async def prefill(self, pair: Pair, prompt: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The prefill server's half of the two-step protocol; what the decode server is to be given."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
        return (await self.ask(pair.prefill, prompt, 1, asked | (params or {}))).params

    async def two_step(self, pair: Pair, prompt: list[int], n_tokens: int, *, salt: str | None = None) -> Answer:
        """As vllm-router does it: the prefill's answer goes to the decode server."""
        params = await self.prefill(pair, prompt)
        return await self.ask(pair.decode, prompt, n_tokens, params, salt=uuid.uuid4().hex if salt is None else salt)

    async def at_once(self, pair: Pair, prompt: list[int], n_tokens: int) -> Answer:
        """As the gateway does it: both servers are asked in the same moment, under one name."""
        shared = {"transfer_id": str(uuid.uuid4()), "transfer_deadline_s": 60}
        there = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": pair.control[1]}
        decoding = self.ask(pair.decode, prompt, n_tokens, there | shared, salt=uuid.uuid4().hex)
        prefilling = asyncio.create_task(self.prefill(pair, prompt, shared))
        try:
            return await decoding
        finally:
            await prefilling

    async def metrics(self, server: Server) -> dict[str, float]:
        """Every sample of a server's ``/metrics``, summed over its labels."""
        async with self._session.get(f"{server.url}/metrics") as response:
            text = await response.text()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found


@asynccontextmanager
async def gateway(pair: Pair) -> AsyncIterator[str]:
    """A gateway in front of both for as long as the block lasts; yields its URL."""
    config = pair.directory.parent / f"{pair.model}-gateway.toml"
    config.write_text(
        f"""threshold_tokens = 64
[[nodes]]
url = "{pair.prefill.url}"
kind = "vllm"
role = "prefill"
cluster = "prfaas"
connector = "127.0.0.1:{pair.control[1]}"
[[nodes]]
url = "{pair.decode.url}"
kind = "vllm"
role = "decode"
cluster = "pd"
"""
    )
    command = ["gateway", "--config", str(config), "--model", str(pair.directory)]
    command += ["--served-model-name", "tiny", "--listen", "127.0.0.1:0"]
    process = await Process.start("gateway", command)
    try:
        host, port = process.ready["address"]
        yield f"http://{host}:{port}"
    finally:
        await process.stop()
