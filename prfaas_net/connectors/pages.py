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
            self._read_rows(chunk, blocks, target, section.heads)
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
            begins = any(chunk.start == first for first, _ in section.runs)
            self._write_rows(chunk, blocks, source, heads, begins=begins)

    def settle(self) -> None:
        """Copies here are over when they return."""

    def _page(self, chunk: PageChunk, block: int) -> Bytes:
        if block == NULL_BLOCK:
            raise _given_up(chunk)
        page: Bytes = self._memory[chunk.layer][block]
        return page

    @staticmethod
    def _blocks(chunk: PageChunk, block_tokens: int, blocks: Sequence[int]) -> Sequence[int]:
        return blocks[chunk.start // block_tokens : -(-chunk.stop // block_tokens)]

    def _read_rows(self, chunk: PageChunk, blocks: Sequence[int], flat: Bytes, heads: tuple[int, int]) -> None:
        for part, rows in self._parts_of(chunk, flat, heads):
            for block, (first, last), row in self._pieces(chunk, blocks):
                rows[row : row + last - first] = part[block, :, first:last].transpose(1, 0, 2)

    def _write_rows(
        self, chunk: PageChunk, blocks: Sequence[int], flat: Bytes, heads: tuple[int, int], *, begins: bool
    ) -> None:
        """What lies beside the rows in their blocks is masked, but must not be a NaN of the last user: it is zeroed.

        Args:
            begins: the chunk is the first of its run, so that nothing before it belongs to it.
        """
        for part, rows in self._parts_of(chunk, flat, heads):
            for block, (first, last), row in self._pieces(chunk, blocks):
                part[block, :, first:last] = rows[row : row + last - first].transpose(1, 0, 2)
                part[block, :, last:] = 0
                if begins and row == 0:
                    part[block, :, :first] = 0

    def _parts_of(
        self, chunk: PageChunk, flat: Bytes, heads: tuple[int, int]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Each part as it lies in the pages, and its rows in the chunk, of shape (tokens, heads, dim)."""
        n_tokens, at = chunk.stop - chunk.start, 0
        for part in self._parts[chunk.layer]:
            chosen = part[:, heads[0] : heads[1]] if heads[1] else part
            n_heads, dim = chosen.shape[1], chosen.shape[3]
            n_bytes = n_tokens * n_heads * dim * chosen.itemsize
            yield chosen, flat[at : at + n_bytes].view(chosen.dtype).reshape(n_tokens, n_heads, dim)
            at += n_bytes

    def _pieces(self, chunk: PageChunk, blocks: Sequence[int]) -> Iterator[tuple[int, tuple[int, int], int]]:
        """(block, tokens inside it, first row) of a chunk's tokens."""
        block_tokens = self._layout.by_layer[chunk.layer][1].block_tokens
        token = chunk.start
        while token < chunk.stop:
            position, first = divmod(token, block_tokens)
            last = min(block_tokens, first + chunk.stop - token)
            block = blocks[position] if position < len(blocks) else NULL_BLOCK
            if block == NULL_BLOCK:
                raise _given_up(chunk)
            yield block, (first, last), token - chunk.start
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


def _given_up(chunk: PageChunk) -> InternalError:
    return InternalError("a block that is to be sent was given up", found=f"{chunk.layer}, token {chunk.start}")
