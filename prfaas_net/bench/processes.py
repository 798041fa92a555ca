"""Child processes that obey JSON lines, for whoever leads a bench."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from prfaas_net.errors import DeadlineError, PeerError, PrfaasError

__all__ = ["Child", "Command", "obey"]

Command = Callable[..., Awaitable[dict[str, Any]]]

SOURCE = str(Path(__file__).parents[2])


class Child:
    """One process, in a session of its own so that Ctrl-C reaches only whoever leads.

    Args:
        module: run as ``python -m module args``.
        prefix: command in front, such as ``ip netns exec NAME``.
        python: another interpreter, with packages that ours lacks.
    """

    def __init__(
        self,
        module: str,
        *args: str,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = " ".join((module, *args[:1]))
        # Debug mode of asyncio would be measured along.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONASYNCIODEBUG"}
        path = os.pathsep.join(filter(None, (SOURCE, environ.get("PYTHONPATH"))))
        # A file: nobody reads a pipe, and a library that talks would fill it and stop.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [*prefix, python, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **(env or {})},
            start_new_session=True,
        )
        self._unread = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *, timeout_s: float = 120.0, **request: Any) -> dict[str, Any]:
        """Have one command done.

        Raises:
            PeerError: the process said that it failed, or ended.
            DeadlineError: it does not answer.
        """
        self.tell(do, **request)
        return self.answer(timeout_s=timeout_s)

    def tell(self, do: str, **request: Any) -> None:
        """Give a command; the answer is fetched with :meth:`answer`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps({"do": do, **request}) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def answer(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """The next line of the process."""
        assert self._process.stdout is not None
        fd, give_up_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], (), (), left_s)[0]:
                raise DeadlineError(f"{self.name} does not answer", found=f"nothing in {timeout_s:g} s")
            more = os.read(fd, 1 << 20)
            if not more:
                raise self._ended()
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = orjson.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name} failed", found=answer["error"])
        return answer

    def _ended(self) -> PeerError:
        self._process.kill()
        self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return PeerError(f"{self.name} ended", found=last[0] if last else f"exit code {self._process.returncode}")

    def close(self) -> None:
        """Close its stdin, on which it ends; kill it if it does not."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass  # it has ended
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()


async def obey(commands: Mapping[str, Command]) -> None:
    """In the child: do what the lines of standard input say, one after the other, until it is closed."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = orjson.loads(line)
        try:
            answer = await commands[request.pop("do")](**request)
        except (PrfaasError, OSError, TypeError) as error:
            answer = {"error": error.line() if isinstance(error, PrfaasError) else repr(error)}
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()
