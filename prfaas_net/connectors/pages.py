"""Reading chunks out of paged memory and writing them back, where the pages are in this host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prfaas_net.connectors.agreement import Form
from prfaas_net.connectors.layout import EngineLayout, PageLayout
from prfaas_net.connectors.plan import NULL_BLOCK, PageChunk, Section
from prfaas_net.errors import InternalError

__all__ = ["HostPages", "PagedMemory"]

Bytes = npt.NDArray[np.uint8]
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class PagedMemory(Protocol):
    """An engine's cache memory. Calls for different blocks may come from different threads."""

    def gather(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], out: memoryview, done: Callable[[], None]
    ) -> None:
        """Copy a chunk out of its pages; ``done`` is called, from any thread, when ``out`` holds all of it.

        Args:
            blocks: the request's block table for the chunk's layer; of state the one block that holds it.

        Raises:
            InternalError: a block that is needed has been given up.
        """
        ...

    def scatter(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], data: memoryview, heads: tuple[int, int]
    ) -> None:
        """Copy a chunk into its pages; returns when they hold it.

        Args:
            heads: where in the page the heads belong; (0, 0): all.
        """
        ...

    def settle(self) -> None:
        """Wait until no copy reads a page any more."""
        ...


class HostPages:
    """Pages in this host's memory.

    Args:
        memory: for each layer bytes of shape (blocks, page); rows may lie any distance apart.
    """

    def __init__(self, layout: EngineLayout, memory: Mapping[str, Bytes]) -> None:
        self._layout = layout
        self._memory = memory
        self._parts = {name: _part_views(memory[name], page) for name, (_, _, page) in layout.by_layer.items()}

    def gather(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], out: memoryview, done: Callable[[], None]
    ) -> None:
        target = np.frombuffer(out, np.uint8)
        if section.form is Form.STATE:
            target[:] = self._page(chunk, blocks[0])[chunk.start : chunk.start + chunk.n_bytes]
        elif section.form is Form.PAGES:
            rows = target.reshape(-1, section.unit_bytes)
            for row, block in zip(rows, self._blocks(chunk, section.unit_tokens, blocks), strict=True):
                row[:] = self._page(chunk, block)
        else:
            self._rows(chunk, blocks, target, section.heads, write=False)
        done()

    def scatter(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], data: memoryview, heads: tuple[int, int]
    ) -> None:
        source = np.frombuffer(data, np.uint8)
        if section.form is Form.STATE:
            self._page(chunk, blocks[0])[chunk.start : chunk.start + chunk.n_bytes] = source
        elif section.form is Form.PAGES:
            rows = source.reshape(-1, section.unit_bytes)
            for row, block in zip(rows, self._blocks(chunk, section.unit_tokens, blocks), strict=True):
                self._page(chunk, block)[:] = row
        else:
            self._rows(chunk, blocks, source, heads, write=True)

    def settle(self) -> None:
        """Copies here are over when they return."""

    def _page(self, chunk: PageChunk, block: int) -> Bytes:
        if block == NULL_BLOCK:
            raise InternalError("a block that is to be sent was given up", found=f"{chunk.layer}, token {chunk.start}")
        page: Bytes = self._memory[chunk.layer][block]
        return page

    @staticmethod
    def _blocks(chunk: PageChunk, block_tokens: int, blocks: Sequence[int]) -> Sequence[int]:
        return blocks[chunk.start // block_tokens : -(-chunk.stop // block_tokens)]

    def _rows(
        self, chunk: PageChunk, blocks: Sequence[int], flat: Bytes, heads: tuple[int, int], *, write: bool
    ) -> None:
        block_tokens = self._layout.by_layer[chunk.layer][1].block_tokens
        n_tokens, at = chunk.stop - chunk.start, 0
        for part in self._parts[chunk.layer]:
            chosen = part[:, heads[0] : heads[1]] if heads[1] else part
            n_heads, dim = chosen.shape[1], chosen.shape[3]
            n_bytes = n_tokens * n_heads * dim * chosen.itemsize
            rows = flat[at : at + n_bytes].view(chosen.dtype).reshape(n_tokens, n_heads, dim)
            at += n_bytes
            for block, (first, last), row in _pieces(chunk, block_tokens, blocks):
                if block == NULL_BLOCK:
                    raise InternalError("a block that is to be sent was given up", found=f"{chunk.layer}, token {row}")
                inside = chosen[block, :, first:last].transpose(1, 0, 2)
                if write:
                    inside[:] = rows[row : row + last - first]
                    # What follows in the block is masked, but must not be a NaN of the last user.
                    chosen[block, :, last:] = 0
                else:
                    rows[row : row + last - first] = inside


def _pieces(chunk: PageChunk, block_tokens: int, blocks: Sequence[int]) -> Iterator[tuple[int, tuple[int, int], int]]:
    """(block, tokens inside it, first row) of a chunk's tokens."""
    token = chunk.start
    while token < chunk.stop:
        position, first = divmod(token, block_tokens)
        last = min(block_tokens, first + chunk.stop - token)
        yield blocks[position] if position < len(blocks) else NULL_BLOCK, (first, last), token - chunk.start
        token += last - first


def _part_views(memory: Bytes, page: PageLayout) -> list[npt.NDArray[Any]]:
    """Each part as (blocks, heads, tokens, dim), without a copy."""
    views = []
    for part in page.parts:
        words = memory.view(_WORDS[part.item_bytes])
        shape = (memory.shape[0], part.heads, page.n_bytes // page.row_bytes, part.dim)
        strides = (memory.strides[0], part.head_stride, part.token_stride, part.dim_stride)
        views.append(np.lib.stride_tricks.as_strided(words[:, part.offset // part.item_bytes :], shape, strides))
    return views
