"""A router's log as JSON lines, and the same log played into another router: the same decisions, or a difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from pydantic import TypeAdapter

from prfaas_net.errors import BusyError, ConfigError, RefusedError
from prfaas_net.scheduling import events
from prfaas_net.scheduling.events import Arrival, Decision, FleetEvent
from prfaas_net.scheduling.router import Router

__all__ = ["dump_log", "load_log", "replay"]

Logged = tuple[float, "Arrival | Decision | FleetEvent"]
_KINDS: dict[str, Any] = {name: getattr(events, name) for name in events.__all__ if name != "FleetEvent"}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def dump_log(log: Iterable[Logged]) -> bytes:
    """One JSON object a line: ``{"now": ..., "event": "NodeSeen", ...}``."""
    lines = [
        orjson.dumps({"now": now, "event": type(event).__name__, **_ADAPTERS[type(event).__name__].dump_python(event)})
        for now, event in log
    ]
    return b"\n".join(lines) + (b"\n" if lines else b"")


def load_log(data: bytes) -> list[Logged]:
    """The inverse of :func:`dump_log`.

    Raises:
        ConfigError: a line is not one of ours.
    """
    found: list[Logged] = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            body = orjson.loads(line)
            now, kind = body.pop("now"), body.pop("event")
            found.append((float(now), _ADAPTERS[kind].validate_python(body)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "not a line of a router's log", expected="an object with now and event", found=f"line {number}"
            ) from error
    return found


def replay(log: Iterable[Logged], router: Router) -> Iterator[tuple[Decision, Decision | None]]:
    """Play a log into a fresh router and yield each decision of the log beside the one that it makes now.

    The log must be whole, from the router's first event on, and the policy made from the same settings.
    """
    made: dict[str, Decision] = {}
    for now, event in log:
        if isinstance(event, Arrival):
            try:
                made[event.request_id] = router.decide(event, now=now)
            except (BusyError, RefusedError):
                made.pop(event.request_id, None)
        elif isinstance(event, Decision):
            yield event, made.get(event.request_id)
        else:
            router.observe(event, now=now)
