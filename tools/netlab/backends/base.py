"""What every backend can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tools.netlab.settings import Counters, Way

__all__ = ["Backend", "End"]


@dataclass(frozen=True)
class End:
    """One side of a link: a namespace, and the address of the link's device in it."""

    space: str
    address: str


class Backend(Protocol):
    """A link between two namespaces. ``start`` once, then ``apply`` as often as you like; always ``close``."""

    name: str

    def start(self, router: str, ends: tuple[End, End]) -> None:
        """Make the devices; ``router`` is a namespace of the backend's own."""
        ...

    def apply(self, ways: dict[str, Way]) -> None:
        """Bring both ways to these settings; they are in force when it returns."""
        ...

    def counters(self) -> dict[str, Counters]:
        """Of both ways."""
        ...

    def close(self) -> None:
        """End every process; the namespaces, and the devices in them, are the caller's to remove."""
        ...
