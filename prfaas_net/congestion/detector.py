"""The interface that every detector stands behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.verdict import Verdict

__all__ = ["Detector"]


class Detector(ABC):
    """Looks at a link in, verdicts out. ``sample.at_s`` is all it knows of time.

    Args:
        congestion_control: of the data connections, by the kernel's name.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, congestion_control: str) -> None: ...

    @abstractmethod
    def observe(self, sample: LinkSample) -> Verdict:
        """Take a look at the link; what it is doing now."""
