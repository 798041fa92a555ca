"""Stand-ins for a serving engine: pages filled with numbers, and the calls that an engine would make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from prfaas_net.connectors.config import ConnectorConfig, read_config
from prfaas_net.connectors.layout import EngineLayout, GroupLayout, PageLayout, PagePart, StateKind, digest_of
from prfaas_net.connectors.orders import Blocks, HoldOrder, LoadOrder, PrefillOrder, StepOrders
from prfaas_net.connectors.pages import HostPages
from prfaas_net.connectors.worker import ConnectorWorker, StepResults, WorkerRole

__all__ = ["N_BLOCKS", "FakeEngine", "cpu_page", "gpu_page", "hybrid_layout", "latent_page", "serving"]

N_BLOCKS = 24
WITHIN_S = 20.0


def cpu_page(heads: int, tokens: int, dim: int) -> PageLayout:
    """Keys as (dim, tokens), then values as (tokens, dim), for each head: what vLLM's CPU kernels keep."""
    item, head = 4, 2 * tokens * dim * 4
    keys = PagePart("k", 0, heads, dim, item, head, item, tokens * item)
    values = PagePart("v", tokens * dim * item, heads, dim, item, head, dim * item, item)
    return PageLayout(heads * head, "float32", "cpu vec", (keys, values))


def gpu_page(heads: int, tokens: int, dim: int, *, head_major: bool) -> PageLayout:
    """Keys and values side by side in one row, heads outside or inside tokens."""
    item, width = 2, 2 * dim
    strides = (tokens * width, width) if head_major else (width, heads * width)
    part = PagePart("rows", 0, heads, width, item, strides[0] * item, strides[1] * item, item)
    return PageLayout(heads * tokens * width * item, "bfloat16", "rows", (part,))


def latent_page(tokens: int, dim: int) -> PageLayout:
    part = PagePart("latent", 0, 1, dim, 4, tokens * dim * 4, dim * 4, 4)
    return PageLayout(tokens * dim * 4, "float32", "latent", (part,))


def hybrid_layout(block_tokens: int = 16, *, tp_size: int = 1, tp_rank: int = 0) -> EngineLayout:
    """Full attention, a window, and a recurrent layer."""
    pages = (cpu_page(2, block_tokens, 4), PageLayout(1000, "bfloat16, float32", "gdn"))
    groups = (
        GroupLayout(StateKind.FULL, block_tokens, 0, 2, (("l0", 0), ("l2", 0))),
        GroupLayout(StateKind.WINDOW, block_tokens, 32, 2, (("l1", 0),)),
        GroupLayout(StateKind.STATE, block_tokens, 0, 0, (("l3", 1),)),
    )
    return EngineLayout("test 1", "tiny", "w", tp_size, tp_rank, pages, groups)


