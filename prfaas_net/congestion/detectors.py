"""Every detector by its name, and what one makes of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prfaas_net.congestion.detector import Detector
from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.samples import LinkSample, LogHead, Mark
from prfaas_net.congestion.simple import LossShare, RttIncreasing, RttRatio
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import ConfigError

__all__ = ["DETECTORS", "make_detector", "replay"]

# The first is the one that links use; the others are there to be compared with.
DETECTORS: dict[str, type[Detector]] = {cls.name: cls for cls in (PathDetector, RttRatio, LossShare, RttIncreasing)}


def make_detector(name: str, congestion_control: str) -> Detector:
    """The detector of that name.

    Raises:
        ConfigError: there is none.
    """
    cls = DETECTORS.get(name)
    if cls is None:
        raise ConfigError("unknown detector", expected=f"one of {', '.join(DETECTORS)}", found=repr(name))
    return cls(congestion_control)


def replay(name: str, head: LogHead, entries: Iterable[LinkSample | Mark]) -> Iterator[Verdict]:
    """What a fresh detector says of a log; the same every time."""
    detector = make_detector(name, head.congestion_control)
    for entry in entries:
        if isinstance(entry, LinkSample):
            yield detector.observe(entry)
