"""A look at a link, and logs of many that can be replayed.

A log is JSON lines: a head with the names of the fields, then an array for each look, with the kernel's own integers.
Nothing is rounded, so a detector that is fed from a log says bit for bit what it said when the log was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.errors import UsageError

__all__ = ["LinkSample", "LogHead", "Mark", "read_log", "write_head", "write_mark", "write_sample"]

_FORMAT, _VERSION = "prfaas-telemetry", 1


class LinkSample(NamedTuple):
    """A link at one moment.

    Attributes:
        at_s: on any monotonic clock.
        alive: whether the peer is there, as far as the link itself knows.
        backlog_bytes: made and not acknowledged by the receiver's application.
        connections: each data connection's number, and what the kernel knows of it.
    """

    at_s: float
    alive: bool
    backlog_bytes: int
    connections: tuple[tuple[int, TcpInfo], ...]


@dataclass(frozen=True)
class LogHead:
    """What holds for a whole log.

    Attributes:
        congestion_control: of the data connections.
        about: anything else that whoever recorded it wants to say, such as the scenario.
    """

    congestion_control: str
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """Something that happened to the link while the log was made, or that only the recorder knew."""

    at_s: float
    what: str
    value: float = 0.0


def write_head(head: LogHead) -> bytes:
    """The first line."""
    return orjson.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "congestion_control": head.congestion_control,
            "about": head.about,
            "fields": TcpInfo._fields,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def write_sample(sample: LinkSample) -> bytes:
    """One line."""
    rows = [[number, *info] for number, info in sample.connections]
    return orjson.dumps([sample.at_s, sample.alive, sample.backlog_bytes, rows], option=orjson.OPT_APPEND_NEWLINE)


def write_mark(mark: Mark) -> bytes:
    """One line."""
    return orjson.dumps({"mark": mark.what, "at_s": mark.at_s, "value": mark.value}, option=orjson.OPT_APPEND_NEWLINE)


def read_log(lines: Iterable[bytes]) -> tuple[LogHead, Iterator[LinkSample | Mark]]:
    """The head, and what follows it. A field that the log does not have is 0.

    Raises:
        UsageError: it is not such a log; also while what follows is read.
    """
    rest = iter(lines)
    head = _parse(next(rest, b""))
    if not isinstance(head, dict) or head.get("format") != _FORMAT or head.get("version") != _VERSION:
        raise UsageError("not a telemetry log", expected=f"{_FORMAT} version {_VERSION}", found=str(head)[:80])
    places = [head["fields"].index(name) + 1 if name in head["fields"] else None for name in TcpInfo._fields]
    return LogHead(head["congestion_control"], head["about"]), (_entry(_parse(line), places) for line in rest)


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError("a line of a telemetry log is not JSON", found=str(error)) from error


def _entry(item: Any, places: list[int | None]) -> LinkSample | Mark:
    try:
        if isinstance(item, dict):
            return Mark(item["at_s"], item["mark"], item["value"])
        at_s, alive, backlog_bytes, rows = item
        infos = ((row[0], TcpInfo._make(0 if at is None else row[at] for at in places)) for row in rows)
        return LinkSample(at_s, alive, backlog_bytes, tuple(infos))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError("a line of a telemetry log has the wrong shape", found=str(item)[:80]) from error