class FakeEngine:
    """One rank with memory of its own. Row values follow from (layer, token, head), so that they can be looked for."""

    def __init__(self, layout: EngineLayout, *, gap_bytes: int = 0) -> None:
        self.layout = layout
        self.memory = {}
        for name, (_, _, page) in layout.by_layer.items():
            stride = page.n_bytes + gap_bytes
            self.memory[name] = np.zeros((N_BLOCKS, stride), np.uint8)[:, : page.n_bytes]
        self.pages = HostPages(layout, self.memory)

    def write(self, blocks: Blocks, start: int, stop: int, *, seed: int = 0, heads: range | None = None) -> None:
        """What running tokens ``start`` to ``stop`` leaves in the pages; the state is that at ``stop``.

        Args:
            heads: of the whole model, that this rank holds.
        """
        for name, (index, group, _) in self.layout.by_layer.items():
            if group.kind is StateKind.STATE:
                self.memory[name][blocks[index][-1]] = state(name, stop, seed, self.memory[name].shape[1])
                continue
            for part, view in enumerate(self.pages._parts[name]):
                held = heads if heads and group.total_heads else range(view.shape[1])
                for token in range(start, stop):
                    block = blocks[index][token // group.block_tokens]
                    if block:
                        rows = row(name, part, token, seed, held, view.shape[3])
                        view[block, :, token % group.block_tokens] = rows.astype(view.dtype)

    def holds(self, blocks: Blocks, start: int, stop: int, *, seed: int = 0, heads: range | None = None) -> bool:
        """Whether the pages are as :meth:`write` would leave them."""
        other = FakeEngine(self.layout)
        other.write(blocks, start, stop, seed=seed, heads=heads)
        for name, (index, group, _) in self.layout.by_layer.items():
            if group.kind is StateKind.STATE:
                block = blocks[index][-1]
                if not np.array_equal(self.memory[name][block], other.memory[name][block]):
                    return False
                continue
            for mine, theirs in zip(self.pages._parts[name], other.pages._parts[name], strict=True):
                for token in range(start, stop):
                    block, at = blocks[index][token // group.block_tokens], token % group.block_tokens
                    if block and not np.array_equal(mine[block, :, at], theirs[block, :, at]):
                        return False
        return True


def row(name: str, part: int, token: int, seed: int, heads: range, dim: int) -> np.ndarray[Any, Any]:
    base = np.arange(dim) + 31 * token + 1000 * part + 7 * sum(map(ord, name)) + 5000 * seed
    return np.stack([base + 211 * head for head in heads])


def state(name: str, stop: int, seed: int, n_bytes: int) -> np.ndarray[Any, Any]:
    return ((np.arange(n_bytes) + 3 * stop + 7 * seed + sum(map(ord, name))) % 251).astype(np.uint8)


class Serving:
    """A rank with its connector, driven as vLLM drives it."""

    def __init__(self, engine: FakeEngine, worker: ConnectorWorker) -> None:
        self.engine = engine
        self.worker = worker
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.bad_blocks: set[int] = set()

    def step(
        self, orders: StepOrders, finished: Sequence[str] = (), run: Callable[[], None] = lambda: None
    ) -> StepResults:
        """One engine step; ``run`` is the model's part of it."""
        self.worker.begin_step(orders)
        run()
        self.worker.end_step(orders)
        results = self.worker.finish(finished)
        self.sent |= results.sent
        self.received |= results.loads.received
        self.failed |= results.loads.failed
        self.bad_blocks |= results.loads.bad_blocks
        return results

    def prefill(self, order: PrefillOrder, *, seed: int = 0, heads: range | None = None, layers: bool = True) -> None:
        """A step that runs a prompt's tokens, and tells of each layer."""

        def run() -> None:
            self.engine.write(order.blocks, order.before, order.after, seed=seed, heads=heads)
            for name, (_, group, _) in self.engine.layout.by_layer.items():
                if layers and group.kind is not StateKind.STATE:
                    self.worker.layer_done(name)

        self.step(StepOrders(prefills=[order]), run=run)

    def hold(self, request_id: str, deadline_s: float = 20.0) -> None:
        self.step(StepOrders(holds=[HoldOrder(request_id, deadline_s)]), [request_id])

    def until(self, condition: Callable[[], bool]) -> None:
        """Empty steps until something is so."""
        give_up = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < give_up, "it did not come about"
            self.step(StepOrders())
            time.sleep(0.005)


TOKENS = list(range(3, 300))


def prefill_order(blocks: Blocks, before: int, after: int, stop: int, **changes: Any) -> PrefillOrder:
    order = PrefillOrder("p", "transfer-1", blocks, before, after, stop, digest_of(TOKENS, stop))
    return replace(order, **changes)


def load_order(source: Serving, blocks: Blocks, start: int, stop: int, **changes: Any) -> LoadOrder:
    host, port = source.worker.control_address
    order = LoadOrder("d", "transfer-1", host, port, blocks, start, stop, digest_of(TOKENS, stop), 20.0)
    return replace(order, **changes)


def config(**extra: Any) -> ConnectorConfig:
    kv = {"arena": "4MiB", "connections": 2} | extra.pop("kv", {})
    return read_config({"chunk_tokens": 16, "kv": kv, **extra}, default_port=0)


@contextmanager
def serving(
    layout: EngineLayout, *, prefills: bool = False, decodes: bool = False, gap_bytes: int = 0, **extra: Any
) -> Iterator[Serving]:
    """A rank that serves until the end of the block."""
    engine = FakeEngine(layout, gap_bytes=gap_bytes)
    worker = ConnectorWorker(config(**extra), WorkerRole(prefills, decodes), layout, engine.pages)
    try:
        yield Serving(engine, worker)
    finally:
        worker.close()
