"""The process that runs User Mode Linux and speaks with its console. JSON lines in, JSON lines out.

Run in the namespace of the TAP devices as ``python -m tools.netlab.backends.uml_wire DIRECTORY``. It says
``{"ready": true}`` once the kernel has booted, then obeys ``{"do": "run", "line": "..."}`` until its stdin is closed.
A process of its own, for the timer that it is: see :func:`_nudge`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson

__all__ = ["UML", "Wire"]

UML = "linux.uml"
_INIT = Path(__file__).with_name("uml_init.sh")
_MEMORY = "512M"
# Transport by TAP; gro=1 for buffers that hold super-packets, or they would be cut short.
_VECTOR = "transport=tap,ifname=port{0},depth=128,gro=1"
_BOOT_LIMIT_S, _ANSWER_LIMIT_S, _END_LIMIT_S = 50.0, 15.0, 2.0
_NUDGE_S = 0.002
_PR_SET_TIMERSLACK = 29
_SAID = 40


class Wire:
    """A running User Mode Linux."""

    def __init__(self, directory: Path) -> None:
        vectors = [f"vec{number}:{_VECTOR.format(number)}" for number in (0, 1)]
        arguments = [
            UML, f"mem={_MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet",
            "ipv6.disable=1", f"init={_INIT}", *vectors, "con=null", "con0=fd:0,fd:1", "ssl=null",
            f"uml_dir={directory}/",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={**os.environ, "TMPDIR": str(directory)},
            start_new_session=True,
        )
        self._unread = b""
        self._said: list[str] = []
        self._stop = threading.Event()
        self._nudging = threading.Thread(target=self._nudge, daemon=True)

    def boot(self) -> None:
        """Until its first process says so.

        Raises:
            OSError: it did not come up, with its last words.
        """
        self._until("READY", _BOOT_LIMIT_S)
        missing = [line for line in self._said if line.startswith("no module")]
        if missing:
            raise OSError("; ".join(missing))
        self._nudging.start()

    def _nudge(self) -> None:
        """The host's tun driver signals that a packet is there a moment before it can be read; User Mode Linux then
        looks too early, and sleeps on the packet until the next one comes. A signal every 2 ms bounds that."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while not self._stop.wait(_NUDGE_S):
            self._process.send_signal(signal.SIGIO)

    def _until(self, word: str, limit_s: float) -> list[str]:
        assert self._process.stdout is not None
        fd, give_up_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        lines: list[str] = []
        while True:
            while b"\n" in self._unread:
                raw, self._unread = self._unread.split(b"\n", 1)
                lines.append(raw.decode(errors="replace").strip())
                self._said = [*self._said, lines[-1]][-_SAID:]
                if lines[-1].startswith(word):
                    return lines
            more = b""
            if select.select([fd], (), (), max(0.0, give_up_s - time.monotonic()))[0]:
                more = os.read(fd, 1 << 16)
            if not more:
                raise OSError(f"{UML} said no {word} in {limit_s:g} s; its last words: " + " | ".join(self._said))
            self._unread += more

    def run(self, line: str) -> str:
        """One command inside; what it printed.

        Raises:
            OSError: it failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        # The console echoes what is typed.
        *printed, result = [said for said in self._until("RC=", _ANSWER_LIMIT_S) if said != line]
        if result != "RC=0":
            raise OSError(f"{line!r} inside {UML}: {result} {' '.join(printed)}")
        return "\n".join(printed)

    def close(self) -> None:
        """SIGTERM, on which it ends its own children; SIGKILL for all of them if it does not."""
        self._stop.set()
        if self._nudging.is_alive():
            self._nudging.join()
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # then the hard way
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left
        self._process.wait()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
    sys.stdout.buffer.flush()


def _main(directory: str) -> None:
    wire = Wire(Path(directory))
    try:
        wire.boot()
        _say({"ready": True})
        for line in sys.stdin.buffer:
            request = orjson.loads(line)
            try:
                _say({"output": wire.run(request["line"])})
            except OSError as error:
                _say({"error": str(error)})
    except OSError as error:
        _say({"error": str(error)})
    finally:
        wire.close()


if __name__ == "__main__":
    _main(sys.argv[1])
