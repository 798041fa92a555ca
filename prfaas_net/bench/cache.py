"""How fast the global KVCache manager answers and follows, and what a block costs it, beside a dictionary.

A hybrid layout (full attention and linear states at every eighth block): 64 nodes in four clusters hold a million
blocks, and a prompt of 128K tokens is held by eight of them to different lengths. Everything goes through the manager
as it does in a gateway; an event is plain data, as the JSON parser gives it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from prfaas_net.bench.figures import middle
from prfaas_net.bench.meters import cpu_s, percentile
from prfaas_net.cache.events import Delta, Removal, Run, Snapshot
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.cache.manager import CacheManager
from prfaas_net.errors import InternalError
from prfaas_net.kv import KvKind

__all__ = ["FULL", "QUICK", "CachePlan", "bench_cache", "show"]

BLOCK_TOKENS = 256
STATE_EVERY = 8  # blocks
CLUSTERS = 4
HOLDERS = 8
LAYOUT = "bench"
GROUPS = frozenset({KvKind.FULL, KvKind.LINEAR})


@dataclass(frozen=True)
class CachePlan:
    """How much is measured."""

    blocks: int = 1_000_000
    nodes: int = 64
    prompt_tokens: int = 131_072
    rounds: int = 5
    matches: int = 200
    events: int = 100_000


FULL = CachePlan()
QUICK = CachePlan(blocks=100_000, matches=50, events=20_000)


@dataclass
class _Fleet:
    """A manager that has been told of every node, and what the nodes hold."""

    plan: CachePlan
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    manager: CacheManager = field(init=False)
    held: list[bytes] = field(default_factory=list)
    seq: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.manager = CacheManager(LAYOUT, BLOCK_TOKENS, GROUPS)
        self.prompt = prefix_keys(PrefixScope(LAYOUT, BLOCK_TOKENS), self.tokens)
        self.root = PrefixScope(LAYOUT, BLOCK_TOKENS).root
        n_prompt = len(self.prompt) // KEY_BYTES
        own = np.random.default_rng(1).bytes((plan.blocks - n_prompt) * KEY_BYTES)
        cuts = np.linspace(0, plan.blocks - n_prompt, plan.nodes + 1).astype(int).tolist()
        for i in range(plan.nodes):
            keys = own[cuts[i] * KEY_BYTES : cuts[i + 1] * KEY_BYTES]
            stored = [*_runs(keys, self.root)]
            if i < HOLDERS:
                stored += _runs(self.prompt_of(i), self.root)
            snapshot = Snapshot(_name(i), "b", LAYOUT, BLOCK_TOKENS, 0, GROUPS, tuple(stored))
            _told(self.manager, i, snapshot)
            self.held.append(keys)
            self.seq.append(0)

    def prompt_of(self, node: int) -> bytes:
        """What a node holds of the prompt: the first one all of it."""
        n_blocks = len(self.prompt) // KEY_BYTES * max(0, HOLDERS - node) // HOLDERS
        return self.prompt[: n_blocks * KEY_BYTES]

    def next_seq(self, node: int) -> int:
        self.seq[node] += 1
        return self.seq[node]


def _name(node: int) -> str:
    return f"node-{node}"


def _told(manager: CacheManager, node: int, event: object) -> None:
    outcome = manager.apply(_name(node), f"cluster-{node % CLUSTERS}", event, now=0.0)
    if not outcome.applied:
        raise InternalError("the bench's own event was refused", found=outcome.detail)


def _runs(keys: bytes, parent: bytes) -> list[Run]:
    words = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
    states = words[STATE_EVERY - 1 :: STATE_EVERY].tobytes()
    return [Run(KvKind.FULL, keys, parent), *([Run(KvKind.LINEAR, states)] if states else [])]


def _times_ms(work: Callable[[], object], n: int, clock_s: Callable[[], float] = time.perf_counter) -> list[float]:
    took = []
    for _ in range(n):
        began_s = clock_s()
        work()
        took.append((clock_s() - began_s) * 1e3)
    return took


def _rate(fleet: _Fleet, events: list[tuple[int, dict[str, Any]]]) -> tuple[float, float]:
    """Events a second, and a second of CPU time; the last ones have reached the index, too."""
    manager = fleet.manager
    names = [(_name(i), f"cluster-{i % CLUSTERS}") for i in range(fleet.plan.nodes)]
    began, cpu_began = time.perf_counter(), cpu_s()
    for node, event in events:
        manager.apply(*names[node], event, now=0.0)
    manager.match(fleet.prompt[:KEY_BYTES], n_tokens=BLOCK_TOKENS + 1)
    rates = len(events) / (time.perf_counter() - began), len(events) / (cpu_s() - cpu_began)
    if manager.awaiting():
        raise InternalError("the bench's own events were refused", found=manager.counters)
    return rates


def _event_rates(fleet: _Fleet, seed: int) -> dict[str, float]:
    """One block an event, the nodes in turn: new blocks after each node's last one, then their removal."""
    n = fleet.plan.events
    keys = np.random.default_rng(seed).bytes(n * KEY_BYTES)
    last = [held[-KEY_BYTES:] for held in fleet.held]
    stores, removals = [], []
    for i in range(n):
        node, key = i % fleet.plan.nodes, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        run = Run(KvKind.FULL, key, last[node])
        stores.append((node, Delta(fleet.next_seq(node), (run,)).to_json()))
        last[node] = key
    for i in range(n):
        node, key = i % fleet.plan.nodes, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        removals.append((node, Delta(fleet.next_seq(node), removed=(Removal(KvKind.FULL, key),)).to_json()))
    (stored, stored_cpu), (removed, removed_cpu) = _rate(fleet, stores), _rate(fleet, removals)
    return {
        "events_per_s": _both(stored, removed),
        "stored_events_per_s": stored,
        "removed_events_per_s": removed,
        "events_per_cpu_s": _both(stored_cpu, removed_cpu),
    }


