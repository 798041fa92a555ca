"""One run's figures, and what several runs beside a reference come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["Case", "Comparison", "Sample", "mean_sample", "middle"]


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        goodput_bps: payload, landed.
        sender_cpu_s_per_gib: user and system time, all threads.
    """

    goodput_bps: float
    sender_cpu_s_per_gib: float
    receiver_cpu_s_per_gib: float

    @property
    def cpu_s_per_gib(self) -> float:
        """Both sides."""
        return self.sender_cpu_s_per_gib + self.receiver_cpu_s_per_gib


def mean_sample(samples: Sequence[Sample]) -> Sample | None:
    """Between the references before and after a run; None without any."""
    n = len(samples)
    if not n:
        return None
    return Sample(
        sum(s.goodput_bps for s in samples) / n,
        sum(s.sender_cpu_s_per_gib for s in samples) / n,
        sum(s.receiver_cpu_s_per_gib for s in samples) / n,
    )


def middle(values: Sequence[float], digits: int = 3) -> float | None:
    """The median, or None without values."""
    return round(median(values), digits) if values else None


@dataclass(frozen=True)
class Case:
    """What is varied."""

    connections: int
    chunk_bytes: int
    checksum: bool
    tls: bool = False


@dataclass
class Comparison:
    """Rounds of one case, each with the reference beside it.

    Attributes:
        reference: with the host's congestion control; ``alike`` with ours, less often and less close in time.
    """

    case: Case
    ours: list[Sample] = field(default_factory=list)
    reference: list[Sample] = field(default_factory=list)
    alike: list[Sample] = field(default_factory=list)

    def add(self, ours: Sample, reference: Sample | None) -> None:
        self.ours.append(ours)
        if reference is not None:
            self.reference.append(reference)

    def to_json(self) -> dict[str, Any]:
        """Medians; ratios are taken within each round, so that a machine that slows down does so for both."""
        pairs = list(zip(self.ours, self.reference, strict=False))
        ratios = [ours.goodput_bps / theirs.goodput_bps for ours, theirs in pairs]
        cpu = [ours.cpu_s_per_gib / theirs.cpu_s_per_gib for ours, theirs in pairs]
        alike = list(zip(self.ours, self.alike, strict=False))
        return {
            "connections": self.case.connections,
            "chunk_bytes": self.case.chunk_bytes,
            "checksum": self.case.checksum,
            "tls": self.case.tls,
            "goodput_bps": middle([s.goodput_bps for s in self.ours], 0),
            "iperf3_bps": middle([s.goodput_bps for s in self.reference], 0),
            "goodput_over_iperf3": middle(ratios),
            "goodput_over_iperf3_range": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
            "cpu_s_per_gib": middle([s.cpu_s_per_gib for s in self.ours]),
            "cpu_over_iperf3": middle(cpu),
            "goodput_over_iperf3_alike": middle([ours.goodput_bps / theirs.goodput_bps for ours, theirs in alike]),
            "cpu_over_iperf3_alike": middle([ours.cpu_s_per_gib / theirs.cpu_s_per_gib for ours, theirs in alike]),
            "sender_cpu_s_per_gib": middle([s.sender_cpu_s_per_gib for s in self.ours]),
            "receiver_cpu_s_per_gib": middle([s.receiver_cpu_s_per_gib for s in self.ours]),
            "rounds": len(self.ours),
        }
