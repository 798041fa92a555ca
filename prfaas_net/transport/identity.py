"""Who a process is to its peers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """A name for people, and a boot id that is new at every start."""

    node: str
    boot_id: str = field(default_factory=lambda: secrets.token_hex(16))
