"""How everything of the laboratory that lives outside of its process is named, so that a later one can sweep it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from prfaas_net.bench import namespaces

__all__ = ["PREFIX", "sweep"]

PREFIX = "prfaas-netlab-"


def sweep() -> list[str]:
    """Take away what killed laboratories have left: namespaces, what runs in them, directories; their names."""
    return namespaces.sweep(PREFIX, Path(tempfile.gettempdir()))
