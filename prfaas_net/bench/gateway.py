"""``prfaas bench gateway``: what the gateway adds to a request, and how many it carries on one core.

Nodes that answer at once stand behind it (:mod:`prfaas_net.bench.instant_node`), and behind vllm-router where that is
installed. Every call through a front end is paired with a direct one to the same process, of the same moment.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from prfaas_net.bench import front_ends
from prfaas_net.bench.figures import middle
from prfaas_net.bench.front_ends import FrontEnd
from prfaas_net.bench.instant_node import MODEL
from prfaas_net.bench.meters import percentile, process_cpu_s
from prfaas_net.bench.processes import Child
from prfaas_net.errors import PeerError, PrfaasError
from prfaas_net.nodes.engine_api import TextTokenizer

__all__ = ["FULL", "QUICK", "GatewayPlan", "Shot", "bench_gateway", "show_gateway"]

MAX_MODEL_TOKENS = 1 << 20
ANSWER = "The quick brown fox jumps over the lazy dog, and then it goes home again to sleep. "
PATH = "/v1/completions"


@dataclass(frozen=True)
class Shot:
    """One kind of request.

    Attributes:
        as_ids: the prompt is token ids and not text.
    """

    prompt_tokens: int
    output_tokens: int
    streamed: bool
    as_ids: bool = False

    @property
    def title(self) -> str:
        return f"{self.prompt_tokens} {'ids' if self.as_ids else 'text'} to {self.answer}"

    @property
    def answer(self) -> str:
        return f"{self.output_tokens}{' streamed' if self.streamed else ''}"


HEADLINE = Shot(32, 16, streamed=False)


@dataclass(frozen=True)
class GatewayPlan:
    """What is measured, and how often.

    Attributes:
        paired_calls: of a round, one after the other, to each server in turn.
        connections: of a round's other part, all busy for ``busy_s`` seconds.
    """

    shots: tuple[Shot, ...]
    rounds: int
    paired_calls: int
    connections: int
    busy_s: float


SHORT = (HEADLINE, Shot(32, 16, streamed=True))
LONG = (Shot(8192, 16, streamed=False), Shot(8192, 16, streamed=True), Shot(8192, 16, streamed=False, as_ids=True))
FULL = GatewayPlan(
    (*SHORT, *LONG, Shot(32, 256, streamed=True)), rounds=7, paired_calls=100, connections=32, busy_s=1.5
)
QUICK = GatewayPlan((*SHORT, *LONG[:2]), rounds=5, paired_calls=40, connections=32, busy_s=0.5)


@dataclass
class _Rounds:
    """One kind of request through one server."""

    shot: Shot
    server: FrontEnd
    overhead_p50_ms: list[float] = field(default_factory=list)
    overhead_p99_ms: list[float] = field(default_factory=list)
    first_byte_p50_ms: list[float] = field(default_factory=list)
    direct_p50_ms: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def note_pairs(self, direct: tuple[list[float], list[float]], ours: tuple[list[float], list[float]]) -> None:
        """First bytes and ends of a round's calls, in seconds, in the order in which they were made."""
        first, added = (
            [1e3 * (via - bare) for via, bare in zip(through, straight, strict=True)]
            for through, straight in zip(ours, direct, strict=True)
        )
        self.overhead_p50_ms.append(median(added))
        self.overhead_p99_ms.append(percentile(added, 0.99))
        self.first_byte_p50_ms.append(median(first))
        self.direct_p50_ms.append(1e3 * median(direct[1]))

    def to_json(self) -> dict[str, Any]:
        """Medians over the rounds, and the smallest and largest of them."""
        told: dict[str, Any] = {
            "server": self.server.name,
            "prompt_tokens": self.shot.prompt_tokens,
            "prompt_as": "ids" if self.shot.as_ids else "text",
            "output_tokens": self.shot.output_tokens,
            "streamed": self.shot.streamed,
            "rounds": len(self.requests_per_s),
            "direct_ms_p50": middle(self.direct_p50_ms),
        }
        figures = {
            "overhead_ms_p50": self.overhead_p50_ms,
            "overhead_ms_p99": self.overhead_p99_ms,
            "first_byte_overhead_ms_p50": self.first_byte_p50_ms,
            "requests_per_s": self.requests_per_s,
            "cpu_ms_per_request": self.cpu_ms,
        }
        for name, values in figures.items():
            told[name] = middle(values)
            told[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)] if values else None
        return told


