"""The loop that owns the engine's batch: requests join it when they have landed and leave it when they are done.

All calls into the batch are made by one task, one after the other, in one thread: take leave of those that are
gone, take in those that are new, step all. A request that is given up is waited for until no step uses its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prfaas_net.aio import see_through
from prfaas_net.errors import CancelledByPeer, InternalError, PrfaasError
from prfaas_net.kv import RegionMap
from prfaas_net.nodes.engine_api import DecodeBatch, Engine, Sampling, Stepped

__all__ = ["DecodeLoop", "SequenceStart"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceStart:
    """What :meth:`prfaas_net.nodes.engine_api.DecodeBatch.join` takes."""

    n_tokens: int
    first_token: int
    sampling: Sampling
    regions: RegionMap
    buffer: Any
    prompt_tokens: Collection[int]


class _Member:
    """A request in the loop's hands."""

    def __init__(self, start: SequenceStart) -> None:
        self.start = start
        self.steps: asyncio.Queue[Stepped | PrfaasError] = asyncio.Queue()
        # Set once the batch does not know of it (any more).
        self.out = asyncio.Event()
        self.leaving = False
        self.key: int | None = None

    def end(self, error: PrfaasError | None = None) -> None:
        if error is not None:
            self.steps.put_nowait(error)
        self.out.set()

    async def __aiter__(self) -> AsyncIterator[Stepped]:
        """The tokens until the last one.

        Raises:
            PrfaasError: the sequence, or the engine, failed.
        """
        reason = None
        while reason is None:
            step = await self.steps.get()
            if isinstance(step, PrfaasError):
                raise step
            yield step
            reason = step.finish_reason


class DecodeLoop:
    """Steps all running requests together.

    Args:
        on_step: told how many sequences a step had, and how long it took.
    """

    def __init__(self, engine: Engine, on_step: Callable[[int, float], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._joining: list[_Member] = []
        self._running: dict[int, _Member] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop's task."""
        self._task = asyncio.create_task(self._run(), name="decode loop")

    async def close(self) -> None:
        """Stop after the step that runs; whoever is still in the batch is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for member in (*self._joining, *self._running.values()):
            member.end(CancelledByPeer("the node is stopping"))
        await asyncio.to_thread(self._pool.shutdown)

    @contextlib.asynccontextmanager
    async def run(self, start: SequenceStart) -> AsyncIterator[_Member]:
        """Decode a sequence: the value iterates over its steps. On leaving, no step uses its buffer any more."""
        member = _Member(start)
        self._joining.append(member)
        self._wake.set()
        try:
            yield member
        finally:
            member.leaving = True
            self._wake.set()
            await see_through(member.out.wait())

    # -- the owner ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        batch = self._engine.batch()
        loop = asyncio.get_running_loop()
        while True:
            self._drop_unborn()
            if not self._running and not self._joining:
                self._wake.clear()
                await self._wake.wait()
                continue
            joining, self._joining = self._joining, []
            leaving = [member for member in self._running.values() if member.leaving]
            turn = loop.run_in_executor(self._pool, self._turn, batch, leaving, joining)
            try:
                # A step that runs is waited for even when the node stops: it writes into reservations.
                await see_through(turn)
                steps, errors, seconds = turn.result()
            except Exception as error:
                log.exception("a decode step failed")
                self._fail(joining, InternalError("a decode step failed", found=repr(error)))
                batch = self._engine.batch()
                continue
            self._settle(leaving, joining, errors, steps)
            if steps:
                self._on_step(len(steps), seconds)

    def _drop_unborn(self) -> None:
        """Requests that were given up before they joined."""
        for member in [member for member in self._joining if member.leaving]:
            self._joining.remove(member)
            member.end()

    @staticmethod
    def _turn(
        batch: DecodeBatch, leaving: Sequence[_Member], joining: Sequence[_Member]
    ) -> tuple[Sequence[Stepped], dict[_Member, PrfaasError], float]:
        """In the engine's thread. Returns the steps, which joins failed, and the time of the step."""
        for member in leaving:
            assert member.key is not None
            batch.leave(member.key)
        errors: dict[_Member, PrfaasError] = {}
        for member in joining:
            start = member.start
            try:
                member.key = batch.join(
                    start.n_tokens, start.first_token, start.sampling, start.regions, start.buffer, start.prompt_tokens
                )
            except PrfaasError as error:
                errors[member] = error
        started = time.monotonic()
        return batch.step(), errors, time.monotonic() - started

    def _settle(
        self,
        leaving: Sequence[_Member],
        joining: Sequence[_Member],
        errors: dict[_Member, PrfaasError],
        steps: Sequence[Stepped],
    ) -> None:
        """Tell every request what the turn meant for it."""
        for member in leaving:
            assert member.key is not None
            del self._running[member.key]
            member.end()
        for member in joining:
            if member in errors:
                member.end(errors[member])
            else:
                assert member.key is not None
                self._running[member.key] = member
        for step in steps:
            member = self._running[step.key]
            member.steps.put_nowait(step if step.error is None else step.error)
            if step.error is not None or step.finish_reason is not None:
                del self._running[step.key]
                member.end()

    def _fail(self, joining: Sequence[_Member], error: PrfaasError) -> None:
        """The batch cannot be trusted any more: everybody in it is told."""
        for member in (*joining, *self._running.values()):
            member.end(error)
        self._running.clear()
