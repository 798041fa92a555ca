"""Logs: one event a line on standard error, as text or as JSON, each with the request that it is about.

Whoever works on a request says so once, with :func:`about`; every line that is written in that block, and in tasks that
are started in it, carries the names given there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TextIO

import orjson
from pydantic import BaseModel, Field, SecretStr

from prfaas_net.config import Section

__all__ = ["LogSection", "about", "secrets_of", "set_up_logs"]

Level = Literal["debug", "info", "warning", "error"]

# Our packages; everything else is heard from ``warning`` on.
_OURS = ("prfaas_net", "engine")
# A shorter one may be part of a word.
_SHORTEST_SECRET = 8
_HIDDEN = "[secret]"
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\\t"}

_subject: ContextVar[Mapping[str, str]] = ContextVar("subject", default={})  # noqa: B039 - never written to


class LogSection(Section):
    """``[log]``: what is written to standard error.

    Attributes:
        format: ``json``: one object a line, for machines.
        level: the least that is written of our own.
        levels: of single loggers, by name, such as ``{"prfaas_net.gateway.fleet" = "debug"}``; of libraries as well.
    """

    format: Literal["text", "json"] = "text"
    level: Level = "info"
    levels: dict[str, Level] = Field(default_factory=dict)


@contextmanager
def about(**names: str) -> Iterator[None]:
    """What happens in this block is about these: ``about(request_id="r-17")``."""
    token = _subject.set({**_subject.get(), **names})
    try:
        yield
    finally:
        _subject.reset(token)


def secrets_of(model: BaseModel) -> list[str]:
    """Every secret of a configuration, at any depth."""
    found: list[str] = []

    def look(value: object) -> None:
        if isinstance(value, SecretStr):
            found.append(value.get_secret_value())
        elif isinstance(value, BaseModel):
            for name in type(value).model_fields:
                look(getattr(value, name))
        elif isinstance(value, Mapping):
            for item in value.values():
                look(item)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                look(item)

    look(model)
    return found


def set_up_logs(
    section: LogSection, who: Mapping[str, str], secrets: list[str], stream: TextIO | None = None
) -> logging.Handler:
    """Send the logs of this process to standard error; may be called again, with other settings.

    Args:
        who: names of this process, such as its node's; part of every JSON line.
        secrets: are never written, whatever a message contains.
        stream: instead of standard error.

    Returns:
        The handler, which is the root logger's now.
    """
    handler = _Handler(stream or sys.stderr)
    form = _JsonLines if section.format == "json" else _TextLines
    handler.setFormatter(form(dict(who), [s for s in secrets if len(s) >= _SHORTEST_SECRET]))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(section.level.upper())
    for name, level in section.levels.items():
        logging.getLogger(name).setLevel(level.upper())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that it is told from those of others."""


class _Lines(logging.Formatter):
    def __init__(self, who: dict[str, str], secrets: list[str]) -> None:
        super().__init__()
        self._who = who
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record, _subject.get())
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line

    def _line(self, record: logging.LogRecord, subject: Mapping[str, str]) -> str:
        raise NotImplementedError

    def _when(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = divmod(round(record.created * 1000), 1000)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"

    def _trace(self, record: logging.LogRecord) -> str | None:
        return self.formatException(record.exc_info) if record.exc_info else None


class _TextLines(_Lines):
    """For people. What a message quotes cannot begin a line of its own; only tracebacks have several."""

    def _line(self, record: logging.LogRecord, subject: Mapping[str, str]) -> str:
        names = "".join(f" {name}={value}" for name, value in subject.items())
        text = f"{self._when(record)} {record.levelname:<7} {record.name}{names}: {record.getMessage()}"
        trace = self._trace(record)
        return text.translate(_CONTROL) + (f"\n{trace}" if trace else "")


class _JsonLines(_Lines):
    """For machines: ``{"ts", "level", "logger", "message", ...}`` and the names of process and request."""

    def _line(self, record: logging.LogRecord, subject: Mapping[str, str]) -> str:
        body = {
            "ts": self._when(record), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **self._who, **subject,
        }  # fmt: skip
        trace = self._trace(record)
        return orjson.dumps(body | ({"exception": trace} if trace else {}), default=str).decode()
