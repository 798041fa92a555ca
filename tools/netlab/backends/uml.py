"""Real netem where the running kernel has none: a User Mode Linux kernel as a wire between two namespaces.

User Mode Linux is a Linux kernel that runs as a plain process. Its two network devices are TAP devices of this host,
each moved into one end's namespace; inside, everything that comes in by one leaves by the other, through netem. What
the tests run, and its TCP, stay with the host's kernel.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prfaas_net.bench.namespaces import command, owned
from prfaas_net.bench.processes import Child
from prfaas_net.bench.tunlink import DEVICE
from tools.netlab.backends.base import End
from tools.netlab.backends.netem import Disciplined, dress
from tools.netlab.names import PREFIX

__all__ = ["UmlNetem"]

_BOOT_LIMIT_S, _ANSWER_LIMIT_S = 60.0, 20.0


class UmlNetem(Disciplined):
    """Needs Debian's package user-mode-linux, ``/dev/net/tun``, and leave to trace its own children."""

    name = "uml"

    def __init__(self) -> None:
        super().__init__()
        self._child: Child | None = None
        self._directory: Path | None = None

    def start(self, router: str, ends: tuple[End, End]) -> None:
        for number in (0, 1):
            command("ip", "-n", router, "tuntap", "add", "dev", f"port{number}", "mode", "tap", "vnet_hdr")
        self._directory = Path(tempfile.mkdtemp(prefix=owned(PREFIX)))
        # Ahead of what it delays; a real-time priority would starve User Mode Linux's own children.
        prefix = ("ip", "netns", "exec", router, "nice", "-n", "-10")
        self._child = Child("tools.netlab.backends.uml_wire", str(self._directory), prefix=prefix)
        self._child.answer(timeout_s=_BOOT_LIMIT_S)
        self.devices = {"ab": "vec1", "ba": "vec0"}
        for number, end in enumerate(ends):
            command("ip", "-n", router, "link", "set", f"port{number}", "netns", end.space)
            command("ip", "-n", end.space, "link", "set", f"port{number}", "name", DEVICE)
        dress(ends)
        # Only now: a write to a TAP device that is down would stop the one inside.
        self._run("join")

    def _run(self, line: str) -> str:
        assert self._child is not None
        return str(self._child.ask("run", line=line, timeout_s=_ANSWER_LIMIT_S)["output"])

    def _batch(self, lines: list[str]) -> None:
        quoted = " ".join(f"'{line}'" for line in lines)
        self._run(f"printf '%s\\n' {quoted} | tc -batch -")

    def _show(self, device: str) -> str:
        return self._run(f"tc -s -j qdisc show dev {device}")

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
