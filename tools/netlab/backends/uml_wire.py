"""The process that runs User Mode Linux and speaks with its console. JSON lines in, JSON lines out.

Run in the namespace of the TAP devices as ``python -m tools.netlab.backends.uml_wire DIRECTORY``. It says
``{"ready": true}`` once the kernel has booted, then obeys ``{"do": "run", "line": "..."}`` until its stdin is closed.
A process of its own, for the timer that it is: see :func:`_nudge`.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
# A busy console answers within milliseconds; one that has not for this long is asked again.
_WAKE_S = 0.25
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
        self._number = 0
        self._stop = threading.Event()
        self._nudging = threading.Thread(target=self._nudge, daemon=True)

    def boot(self) -> None:
        """Until its first process says so.

        Raises:
            OSError: it did not come up, with its last words.
        """
        try:
            for line in self._lines(_BOOT_LIMIT_S):
                if line.startswith("no module"):
                    raise OSError(line)
                if line.startswith("READY"):
                    break
        except OSError as error:
            raise OSError(f"{UML} did not boot: {error}; its last words: {' | '.join(self._said)}") from error
        self._nudging.start()

    def _nudge(self) -> None:
        """The host's tun driver signals that a packet is there a moment before it can be read; User Mode Linux then
        looks too early, and sleeps on the packet until the next one comes. A signal every 2 ms bounds that."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while not self._stop.wait(_NUDGE_S):
            self._process.send_signal(signal.SIGIO)

    def _lines(self, limit_s: float, wake_s: float = math.inf) -> Iterator[str]:
        """What the console says, line by line.

        Args:
            wake_s: after so long without a word, press return, as one would: it happens that User Mode Linux does not
                notice a line before the next one comes.
        """
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        fd, give_up_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while True:
            while b"\n" in self._unread:
                raw, self._unread = self._unread.split(b"\n", 1)
                line = raw.decode(errors="replace").strip()
                self._said = [*self._said, line][-_SAID:]
                yield line
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise OSError(f"no answer in {limit_s:g} s")
            if not select.select([fd], (), (), min(left_s, wake_s))[0]:
                if wake_s < math.inf:
                    self._process.stdin.write(b"\n")
                continue
            more = os.read(fd, 1 << 16)
            if not more:
                raise OSError(f"{UML} has ended")
            self._unread += more

    def run(self, line: str) -> str:
        """One command inside; what it printed.

        Raises:
            OSError: it failed, or there was no answer; a late one is not taken for that of the next command.
        """
        assert self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(f"{self._number} {line}\n".encode())
        printed: list[str] = []
        for said in self._lines(_ANSWER_LIMIT_S, _WAKE_S):
            if not said.startswith("RC "):
                printed.append(said)
                continue
            _, number, status = said.split()
            if number == str(self._number):
                if status != "0":
                    raise OSError(f"{line!r} inside {UML}: status {status}, {' '.join(printed)}")
                return "\n".join(printed)
            printed.clear()  # of a command that was given up
        raise OSError(f"{UML} has ended")

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
