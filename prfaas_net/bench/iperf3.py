"""The reference: iperf3 with as many streams, in the same minute.

It sends one hot buffer and throws away what it receives, so it is a favourable reference: an upper limit. ``-l 1M``,
since its default of 128K is slower than the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

import orjson

from prfaas_net.bench.figures import Sample
from prfaas_net.errors import PeerError
from prfaas_net.units import GiB

__all__ = ["available", "measure"]


def available() -> bool:
    """Whether iperf3 is installed."""
    return shutil.which("iperf3") is not None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        port: int = sock.getsockname()[1]
        return port


def _start(command: Sequence[str], stdout: int) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for whoever leads."""
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process; its user and system time."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def measure(
    *,
    connections: int,
    total_bytes: int = 0,
    steady_s: float = 0.0,
    host: str = "127.0.0.1",
    server_prefix: Sequence[str] = (),
    client_prefix: Sequence[str] = (),
    congestion_control: str | None = None,
    limit_s: float = 60.0,
) -> Sample:
    """One run.

    Args:
        total_bytes: of all streams; or instead
        steady_s: for so long, after two seconds that do not count.

    Raises:
        PeerError: it did not work.
    """
    port = str(_free_port())
    server_command = ["iperf3", "-s", "-1", "-B", host, "-p", port, "--idle-timeout", "20"]
    size = ["-t", str(max(1, round(steady_s))), "-O", "2"] if steady_s else ["-n", str(total_bytes // connections)]
    client_command = ["iperf3", "-c", host, "-p", port, "-P", str(connections), *size, "-l", "1M", "-J"]
    if congestion_control:
        client_command += ["-C", congestion_control]
    server = _start([*server_prefix, *server_command], subprocess.DEVNULL)
    client: subprocess.Popen[bytes] | None = None
    try:
        time.sleep(0.2)
        client = _start(["timeout", str(limit_s), *client_prefix, *client_command], subprocess.PIPE)
        assert client.stdout is not None
        report = orjson.loads(client.stdout.read() or b"{}")
        client.stdout.close()
        client_s = _cpu_s(client)
        if "sum_received" not in report.get("end", {}):
            raise PeerError("iperf3 failed", found=report.get("error", f"no result in {limit_s:g} s"))
        received, sent = report["end"]["sum_received"], report["end"]["sum_sent"]
        gib = sent["bytes"] / GiB
        return Sample(received["bits_per_second"], client_s / gib, _cpu_s(server) / gib)
    finally:
        for process in (client, server):
            if process is not None and process.returncode is None:
                process.kill()
                process.wait()
