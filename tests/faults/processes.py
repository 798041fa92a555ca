"""Child processes of a test: started, read line by line, always ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

__all__ = ["Child", "child"]

ROOT = Path(__file__).parent.parent.parent


class Child:
    """A running script."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self, *, within_s: float = 10.0) -> str:
        """The next line of its standard output; empty when it has ended."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            return (await self._process.stdout.readline()).decode().strip()

    def pause(self) -> None:
        """SIGSTOP: its kernel goes on acknowledging, it does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """SIGKILL, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def child(script: str, spec: dict[str, Any]) -> AsyncIterator[Child]:
    """A script of this directory with its description, for the time of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"tests.faults.{script}",
        json.dumps(spec),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONASYNCIODEBUG": ""},
    )
    running = Child(process)
    try:
        yield running
    finally:
        await running.kill()
