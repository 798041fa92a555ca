"""Paged memory on a CUDA device: chunks cross through pinned memory on a stream of their own, beside the model's.

A chunk is read when the model's stream has passed the layer that wrote it, and never makes the model wait. ``tools``
has a check of it for a machine with a device (``tools/vllm/device_pages_check.py``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from prfaas_net.connectors.agreement import Form
from prfaas_net.connectors.layout import EngineLayout
from prfaas_net.connectors.plan import NULL_BLOCK, PageChunk, Section
from prfaas_net.errors import InternalError, RefusedError

__all__ = ["DevicePages"]

RING_SLOTS = 8
SETTLE_S = 10.0


class _Ring:
    """Pinned buffers of one size, given out in turn. Taking one waits for the oldest to come back."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.slot_bytes = slot_bytes
        for _ in range(slots):
            self._free.put(torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True))

    def take(self, n_bytes: int) -> torch.Tensor:
        if n_bytes > self.slot_bytes:
            raise RefusedError(
                "a chunk is larger than the pinned ring's slots", expected=self.slot_bytes, found=n_bytes
            )
        return self._free.get(timeout=SETTLE_S)

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.put(slot)


class DevicePages:
    """See :class:`~prfaas_net.connectors.pages.PagedMemory`.

    Args:
        memory: for each layer bytes of shape (blocks, page), on one device.
        chunk_bytes: no chunk is larger.
    """

    def __init__(self, layout: EngineLayout, memory: Mapping[str, torch.Tensor], *, chunk_bytes: int) -> None:
        self._layout = layout
        self._memory = memory
        self._device = next(iter(memory.values())).device
        largest_page = max(page.n_bytes for page in layout.pages)
        self._ring = _Ring(max(chunk_bytes, largest_page), RING_SLOTS)
        self._stream = torch.cuda.Stream(self._device)
        self._under_way: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unsettled = 0
        self._settled = threading.Condition()
        threading.Thread(target=self._finish, name="prfaas-copies", daemon=True).start()

    def gather(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], out: memoryview, done: Callable[[], None]
    ) -> None:
        slot = self._ring.take(chunk.n_bytes)
        model = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(model)
        with torch.cuda.stream(self._stream):
            packed = self._read(chunk, section, blocks)
            slot[: chunk.n_bytes].copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        with self._settled:
            self._unsettled += 1

        def finish() -> None:
            copied.synchronize()
            out[:] = memoryview(slot.numpy())[: chunk.n_bytes]
            self._ring.give_back(slot)
            done()

        self._under_way.put(finish)

    def scatter(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], data: memoryview, heads: tuple[int, int]
    ) -> None:
        slot = self._ring.take(chunk.n_bytes)
        try:
            memoryview(slot.numpy())[: chunk.n_bytes] = data
            with torch.cuda.stream(self._stream):
                packed = slot[: chunk.n_bytes].to(self._device, non_blocking=True)
                self._write(chunk, section, blocks, packed, heads)
            self._stream.synchronize()
        finally:
            self._ring.give_back(slot)

    def settle(self) -> None:
        with self._settled:
            if not self._settled.wait_for(lambda: self._unsettled == 0, SETTLE_S):
                raise InternalError("copies out of the device do not end", found=f"{self._unsettled} under way")

    def _finish(self) -> None:
        """In a thread: what has been copied goes on its way."""
        while True:
            finish = self._under_way.get()
            try:
                finish()
            finally:
                with self._settled:
                    self._unsettled -= 1
                    self._settled.notify_all()

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _read(self, chunk: PageChunk, section: Section, blocks: Sequence[int]) -> torch.Tensor:
        pages = self._memory[chunk.layer]
        if section.form is Form.STATE:
            return pages[self._checked(chunk, blocks[:1])[0], chunk.start : chunk.start + chunk.n_bytes]
        needed = self._checked(chunk, self._blocks(chunk, blocks))
        picked = pages[torch.tensor(needed, device=self._device)]
        if section.form is Form.PAGES:
            return picked.reshape(-1)
        first = chunk.start % self._tokens(chunk)
        rows = []
        for part in self._parts(chunk, picked, section.heads):
            flat = part.permute(0, 2, 1, 3).flatten(0, 1)[first : first + chunk.stop - chunk.start]
            rows.append(flat.contiguous().view(torch.uint8).reshape(-1))
        return torch.cat(rows)

    def _write(
        self, chunk: PageChunk, section: Section, blocks: Sequence[int], packed: torch.Tensor, heads: tuple[int, int]
    ) -> None:
        pages = self._memory[chunk.layer]
        if section.form is Form.STATE:
            pages[blocks[0], chunk.start : chunk.start + chunk.n_bytes] = packed
            return
        index = torch.tensor(self._checked(chunk, self._blocks(chunk, blocks)), device=self._device)
        if section.form is Form.PAGES:
            pages[index] = packed.view(len(index), -1)
            return
        picked, at = pages[index], 0
        first, count = chunk.start % self._tokens(chunk), chunk.stop - chunk.start
        for part in self._parts(chunk, picked, heads):
            n_blocks, n_heads, tokens, dim = part.shape
            n_bytes = count * n_heads * dim * part.element_size()
            rows = packed[at : at + n_bytes].view(part.dtype).view(count, n_heads, dim)
            at += n_bytes
            spread = part.permute(0, 2, 1, 3).reshape(n_blocks * tokens, n_heads, dim).clone()
            spread[first : first + count] = rows
            # What lies beside them is masked, but must not be a NaN of the last user.
            spread[first + count :] = 0
            if any(chunk.start == begins for begins, _ in section.runs):
                spread[:first] = 0
            part.copy_(spread.view(n_blocks, tokens, n_heads, dim).permute(0, 2, 1, 3))
        pages[index] = picked

    def _parts(self, chunk: PageChunk, picked: torch.Tensor, heads: tuple[int, int]) -> list[torch.Tensor]:
        """Views of (blocks, heads, tokens, dim) into picked pages."""
        page, words = self._layout.by_layer[chunk.layer][2], {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        views = []
        for part in page.parts:
            flat = picked.view(words[part.item_bytes])
            item = part.item_bytes
            strides = (flat.stride(0), part.head_stride // item, part.token_stride // item, part.dim_stride // item)
            shape = (flat.shape[0], part.heads, self._tokens(chunk), part.dim)
            view = torch.as_strided(flat, shape, strides, part.offset // item)
            views.append(view[:, heads[0] : heads[1]] if heads[1] else view)
        return views

    def _tokens(self, chunk: PageChunk) -> int:
        return self._layout.by_layer[chunk.layer][1].block_tokens

    def _blocks(self, chunk: PageChunk, blocks: Sequence[int]) -> Sequence[int]:
        tokens = self._tokens(chunk)
        return blocks[chunk.start // tokens : -(-chunk.stop // tokens)]

    @staticmethod
    def _checked(chunk: PageChunk, blocks: Sequence[int]) -> list[Any]:
        if NULL_BLOCK in blocks or not blocks:
            raise InternalError("a block that is to be sent was given up", found=f"{chunk.layer}, token {chunk.start}")
        return list(blocks)
