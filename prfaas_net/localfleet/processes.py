"""Processes that are started, watched and always ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from prfaas_net.errors import ConfigError, DeadlineError, PrfaasError

__all__ = ["PARENT_VARIABLE", "Process", "stop_all"]

# Read by the daemons: they end when the process with this id does, however it ends.
PARENT_VARIABLE = "PRFAAS_PARENT_PID"
# Where ip-netns(8) keeps named network namespaces.
NAMESPACES = Path("/run/netns")
# SIGINT (SIGTERM would let requests finish), then SIGKILL after this; together with closing, an interrupted fleet is
# gone within 2 s.
STOP_GRACE_S = 1.2
# Of what a process writes to standard error.
KEPT_LINES = 1000


def _entering(netns: str | None) -> tuple[str, ...]:
    """What to put in front of a command."""
    if netns is None:
        return ()
    if not (NAMESPACES / netns).exists():
        raise ConfigError(
            "no such network namespace",
            expected="a name that ip netns list shows",
            found=repr(netns),
            do=f"create it: ip netns add {netns}",
        )
    return ("ip", "netns", "exec", netns)


class Process:
    """One ``prfaas`` command running as a process of its own.

    Its standard output must begin with a ready line (see ``prfaas_net.cli.daemon``); what it writes to standard
    error is kept for the message if it fails.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._process = process
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        netns: str | None = None,
        environ: Mapping[str, str] | None = None,
        ready_within_s: float = 60.0,
    ) -> Process:
        """Start ``prfaas <command>`` and wait until it serves.

        Args:
            netns: the network namespace to start it in (root); None: this process's own.
            environ: variables beside those of this process.

        Raises:
            ConfigError: there is no such namespace, or the process ended instead, with its own last words.
            DeadlineError: it did not get ready in time; it has been ended.
        """
        spawned = await asyncio.create_subprocess_exec(
            *_entering(netns), sys.executable, "-m", "prfaas_net.cli", *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C reaches the supervisor alone, which then ends the others in order.
            start_new_session=True,
            env={**os.environ, **(environ or {}), PARENT_VARIABLE: str(os.getpid())},
        )  # fmt: skip
        process = cls(name, spawned)
        try:
            await process._await_ready(ready_within_s)
        except BaseException:
            await process.stop()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    @property
    def last_lines(self) -> list[str]:
        """The end of what it has written to standard error; after :meth:`stop`, up to its very last word."""
        return list(self._tail)

    async def wait(self) -> int:
        """Until it ends."""
        return await self._process.wait()

    def ended_error(self) -> PrfaasError:
        """What to say of a process that ended by itself."""
        last = self._tail[-1].removeprefix("prfaas: ") if self._tail else "it said nothing"
        return ConfigError(f"{self.name} ended with exit code {self.returncode}: {last}")

    async def stop(self) -> None:
        """End it; never leaves it running."""
        if self.returncode is None:
            self._signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)

    def kill(self) -> None:
        """End it without a chance to say goodbye, as a power cut would."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to finish what it holds and to leave."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            pass  # it has just ended by itself

    async def _await_ready(self, within_s: float) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} was not ready after {within_s:g} s", found=" ".join(self.last_lines[-20:])
            ) from error
        if not line:
            await self._process.wait()
            await asyncio.gather(self._reading, return_exceptions=True)
            raise self.ended_error()
        self.ready = orjson.loads(line)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._tail.append(line.decode(errors="replace").rstrip())


async def stop_all(processes: Sequence[Process]) -> None:
    """End all of them at once."""
    await asyncio.gather(*(process.stop() for process in processes))