def _both(one: float, other: float) -> float:
    """The rate of as many of the one as of the other."""
    return 2 / (1 / one + 1 / other)


def _dictionary(fleet: _Fleet) -> dict[str, float]:
    """The same index as a dictionary from key to one integer of bits, matched in a loop."""
    n_nodes, masks = fleet.plan.nodes, dict[bytes, int]()

    def learn() -> None:
        for node, held in enumerate(fleet.held):
            for keys in (held, fleet.prompt_of(node)):
                for i in range(len(keys) // KEY_BYTES):
                    key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                    state = (i + 1) % STATE_EVERY == 0
                    masks[key] = masks.get(key, 0) | 1 << node | state << (n_nodes + node)

    def match() -> list[tuple[int, int]]:
        rows, usable, left = [0] * n_nodes, [0] * n_nodes, (1 << n_nodes) - 1
        for i in range(len(fleet.prompt) // KEY_BYTES):
            mask = masks.get(fleet.prompt[i * KEY_BYTES : (i + 1) * KEY_BYTES], 0)
            left &= mask
            states = left & mask >> n_nodes
            for values, bits in ((rows, left), (usable, states)):
                while bits:
                    low = bits & -bits
                    values[low.bit_length() - 1] = i + 1
                    bits ^= low
        return [pair for pair in zip(rows, usable, strict=True) if any(pair)]

    def drop() -> None:
        keep = ~(1 | 1 << n_nodes)
        for key, mask in masks.items():
            if mask & ~keep:
                masks[key] = mask & keep

    load_s = _times_ms(learn, 1)[0] / 1e3
    # A key and a mask are objects of their own, beside the table.
    size = sys.getsizeof(masks) / len(masks) + sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof(1 << n_nodes)
    match_ms = percentile(_times_ms(match, fleet.plan.matches), 0.5)
    drop_ms = _times_ms(drop, 1)[0]
    return {"match_ms_p50": match_ms, "bytes_per_block": size, "load_s": load_s, "drop_node_ms": drop_ms}


def bench_cache(plan: CachePlan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Medians over the rounds, with the smallest and the largest beside them."""
    progress(f"telling a manager of {plan.blocks} blocks")
    tokens = np.random.default_rng(0).integers(0, 150_000, plan.prompt_tokens)
    began = time.perf_counter()
    fleet = _Fleet(plan, tokens)
    load_s = time.perf_counter() - began
    manager, as_list, scope = fleet.manager, tokens.tolist(), PrefixScope(LAYOUT, BLOCK_TOKENS)
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    def match(prompt: object) -> object:
        keys = fleet.prompt if prompt is None else prefix_keys(scope, prompt)  # type: ignore[arg-type]
        return manager.match(keys, n_tokens=plan.prompt_tokens + 1)

    for number in range(plan.rounds):
        progress(f"round {number + 1} of {plan.rounds}")
        plain = _times_ms(lambda: match(None), plan.matches)
        note("match_ms_p50", percentile(plain, 0.5))
        note("match_ms_p99", percentile(plain, 0.99))
        # What the match itself takes at worst, where other processes want the processor too.
        cpu = _times_ms(lambda: match(None), plan.matches, time.thread_time)
        note("match_cpu_ms_p99", percentile(cpu, 0.99))
        note("match_with_hash_ms_p50", percentile(_times_ms(lambda: match(tokens), plan.matches // 2), 0.5))
        note("match_with_hash_list_ms_p50", percentile(_times_ms(lambda: match(as_list), plan.matches // 4), 0.5))
        for name, rate in _event_rates(fleet, number + 2).items():
            note(name, rate)
    # The events' blocks are gone again, but the table has once made room for them.
    blocks, bytes_per_block = manager.n_blocks, manager.memory_bytes / manager.n_blocks
    progress("the same as a dictionary")
    reference = _dictionary(fleet)
    drops = [_drop_ms(fleet, node) for node in range(min(5, plan.nodes))]
    return {
        **{name: middle(values, 4 if name.endswith(("p50", "p99")) else 0) for name, values in figures.items()},
        "range": {name: [round(min(values), 4), round(max(values), 4)] for name, values in figures.items()},
        "bytes_per_block": round(bytes_per_block, 1),
        "blocks": blocks,
        "nodes": plan.nodes,
        "prompt_tokens": plan.prompt_tokens,
        "rounds": plan.rounds,
        "load_s": round(load_s, 3),
        "drop_node_ms": middle(drops),
        "dictionary": {name: round(value, 4) for name, value in reference.items()},
    }


def _drop_ms(fleet: _Fleet, node: int) -> float:
    return _times_ms(lambda: fleet.manager.drop(_name(node)), 1)[0]


def show(report: dict[str, Any], console: Console) -> None:
    """For people."""
    table = Table(
        title=f"{report['prompt_tokens']} tokens against {report['blocks']} blocks on {report['nodes']} nodes"
    )
    for name in ("figure", "median", "smallest", "largest", "a dictionary"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name, (low, high) in report["range"].items():
        other = report["dictionary"].get(name)
        table.add_row(
            name, *(f"{value:g}" for value in (report[name], low, high)), "" if other is None else f"{other:g}"
        )
    for name in ("bytes_per_block", "drop_node_ms", "load_s"):
        other = report["dictionary"].get(name)
        table.add_row(name, f"{report[name]:g}", "", "", "" if other is None else f"{other:g}")
    console.print(table)
