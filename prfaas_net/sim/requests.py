"""Where requests come from: distributions, and traces in the formats in which they are published."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from random import Random

import orjson

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import LengthDistribution

__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "SimRequest",
    "at_rate",
    "azure_trace",
    "mooncake_conversation",
    "mooncake_trace",
    "poisson",
    "read_trace",
    "uncached_tokens",
    "with_jitter",
]

# Mooncake's traces name blocks of 512 tokens (WORKLOAD of the trace: len(hash_ids) == ceil(input_length / 512)).
MOONCAKE_BLOCK_TOKENS = 512
# How finely a distribution is tabulated; drawing from a table is several times faster than from its formula.
TABLE_POINTS = 20_000


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload.

    Attributes:
        at_s: when it arrives.
        block_ids: of its prompt, each naming its whole prefix; empty where nothing is known of reuse.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def poisson(
    lengths: LengthDistribution, output_tokens: int, *, rate_req_s: float, count: int, seed: int
) -> Iterator[SimRequest]:
    """``count`` requests that arrive as a Poisson process, with lengths from a distribution."""
    table = [max(1, round(lengths.quantile((i + 0.5) / TABLE_POINTS))) for i in range(TABLE_POINTS)]
    rng = Random(seed)
    draw, gap, points, now = rng.random, rng.expovariate, TABLE_POINTS, 0.0
    for _ in range(count):
        now += gap(rate_req_s)
        yield SimRequest(now, table[int(draw() * points)], output_tokens)


def mooncake_trace(lines: Iterable[bytes | str]) -> Iterator[SimRequest]:
    """Mooncake's JSON lines: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``.

    Raises:
        ConfigError: a line is not of that form.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            yield SimRequest(
                row["timestamp"] / 1000.0,
                max(1, int(row["input_length"])),
                max(1, int(row["output_length"])),
                tuple(row.get("hash_ids", ())),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "not a line of a Mooncake trace",
                expected='{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}',
                found=f"line {number}: {error}",
            ) from error


def azure_trace(lines: Iterable[str]) -> Iterator[SimRequest]:
    """Azure's CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``; times count from the first row.

    Raises:
        ConfigError: the header or a row is not of that form.
    """
    rows = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(rows.fieldnames or ()):
        raise ConfigError("not an Azure trace", expected=f"columns {', '.join(sorted(wanted))}", found=rows.fieldnames)
    first: datetime | None = None
    for number, row in enumerate(rows, start=2):
        try:
            # Seven digits of a second are written; six can be read.
            text = row["TIMESTAMP"].strip()
            head, _, digits = text.partition(".")
            at = datetime.fromisoformat(f"{head}.{digits[:6].ljust(6, '0')}" if digits else head)
            first = first or at
            yield SimRequest(
                (at - first).total_seconds(), max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError("not a row of an Azure trace", found=f"line {number}: {error}") from error


def read_trace(path: Path) -> list[SimRequest]:
    """A trace file, by its name: ``.jsonl`` is Mooncake's, ``.csv`` Azure's; ``.gz`` on top of either.

    Raises:
        ConfigError: it cannot be read, or is of neither form.
    """
    name = path.name.removesuffix(".gz")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read the trace {path}", found=error) from error
    if name.endswith(".jsonl"):
        found = list(mooncake_trace(raw.splitlines()))
    elif name.endswith(".csv"):
        found = list(azure_trace(io.StringIO(raw.decode())))
    else:
        raise ConfigError("unknown kind of trace", expected="a name that ends in .jsonl or .csv (or .gz)", found=path)
    if not found:
        raise ConfigError(f"the trace {path} is empty", expected="at least one request")
    return sorted(found, key=lambda request: request.at_s)


def with_jitter(requests: Sequence[SimRequest], tick_s: float, seed: int) -> list[SimRequest]:
    """Spread requests evenly over the clock tick to which a trace has rounded them (Mooncake's: 3 s)."""
    rng = Random(seed)
    return sorted((replace(r, at_s=r.at_s + rng.random() * tick_s) for r in requests), key=lambda r: r.at_s)


def at_rate(requests: Sequence[SimRequest], rate_req_s: float) -> list[SimRequest]:
    """The same requests, time stretched so that they come at this mean rate."""
    span_s = requests[-1].at_s - requests[0].at_s
    if span_s <= 0 or rate_req_s <= 0:
        raise ConfigError("a trace needs a span of time to be brought to a rate", found=f"{len(requests)} requests")
    factor = (len(requests) / rate_req_s) / span_s
    start = requests[0].at_s
    return [replace(r, at_s=(r.at_s - start) * factor) for r in requests]


def mooncake_conversation() -> list[SimRequest]:
    """Mooncake's conversation trace, which the package brings along: 12,031 requests of an hour, with the blocks that
    they share. Its times are rounded to 3 s; see :func:`with_jitter`."""
    packed = resources.files("prfaas_net.sim").joinpath("data/mooncake_conversation.runs.jsonl.gz").read_bytes()
    found = []
    for line in gzip.decompress(packed).splitlines():
        at_ms, prompt_tokens, output_tokens, runs = orjson.loads(line)
        blocks = tuple(block for first, count in runs for block in range(first, first + count))
        found.append(SimRequest(at_ms / 1000.0, prompt_tokens, output_tokens, blocks))
    return found


def uncached_tokens(requests: Iterable[SimRequest]) -> list[int]:
    """What has to be computed of every prompt where everything that was seen before is still cached."""
    seen: set[int] = set()
    found = []
    for request in requests:
        count = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            count += 1
        seen.update(request.block_ids)
        found.append(max(1, request.prompt_tokens - count * MOONCAKE_BLOCK_TOKENS))
    return found
