"""What is simulated: clusters, links, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from prfaas_net.scheduling import KvSize, NodeProfile

__all__ = ["ClusterSpec", "FleetSpec", "LinkSpec", "NodeFailure", "bursty", "drop", "steady"]

# A TB of host memory on each of the case study's smaller clusters' machines.
CACHE_BYTES = 4e12


@dataclass(frozen=True)
class ClusterSpec:
    """Instances of one kind.

    Attributes:
        decode: 0 makes it a PrfaaS cluster.
        room_bytes: for KVCache on every decode node; None is room without end.
        cache_bytes: of its prefix cache, over all its machines; 0 caches nothing.
        speed: of its prefill nodes against their profile; the router is told nothing of it.
        noise: relative standard deviation of every prefill.
    """

    name: str
    profile: NodeProfile
    prefill: int
    decode: int = 0
    room_bytes: float | None = None
    cache_bytes: float = CACHE_BYTES
    speed: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True)
class LinkSpec:
    """A link between two clusters.

    Attributes:
        steps: (time, bits/s that it carries from then on), rising in time; the first is at 0.
        budget_bps: what KVCache may use; by default the largest that it carries.
        rivals: what it does not carry is taken by others, who queue; otherwise it is just not there.
    """

    source: str
    destination: str
    steps: tuple[tuple[float, float], ...]
    rtt_s: float = 0.0
    budget_bps: float | None = None
    rivals: bool = False

    @property
    def best_bps(self) -> float:
        """The most that it ever carries."""
        return max(bps for _, bps in self.steps)


@dataclass(frozen=True)
class NodeFailure:
    """A node dies and comes back, without what it had; None: it stays away."""

    node_id: str
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True)
class FleetSpec:
    """Everything but the requests and the policy.

    Attributes:
        kv: S_kv(l) of the model.
        pipelined: whether a layer's KVCache leaves while the next one computes; else it is sent after the prefill, as
            the paper's table 6 counts it.
        local_bps: rate inside a cluster; 0: transfers there cost nothing.
        report_s: how often a node tells of its links though nothing happened; without a detector, how long the router
            does not know of a change.
        cached: whether prefixes are reused.
        feed_s: from a change of a cache until the gateway has heard of it.
    """

    clusters: tuple[ClusterSpec, ...]
    links: tuple[LinkSpec, ...]
    kv: KvSize
    pipelined: bool = True
    local_bps: float = 0.0
    report_s: float = 0.25
    cached: bool = False
    feed_s: float = 0.05
    failures: tuple[NodeFailure, ...] = ()

    @property
    def max_tokens(self) -> int:
        """No prompt of any workload is longer."""
        return 1 << 30


def steady(bps: float) -> tuple[tuple[float, float], ...]:
    """A link that always carries the same."""
    return ((0.0, bps),)


def drop(bps: float, low_bps: float, *, at_s: Sequence[float], for_s: float) -> tuple[tuple[float, float], ...]:
    """A link that falls to ``low_bps`` at each of these times, for a while."""
    steps = [(0.0, bps)]
    for start in at_s:
        steps += [(start, low_bps), (start + for_s, bps)]
    return tuple(steps)


def bursty(
    bps: float, busy_bps: float, *, on_s: float, off_s: float, until_s: float, seed: int
) -> tuple[tuple[float, float], ...]:
    """A link with cross traffic that comes and goes: exponential on and off times; ``busy_bps`` is left while it is
    on."""
    rng, now, steps = Random(seed), 0.0, [(0.0, bps)]
    while now < until_s:
        now += rng.expovariate(1 / off_s)
        steps.append((now, busy_bps))
        now += rng.expovariate(1 / on_s)
        steps.append((now, bps))
    return tuple(steps)
