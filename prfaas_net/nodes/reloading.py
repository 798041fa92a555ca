"""Reading a configuration anew while its daemon serves: what takes effect at once, and what only a restart changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from prfaas_net.errors import ConfigError

__all__ = ["Change", "change_of", "read_anew"]

_Config = TypeVar("_Config", bound=BaseModel)


@dataclass(frozen=True)
class Change(Generic[_Config]):
    """What a new file changes.

    Attributes:
        config: in force from now on.
        applied: names of what has changed in it.
        needs_restart: names of what is another in the file, but not in force.
    """

    config: _Config
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """One word, for a counter."""
        return "applied" if self.applied else "unchanged"

    def line(self) -> str:
        """For a log."""
        cold = f"; not before a restart: {', '.join(self.needs_restart)}" if self.needs_restart else ""
        return (", ".join(self.applied) or "nothing has changed") + cold

    def to_json(self) -> dict[str, Any]:
        return {"applied": list(self.applied), "needs_restart": list(self.needs_restart)}


def change_of(old: _Config, new: _Config, hot: Sequence[str]) -> Change[_Config]:
    """From the configuration in force to the one in the file.

    Args:
        hot: names of what can change while the daemon serves; ``kv.budget`` is one in a table.
    """
    config, applied, cold = _mix(old, new, hot, "")
    return Change(config, tuple(applied), tuple(cold))


def _mix(old: _Config, new: _Config, hot: Sequence[str], prefix: str) -> tuple[_Config, list[str], list[str]]:
    taken: dict[str, Any] = {}
    applied, cold = [], []
    for field in type(old).model_fields:
        name, before, after = f"{prefix}{field}", getattr(old, field), getattr(new, field)
        if before == after:
            continue
        if name in hot:
            taken[field] = after
            applied.append(name)
        elif any(known.startswith(f"{name}.") for known in hot):
            taken[field], below, below_cold = _mix(before, after, hot, f"{name}.")
            applied += below
            cold += below_cold
        else:
            cold.append(name)
    return old.model_copy(update=taken), applied, cold


async def read_anew(reread: Callable[[], _Config] | None) -> _Config:
    """The configuration, as its file says now.

    Raises:
        ConfigError: something in it does not fit, or there is no file.
    """
    if reread is None:
        raise ConfigError("there is no file to read anew", do="start with --config FILE")
    return await asyncio.to_thread(reread)
