"""One prompt and the prefix cache: what of it is there already, and what of it should stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prfaas_net.aio import see_through
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.prefix_tree import PrefixHit
from prfaas_net.cache.retention import snapshot_lengths
from prfaas_net.kv import RegionMap
from prfaas_net.nodes.kv_memory import KvMemory, SequenceBuffer

__all__ = ["Keeper", "PromptMemory"]

# Copying so much takes well under a millisecond: not worth a thread.
INLINE_COPY_TOKENS = 256


class PromptMemory:
    """A prompt's buffer, with what was cached of it already in place.

    Made by :meth:`open`; the buffer is released with :meth:`close`.

    Attributes:
        cached_tokens: of the prompt, in the buffer from the start.
        rows_tokens: how far cached rows alone reach.
    """

    def __init__(self, memory: KvMemory, keys: bytes, regions: RegionMap, buffer: SequenceBuffer) -> None:
        self.memory = memory
        self.keys = keys
        self.regions = regions
        self.cached_tokens = 0
        self.rows_tokens = 0
        self._buffer = buffer

    @classmethod
    async def open(
        cls, memory: KvMemory, keys: bytes, n_tokens: int, regions: RegionMap, *, need_state: bool
    ) -> PromptMemory:
        """Reserve a buffer laid out by ``regions`` and copy into it what is cached of the prompt.

        Args:
            keys: of the prompt's full blocks; none to start from nothing and keep nothing.
            need_state: see :meth:`KvMemory.find`.

        Raises:
            RefusedError, BusyError: there is no room for the buffer.
        """
        if keys and memory.tier is not None:
            await see_through(asyncio.to_thread(memory.promote, keys, n_tokens, need_state=need_state))
        # Found first, so that the reservation does not evict it.
        hit = memory.find(keys, n_tokens, need_state=need_state) if keys else None
        try:
            prompt = cls(memory, keys, regions, memory.reserve(regions.total_bytes))
            if hit is not None and hit.length_tokens:
                try:
                    await prompt._fill(hit)
                except BaseException:
                    prompt.close()
                    raise
        finally:
            if hit is not None:
                memory.release(hit)
        return prompt

    @property
    def view(self) -> memoryview:
        return self._buffer.view

    async def _fill(self, hit: PrefixHit) -> None:
        if hit.length_tokens <= INLINE_COPY_TOKENS:
            self.memory.fill(hit, self.regions, self.view)
        else:
            await see_through(asyncio.to_thread(self.memory.fill, hit, self.regions, self.view))
        self.cached_tokens, self.rows_tokens = hit.length_tokens, hit.rows_tokens

    def keep(self, n_tokens: int, *, with_state: bool) -> None:
        """Cache all full blocks before ``n_tokens``, which are in the buffer. In a worker thread.

        Args:
            with_state: the buffer's window and linear state is that at ``n_tokens``, a block boundary; cache it too.
        """
        n_blocks = min(n_tokens // self.memory.block_tokens, len(self.keys) // KEY_BYTES)
        if n_blocks:
            self.memory.keep(self.keys, n_blocks, self.regions, self.view, with_state=with_state)

    def held_tokens(self, n_tokens: int) -> int:
        """How many of the prompt's first tokens have their rows cached now."""
        hit = self.memory.find(self.keys, n_tokens + 1, need_state=False) if self.keys else None
        if hit is None:
            return 0
        self.memory.release(hit)
        return hit.rows_tokens

    def close(self) -> None:
        """Nobody reads or writes the buffer any more."""
        self._buffer.release()


class Keeper:
    """Keeps a prefill's state at chosen lengths: the engine's ``Snapshots``. In the engine's thread.

    Args:
        n_tokens: of the prompt.
        interval_tokens: see :func:`~prfaas_net.cache.retention.snapshot_lengths`.
    """

    def __init__(self, prompt: PromptMemory, n_tokens: int, interval_tokens: int | None) -> None:
        self._prompt = prompt
        self._lengths: Sequence[int] = ()
        if prompt.keys:
            self._lengths = snapshot_lengths(
                n_tokens,
                prompt.memory.block_tokens,
                interval_tokens,
                start_tokens=prompt.cached_tokens,
                known_tokens=prompt.rows_tokens,
            )

    def boundaries(self, start: int, stop: int) -> Sequence[int]:
        return [length for length in self._lengths if start < length < stop]

    def take(self, n_tokens: int) -> None:
        self._prompt.keep(n_tokens, with_state=True)

    def finish(self, n_tokens: int) -> None:
        """The prefill has ended: its last state is kept too, if it stands at a block boundary."""
        if n_tokens in self._lengths:
            self.take(n_tokens)
