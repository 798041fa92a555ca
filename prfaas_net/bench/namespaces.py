"""Network namespaces for emulated paths: made, entered, and always taken away again, also those of a killed process."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prfaas_net.errors import ConfigError

__all__ = ["command", "inside", "make_space", "owned", "remove_space", "sweep", "why_not", "write_settings"]

SPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
# Between SIGTERM and SIGKILL for what still runs in a namespace that goes.
_GRACE_S = 0.3
_COMMAND_LIMIT_S = 30.0


def why_not(*, tun: bool = True) -> str | None:
    """Why no path can be emulated here, or None.

    Args:
        tun: whether it takes a TUN device.
    """
    if os.geteuid() != 0:
        return "emulated paths need root (network namespaces and a TUN device)"
    if shutil.which("ip") is None:
        return "emulated paths need the ip command (apt-get install iproute2)"
    if tun and not os.path.exists("/dev/net/tun"):
        return "emulated paths need /dev/net/tun"
    return None


def command(*arguments: str, stdin: str | None = None) -> str:
    """Run a command such as ``ip`` or ``tc`` to its end; what it printed.

    Raises:
        ConfigError: it failed, with its own words.
    """
    done = subprocess.run(arguments, input=stdin, capture_output=True, text=True, check=False, timeout=_COMMAND_LIMIT_S)
    if done.returncode:
        raise ConfigError(f"cannot run {' '.join(arguments)}", found=done.stderr.strip() or done.stdout.strip())
    return done.stdout


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot: with its id, what no other process ever has. None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # proc(5): field 22, counted after the command's name, which may have spaces in it.
    return text.rpartition(")")[2].split()[19]


def owned(prefix: str) -> str:
    """A name that says which process it belongs to, for :func:`sweep`; followed by what the process likes."""
    return f"{prefix}{os.getpid()}-s{_started(os.getpid())}-"


def _is_orphan(name: str, prefix: str) -> bool:
    owner = re.match(r"(\d+)-s(\d+)-", name.removeprefix(prefix))
    return owner is not None and _started(int(owner[1])) != owner[2]


def sweep(prefix: str, *directories: Path) -> list[str]:
    """Take away what processes that were killed have left under names of :func:`owned`.

    Args:
        directories: where to look for directories with such names as well.

    Returns:
        the names of what was taken away.
    """
    gone = []
    for space in SPACES.glob(f"{prefix}*"):
        if _is_orphan(space.name, prefix):
            remove_space(space.name)
            gone.append(space.name)
    for directory in directories:
        for path in directory.glob(f"{prefix}*"):
            if _is_orphan(path.name, prefix):
                shutil.rmtree(path, ignore_errors=True)
                gone.append(str(path))
    return gone


def make_space(name: str, settings: Mapping[str, str]) -> None:
    """A namespace with its loopback up.

    Args:
        settings: files under ``/proc/sys/net/ipv4`` and what to write into them.
    """
    command("ip", "netns", "add", name)
    command("ip", "-n", name, "link", "set", "lo", "up")
    write_settings(name, settings)


def write_settings(name: str, settings: Mapping[str, str]) -> None:
    """Files under ``/proc/sys/net/ipv4`` of a namespace."""
    with inside(name):
        for file, value in settings.items():
            Path("/proc/sys/net/ipv4", file).write_text(value, encoding="ascii")


def _inhabitants(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [pid for pid in map(int, done.stdout.split()) if pid != os.getpid()]


def remove_space(name: str) -> None:
    """End whatever runs in a namespace of ours, then take it away; nothing happens if it is not there."""
    if not (SPACES / name).exists():
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        inhabitants = _inhabitants(name)
        for pid in inhabitants:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        give_up_s = time.monotonic() + _GRACE_S
        while inhabitants and time.monotonic() < give_up_s:
            inhabitants = _inhabitants(name)
            time.sleep(0.01)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def inside(name: str) -> Iterator[None]:
    """The calling thread is in the namespace; a socket made here belongs to it for life."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(SPACES / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(there)
    finally:
        os.close(home)