class _Bench:
    """The processes of a run, all started."""

    def __init__(self, plan: GatewayPlan, tokenizer: TextTokenizer, servers: list[FrontEnd], load: Child) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._servers = servers
        self._load = load

    def body(self, shot: Shot) -> str:
        """A request; text has as many tokens as it should, within a few."""
        # Numbers, so that a tokenizer that remembers words has something to do all the same.
        text = " ".join(f"In line {number} it says: {ANSWER}" for number in range(shot.prompt_tokens // 16 + 1))
        ids = self._tokenizer.encode(text)[: shot.prompt_tokens]
        prompt = ids if shot.as_ids else "".join(map(self._tokenizer.token_text, ids))
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": shot.output_tokens, "ignore_eos": True}
        return orjson.dumps({**fields, "stream": shot.streamed}).decode()

    def check(self, shot: Shot) -> None:
        """Every server answers what the node does.

        Raises:
            PeerError: one does not.
        """
        tokens = self._tokenizer.encode(ANSWER)[: shot.output_tokens]
        text = "".join(map(self._tokenizer.token_text, tokens))
        for server in self._servers:
            answer = self._load.ask("once", port=server.port, path=PATH, body=self.body(shot))["answer"]
            whole = answer.count("data: ") == shot.output_tokens + 1 if shot.streamed else text in answer
            if not whole:
                raise PeerError(f"{server.name} answers something else", found=answer[:300])

    def round(self, rows: Sequence[_Rounds]) -> None:
        """One more round of one kind of request through every front end."""
        shot = rows[0].shot
        body = self.body(shot)
        ports = [server.port for server in self._servers]
        took = self._load.ask("in_turn", ports=ports, path=PATH, body=body, n=self._plan.paired_calls)
        pairs = list(zip(took["first_s"], took["total_s"], strict=True))
        for row, pair in zip(rows, pairs[1:], strict=True):
            row.note_pairs(pairs[0], pair)
            assert row.server.pid is not None
            before_s = process_cpu_s(row.server.pid)
            busy = self._load.ask(
                "at_once", port=row.server.port, path=PATH, body=body,
                connections=self._plan.connections, seconds=self._plan.busy_s,
            )  # fmt: skip
            row.cpu_ms.append(1e3 * (process_cpu_s(row.server.pid) - before_s) / busy["answered"])
            row.requests_per_s.append(busy["answered"] / busy["took_s"])


def _cores() -> tuple[list[int], list[int]] | None:
    """One core for what is measured, the others for nodes and clients; None where they cannot be kept apart."""
    mine = sorted(os.sched_getaffinity(0))
    return (mine[:1], mine[1:]) if len(mine) > 1 and shutil.which("taskset") else None


def bench_gateway(
    plan: GatewayPlan,
    tokenizer: TextTokenizer,
    *,
    router_python: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Overhead and requests/s of the gateway, and of vllm-router in front of the same process.

    Args:
        tokenizer: of the demo model, with which the gateway starts.
        router_python: interpreter that has vllm-router; default: this one.

    Raises:
        PrfaasError: a process did not start, or answered something else than the node did.
    """
    cores, notes = _cores(), []
    front, back = cores or (None, None)
    if cores is None:
        notes.append("there is one core, or no taskset: all processes share what there is")
    python = router_python or sys.executable
    version = front_ends.router_version(python)
    with ExitStack() as stack:
        node = stack.enter_context(Child("prfaas_net.bench.instant_node", prefix=front_ends.pinned(back)))
        load = stack.enter_context(Child("prfaas_net.bench.http_load", prefix=front_ends.pinned(back)))
        answer = tokenizer.encode(ANSWER)
        engine_port, *node_ports = node.ask(
            "start", token_ids=answer, texts=[tokenizer.token_text(token) for token in answer],
            vocab_size=1 << 22, max_model_tokens=MAX_MODEL_TOKENS,
        )["ports"]  # fmt: skip
        servers = [
            FrontEnd("direct", engine_port),
            stack.enter_context(front_ends.gateway(node_ports, front)),
            stack.enter_context(front_ends.engine_gateway(engine_port, front)),
        ]
        if version is None:
            notes.append(f"vllm-router is not installed for {python}")
        else:
            try:
                servers.append(stack.enter_context(front_ends.vllm_router(python, engine_port, front)))
            except PrfaasError as error:
                notes.append(error.line())
        bench = _Bench(plan, tokenizer, servers, load)
        table = [[_Rounds(shot, server) for server in servers[1:]] for shot in plan.shots]
        for rows in table:
            bench.check(rows[0].shot)
        for number in range(plan.rounds):
            for rows in table:
                progress(f"round {number + 1} of {plan.rounds}: {rows[0].shot.title}")
                bench.round(rows)
    return _report(table, version, {"front_end": front, "others": back}, notes)


def _report(table: list[list[_Rounds]], version: str | None, cores: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The first kind of request is the headline."""
    rows = [row.to_json() for rows in table for row in rows]
    keys = ("overhead_ms_p50", "overhead_ms_p99", "requests_per_s", "cpu_ms_per_request")
    first, _, *routers = table[0]
    ours, router = first.to_json(), None
    for theirs in routers:
        rates = [our / their for our, their in zip(first.requests_per_s, theirs.requests_per_s, strict=True)]
        added = [our / their for our, their in zip(first.overhead_p50_ms, theirs.overhead_p50_ms, strict=True)]
        told = theirs.to_json()
        router = {
            "version": version,
            **{key: told[key] for key in keys},
            "ours_over_router_requests_per_s": middle(rates),
            "ours_over_router_overhead": middle(added),
        }
    return {**{key: ours[key] for key in keys}, "vllm_router": router, "cores": cores, "rows": rows, "notes": notes}


def show_gateway(report: dict[str, Any], console: Console) -> None:
    """A table for people."""
    front, others = report["cores"]["front_end"], report["cores"]["others"]
    where = "no cores of their own" if front is None else f"front ends on core {front[0]}, the rest on {others}"
    table = Table(title=f"Added to a call that the node answers at once; {where}")
    for name in ("server", "prompt", "answer", "added P50", "P99", "first byte", "requests/s", "range", "CPU/request"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        low, high = row["requests_per_s_range"]
        table.add_row(
            row["server"], f"{row['prompt_tokens']} {row['prompt_as']}",
            f"{row['output_tokens']}{' streamed' if row['streamed'] else ''}",
            *(f"{row[key]:.2f} ms" for key in ("overhead_ms_p50", "overhead_ms_p99", "first_byte_overhead_ms_p50")),
            f"{row['requests_per_s']:,.0f}", f"{low:,.0f}–{high:,.0f}", f"{row['cpu_ms_per_request']:.2f} ms",
        )  # fmt: skip
    console.print(table)
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False)
