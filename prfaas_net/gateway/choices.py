"""Several choices of one answer (``n``), each a run of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prfaas_net.gateway.intake import Job

__all__ = ["Choices"]

_Result = TypeVar("_Result")


class Choices:
    """Runs the jobs of one request, together, all or none.

    The first begins alone. The others follow with its first token: by then a prefill node that keeps a cache has the
    prompt in it, and each of them costs an incremental prefill instead of a whole one.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._begun = asyncio.Event()

    def began(self) -> None:
        """The first job has its first token."""
        self._begun.set()

    async def run(self, one: Callable[[Job], Awaitable[_Result]]) -> list[_Result]:
        """The results of ``one`` for every job, in their order. Each run bounds itself by its request's deadline.

        Raises:
            PrfaasError: one of them failed, and the others were ended.
        """
        if len(self._jobs) == 1:
            return [await one(self._jobs[0])]

        async def later(job: Job) -> _Result:
            await self._begun.wait()
            return await one(job)

        first, *others = self._jobs
        tasks = [asyncio.ensure_future(one(first)), *(asyncio.ensure_future(later(job)) for job in others)]
        # Whatever became of the first, nobody waits for its token any more.
        tasks[0].add_done_callback(lambda task: self.began())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task in done:
                    task.result()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
