"""What the congestion bench records: a matrix of paths, controls and competitors, each with several seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas_net.bench.congestion_flows import Case, Competitor
from prfaas_net.bench.plan import Path

__all__ = ["FULL", "QUICK", "CongestionPlan", "Spot", "cases_of"]

RATE_BPS = 200_000_000
CONNECTIONS = 4
# Where a competitor comes, we send so much of what the path carries; where none does, each of these in turn.
LOAD = 0.7
LOADS_ALONE = (0.5, 0.6, 0.7, 0.8, 0.85)
# Before this a recording is not judged: the flows start, and the detectors have nothing to compare with.
WARM_S = 1.0
COMPETITOR_AT_S, COMPETITOR_S, RAMP_S, AFTER_S = (1.8, 2.2), 2.5, 1.5, 1.8
# What a ramping competitor comes to.
RAMP_TO = 0.8


@dataclass(frozen=True)
class Spot:
    """One path of the matrix, with its queue."""

    rtt_ms: int
    queue_bdp: float

    @property
    def path(self) -> Path:
        return Path(RATE_BPS, self.rtt_ms / 1e3, 0.0)

    @property
    def queue_bytes(self) -> int:
        return int(self.path.bdp_bytes * self.queue_bdp)


@dataclass(frozen=True)
class CongestionPlan:
    """How much is recorded.

    Attributes:
        seeds: of each cell.
    """

    controls: tuple[str, ...]
    spots: tuple[Spot, ...]
    competitors: tuple[str, ...]
    seeds: tuple[int, ...]


_ALL = tuple(Spot(rtt_ms, queue) for rtt_ms in (10, 40, 80) for queue in (0.25, 1.0, 4.0))
FULL = CongestionPlan(("cubic", "bbr"), _ALL, ("none", "abrupt", "ramping"), (1, 2, 3, 4, 5))
QUICK = CongestionPlan(
    ("cubic", "bbr"),
    (Spot(10, 1.0), Spot(40, 0.25), Spot(40, 1.0), Spot(80, 4.0)),
    ("none", "abrupt", "ramping"),
    (1, 2),
)


def cases_of(plan: CongestionPlan, spot: Spot) -> Iterator[tuple[str, Case]]:
    """Every recording on one path, with a name for it."""
    for seed in plan.seeds:
        for control in plan.controls:
            for competitor in plan.competitors:
                name = f"{control}-{spot.rtt_ms}ms-{spot.queue_bdp:g}bdp-{competitor}-{seed}"
                yield name, _case(spot, control, competitor, seed, plan.seeds)


def _case(spot: Spot, control: str, competitor: str, seed: int, seeds: Sequence[int]) -> Case:
    rng = random.Random(f"{spot} {control} {competitor} {seed}")
    start_s = rng.uniform(*COMPETITOR_AT_S)
    stop_s = start_s + COMPETITOR_S
    load = LOAD if competitor != "none" else LOADS_ALONE[seeds.index(seed) % len(LOADS_ALONE)]
    about: dict[str, Any] = {
        "rate_bps": RATE_BPS, "rtt_ms": spot.rtt_ms, "queue_bdp": spot.queue_bdp, "competitor": competitor,
        "load": load, "seed": seed,
    }  # fmt: skip
    rival = Competitor(competitor, start_s, stop_s, rate_bps=RAMP_TO * RATE_BPS, ramp_s=RAMP_S)
    return Case(control, CONNECTIONS, int(load * RATE_BPS), stop_s + AFTER_S, rival, rng.getrandbits(32), about)
