"""What a simulation found: every request's times, and figures with how sure they are."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling import Instruction

__all__ = ["Figures", "SimResult"]

# Requests at the beginning that are left out: the fleet starts empty.
WARM_UP_SHARE = 0.1
# Consecutive batches whose means are taken to be independent, for the confidence interval (batch means).
BATCHES = 20
# Two-sided 95 % of Student's t with 19 degrees of freedom.
T_95 = 2.093
# Width of a point of a plot over time.
BUCKET_S = 10.0
# Verdicts that speak against giving a link more work.
TROUBLED = (LinkState.BUILDING, LinkState.CONGESTED, LinkState.DOWN)


@dataclass(frozen=True)
class Figures:
    """Summary of a run, times in seconds.

    Attributes:
        mean_ci, p90_ci: half width of the 95 % interval, by batch means.
        goodput_req_s: requests/s whose first token came within the limit.
        throughput_req_s: requests/s that were prefilled and landed, while requests arrived.
        link_use: share of what the links carried that was used.
    """

    requests: int
    mean: float
    mean_ci: float
    p50: float
    p90: float
    p90_ci: float
    p99: float
    goodput_req_s: float
    throughput_req_s: float
    offloaded_share: float
    shed_share: float
    link_use: float
    prediction_error_s: float


@dataclass
class SimResult:
    """One run.

    Attributes:
        arrived_s, ttft_s: of every request that got a first token, in order of that.
        offloaded: 1 for those that a PrfaaS cluster prefilled.
        error_s: of the prediction, absolute.
        shed: arrivals that were refused; ``lost``: requests that nobody could serve.
        link_bits: by time bucket, over all links; ``link_capacity_bits`` what they carried.
        thresholds: (time, t) whenever it changed.
        instructions: (time, what) of the planner.
        verdicts: by link, (time, state) whenever the detector has said another.
        stale_matches: requests that found more or less cached than the gateway believed.
        events: things done on the virtual clock.
    """

    seconds: float = 0.0
    arrivals: int = 0
    shed: int = 0
    lost: int = 0
    retried: int = 0
    finished: int = 0
    stale_matches: int = 0
    events: int = 0
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    error_s: array[float] = field(default_factory=lambda: array("d"))
    offloaded: bytearray = field(default_factory=bytearray)
    link_bits: list[float] = field(default_factory=list)
    link_capacity_bits: list[float] = field(default_factory=list)
    thresholds: list[tuple[float, int]] = field(default_factory=list)
    instructions: list[tuple[float, Instruction]] = field(default_factory=list)
    verdicts: dict[str, list[tuple[float, LinkState]]] = field(default_factory=dict)

    def figures(self, *, ttft_limit_s: float = math.inf) -> Figures:
        """The summary, without the warm-up."""
        arrived, ttft, remote = np.asarray(self.arrived_s), np.asarray(self.ttft_s), np.frombuffer(
            bytes(self.offloaded), dtype=np.uint8
        )  # fmt: skip
        order = np.argsort(arrived, kind="stable")[int(len(arrived) * WARM_UP_SHARE) :]
        arrived, ttft, remote = arrived[order], ttft[order], remote[order]
        if not len(ttft):
            nan, shed = math.nan, self.shed / max(1, self.arrivals)
            return Figures(0, nan, nan, nan, nan, nan, nan, 0.0, 0.0, 0.0, shed, 0.0, nan)
        span_s = max(1e-9, float(arrived[-1] - arrived[0]))
        within = arrived + ttft <= arrived[-1]
        return Figures(
            requests=len(ttft),
            mean=float(ttft.mean()),
            mean_ci=_half_width([float(batch.mean()) for batch in _batches(ttft)]),
            p50=float(np.quantile(ttft, 0.5)),
            p90=float(np.quantile(ttft, 0.9)),
            p90_ci=_half_width([float(np.quantile(batch, 0.9)) for batch in _batches(ttft)]),
            p99=float(np.quantile(ttft, 0.99)),
            goodput_req_s=float((ttft <= ttft_limit_s).sum()) / span_s,
            throughput_req_s=float(within.sum()) / span_s,
            offloaded_share=float(remote.mean()),
            shed_share=self.shed / max(1, self.arrivals),
            link_use=sum(self.link_bits) / max(1.0, sum(self.link_capacity_bits)),
            prediction_error_s=float(np.mean(self.error_s)) if self.error_s else math.nan,
        )

    def landed_between(self, start_s: float, end_s: float) -> int:
        """Requests whose KVCache landed within a time."""
        landed = np.asarray(self.arrived_s) + np.asarray(self.ttft_s)
        return int(((landed >= start_s) & (landed < end_s)).sum())

    def troubled(self) -> list[tuple[float, float]]:
        """When the detector spoke against a link, as (begin, end)."""
        spans = []
        for verdicts in self.verdicts.values():
            ends = [at_s for at_s, _ in verdicts[1:]] + [self.seconds]
            spans += [(at_s, end_s) for (at_s, state), end_s in zip(verdicts, ends, strict=True) if state in TROUBLED]
        return sorted(spans)

    def timeline(self) -> dict[str, list[Any]]:
        """By bucket of time: share offloaded and link use, for plots."""
        arrived = np.asarray(self.arrived_s)
        remote = np.frombuffer(bytes(self.offloaded), dtype=np.uint8).astype(float)
        count = int(self.seconds // BUCKET_S) + 1
        bucket = np.minimum((arrived // BUCKET_S).astype(int), count - 1)
        total = np.bincount(bucket, minlength=count)
        share = np.bincount(bucket, weights=remote, minlength=count) / np.maximum(1, total)
        use = [b / c if c else 0.0 for b, c in zip(self.link_bits, self.link_capacity_bits, strict=True)]
        use += [0.0] * (count - len(use))
        return {
            "at_s": [i * BUCKET_S for i in range(count)],
            "offloaded_share": [round(float(x), 4) for x in share],
            "link_use": [round(x, 4) for x in use[:count]],
        }


def _batches(values: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [b for b in np.array_split(values, BATCHES) if len(b)]


def _half_width(means: list[float]) -> float:
    if len(means) < 2:
        return math.nan
    return T_95 * float(np.std(means, ddof=1)) / math.sqrt(len(means))
