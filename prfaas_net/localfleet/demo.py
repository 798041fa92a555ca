"""The demonstration: two real documents through the fleet, each compared with a single-process run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prfaas_net.localfleet.client import Answer
from prfaas_net.units import format_bytes, format_duration

__all__ = ["DemoRow", "make_row", "print_table", "print_texts", "report", "write_report"]

# Runs a prompt in this process, greedily: token ids in, token ids out.
Reference = Callable[[str, int], Sequence[int]]


@dataclass(frozen=True)
class DemoRow:
    """One request of the demonstration; the fields are the keys of ``build/demo.json``.

    Attributes:
        incremental_tokens: ``l`` of the paper, compared with ``threshold_tokens``, ``t`` (None: the policy has none).
        exposed_s: how much of the transfer was left when prefill had ended, the confirmation's way back included.
        identical: the answer equals that of a single-process run, token for token.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    incremental_tokens: int
    threshold_tokens: int | None
    prefilled_in: str
    kv_bytes: dict[str, int]
    connections: int
    prefill_s: float
    transfer_s: float
    exposed_s: float
    ttft_s: float
    output_tokens: int
    identical: bool


def make_row(name: str, answer: Answer, reference: Sequence[int]) -> DemoRow:
    """What the gateway recorded, and whether the answer is the reference."""
    fields = DemoRow.__dataclass_fields__.keys() - {"name", "identical", "ttft_s"}
    return DemoRow(
        name=name,
        ttft_s=round(answer.ttft_s, 6),
        identical=answer.token_ids == list(reference),
        **{field: answer.record[field] for field in fields},
    )


def report(rows: Sequence[DemoRow], processes: int) -> dict[str, Any]:
    """The content of ``build/demo.json``."""
    return {"processes": processes, "requests": [vars(row) for row in rows]}


def write_report(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def _columns(row: DemoRow) -> list[tuple[str, str]]:
    """The table stands on its side: a line a property, a column a request."""
    where = "PrfaaS cluster" if row.prefilled_in == "prfaas" else "local PD cluster"
    same = "[green]identical[/]" if row.identical else "[bold red]DIFFERENT[/]"
    return [
        ("prompt", f"{row.prompt_tokens:,} tokens ({row.cached_tokens} cached)"),
        ("prefilled in", f"[bold]{where}[/]"),
        ("because", _because(row)),
        ("KVCache moved", format_bytes(sum(row.kv_bytes.values()))),
        *((f"  {kind}", format_bytes(n)) for kind, n in row.kv_bytes.items()),
        ("connections used", str(row.connections)),
        ("prefill", format_duration(row.prefill_s)),
        ("transfer", format_duration(row.transfer_s)),
        ("  exposed after prefill", format_duration(row.exposed_s)),
        ("TTFT", f"[bold]{format_duration(row.ttft_s)}[/]"),
        ("answer", f"{row.output_tokens} tokens"),
        ("single-process run", same),
    ]


def _because(row: DemoRow) -> str:
    if row.threshold_tokens is None:
        return "ready sooner there"
    sign = ">" if row.incremental_tokens > row.threshold_tokens else "≤"
    return f"l = {row.incremental_tokens:,} {sign} t = {row.threshold_tokens:,}"


def print_table(console: Console, rows: Sequence[DemoRow]) -> None:
    """One table over all requests."""
    table = Table(title="Where each document was prefilled, and what it took", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row.name, justify="right")
    for cells in zip(*map(_columns, rows), strict=True):
        table.add_row(cells[0][0], *(text for _, text in cells))
    console.print(table)


def print_texts(console: Console, texts: Sequence[tuple[str, str]]) -> None:
    """Prompt ends and their continuations."""
    for end, text in texts:
        shown = " ".join(text.split())
        console.print(f"  [dim]… {escape(end)}[/] {escape(shown)}", highlight=False)
