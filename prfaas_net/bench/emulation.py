"""An emulated path: two network namespaces and a userspace link, made for a bench and always taken away again."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath

from prfaas_net.bench.pair import Place
from prfaas_net.bench.plan import Path
from prfaas_net.bench.processes import Child
from prfaas_net.bench.tunlink import DEVICE
from prfaas_net.errors import ConfigError

__all__ = ["SENDER", "emulate", "why_not"]

SPACE = "prfaas-bench-"
SENDER, RECEIVER = "10.203.7.1", "10.203.7.2"
# A queue of one bandwidth-delay product, and never less than what a burst of 64 KiB packets needs.
MIN_QUEUE_BYTES = 1 << 19
# Several paths can stand at once; each has its own namespaces, and the same addresses in them.
_numbers = itertools.count()


def why_not() -> str | None:
    """Why no path can be emulated here, or None."""
    if os.geteuid() != 0:
        return "emulated paths need root (network namespaces and a TUN device)"
    if shutil.which("ip") is None:
        return "emulated paths need the ip command (apt-get install iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "emulated paths need /dev/net/tun"
    return None


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"cannot run ip {' '.join(arguments)}", found=done.stderr.strip())


def _sweep() -> None:
    """Take away what benches that were killed have left: their namespaces carry their process ids."""
    for space in FilePath("/run/netns").glob(f"{SPACE}*"):
        pid = space.name.removeprefix(SPACE).split("-")[0]
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", space.name], check=False)


def _prepare(space: str, buffer_bytes: int | None) -> None:
    _ip("netns", "add", space)
    _ip("-n", space, "link", "set", "lo", "up")
    # Every run begins as if it were the first: the kernel must not remember the last one's window.
    settings = {"tcp_no_metrics_save": "1"}
    if buffer_bytes is not None:
        settings |= {"tcp_wmem": f"4096 65536 {buffer_bytes}", "tcp_rmem": f"4096 131072 {buffer_bytes}"}
    for name, value in settings.items():
        _ip("netns", "exec", space, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


@contextmanager
def emulate(path: Path, *, buffer_bytes: int | None = None, queue_bytes: int | None = None) -> Iterator[Place]:
    """A place whose sender and receiver are at the two ends of the path.

    Args:
        buffer_bytes: maximum of the kernel's TCP buffers there; None leaves what this host has.
        queue_bytes: what may wait at the bottleneck; None is one bandwidth-delay product, if that is enough for bursts.

    Raises:
        ConfigError: this host does not allow it; see :func:`why_not`.
    """
    _sweep()
    number = next(_numbers)
    spaces = [f"{SPACE}{os.getpid()}-{number}-{side}" for side in ("send", "recv")]
    queue_bytes = queue_bytes or max(MIN_QUEUE_BYTES, path.bdp_bytes)
    link: Child | None = None
    try:
        for space in spaces:
            _prepare(space, buffer_bytes)
        link = Child(
            "prfaas_net.bench.tunlink", spaces[0], SENDER, spaces[1], RECEIVER,
            str(path.rate_bps), str(path.rtt_s / 2), str(path.loss), str(queue_bytes),
        )  # fmt: skip
        link.answer(timeout_s=20.0)
        yield Place(
            RECEIVER,
            device=DEVICE,
            receiver_prefix=("ip", "netns", "exec", spaces[1]),
            sender_prefix=("ip", "netns", "exec", spaces[0]),
        )
    finally:
        if link is not None:
            link.close()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
