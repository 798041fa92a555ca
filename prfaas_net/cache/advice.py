"""What the KVCache manager would have moved: hot prefixes to more nodes, useful ones to other clusters.

It only advises. :meth:`Advisor.used` is told of every prefix that a request could have started from;
:meth:`Advisor.advise` answers with instructions that the scheduler may take, and hears how they ended.

*Which prefixes count*: uses decay by half in ``half_life_s``, so that a count is a rate. The ``tracked`` busiest are
kept by the space-saving rule (Metwally, Agrawal, El Abbadi 2005): a newcomer takes the place of the rarest and inherits
its count as a possible error, which is subtracted before anything is decided. No stream of prefixes makes it larger.

*Against hot spots* (:class:`Replicate`, within a cluster): when a prefix is used more often than the nodes that hold it
can serve. *Across clusters* (:class:`CopyPrefix`): when a cluster uses a prefix that only others hold, and computing
what it lacks takes longer than moving it. Prefixes that only some may share (salted ones) never leave their cluster
unless that is allowed.

Advice does not flap: it wants more than the limit before the first step, after each step it waits until the step shows
or the demand has fallen well below the limit, and failures wait too. At most ``max_outstanding`` instructions are out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.manager import CacheManager, Match, NodeMatch
from prfaas_net.errors import UsageError

__all__ = ["AdvicePolicy", "Advisor", "CopyPrefix", "FleetCosts", "Replicate"]

# Uses weigh 2^(age of the count): beyond this all counts are scaled down, long before a float ends at 2^1024.
_MAX_DOUBLINGS = 500.0


@dataclass(frozen=True)
class Replicate:
    """Bring a prefix to one more node of its cluster, out of ``source``.

    Attributes:
        keys: of the prefix's blocks.
        n_tokens: its length.
        kv_bytes: what would be moved.
    """

    keys: bytes
    n_tokens: int
    kv_bytes: int
    source: str
    cluster: str
    target_node: str
    reason: str

    @property
    def target(self) -> str:
        return f"node {self.target_node}"


@dataclass(frozen=True)
class CopyPrefix:
    """Bring a prefix to another cluster; the scheduler chooses the node. Attributes as of :class:`Replicate`."""

    keys: bytes
    n_tokens: int
    kv_bytes: int
    source: str
    target_cluster: str
    reason: str

    @property
    def target(self) -> str:
        return f"cluster {self.target_cluster}"


Instruction = Replicate | CopyPrefix


class FleetCosts(Protocol):
    """What the scheduler knows of costs."""

    def kv_bytes(self, start_tokens: int, stop_tokens: int) -> int:
        """To move for a prefix of ``stop_tokens`` to where the first ``start_tokens`` are."""
        ...

    def prefill_s(self, cluster: str, start_tokens: int, stop_tokens: int) -> float:
        """To compute the same there."""
        ...

    def bandwidth_bps(self, source_cluster: str, target_cluster: str) -> float:
        """Of the way between two clusters that copies may use; 0 without one."""
        ...


@dataclass(frozen=True)
class AdvicePolicy:
    """When to advise.

    Attributes:
        half_life_s: of a use.
        tracked: prefixes that are counted; about 8 KB each for 128K tokens.
        examined: of these, the busiest that one call looks at.
        node_hits_per_s: uses of one prefix that one node can serve.
        high, low: of what the holders can serve: replicate above ``high``, think again below ``low``.
        copy_gain: computing must take so many times as long as moving.
        copy_hits_per_s: uses in a cluster below which nothing is copied there.
        copy_private: whether salted prefixes may cross clusters.
        max_outstanding: instructions that are out.
        deadline_s: after which an instruction that nobody reported on counts as failed.
        retry_s: how long a failed one is not repeated.
    """

    half_life_s: float = 60.0
    tracked: int = 1024
    examined: int = 32
    node_hits_per_s: float = 4.0
    high: float = 1.2
    low: float = 0.6
    copy_gain: float = 1.5
    copy_hits_per_s: float = 0.05
    copy_private: bool = False
    max_outstanding: int = 4
    deadline_s: float = 60.0
    retry_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high or self.half_life_s <= 0 or min(self.tracked, self.examined) < 1:
            raise UsageError("a policy that cannot work", expected="0 < low < high, half_life_s > 0", found=self)


@dataclass
class _Use:
    """One prefix.

    Attributes:
        count: weighted uses, with ``error`` that may be others'.
        clusters: the part of each cluster that used it.
        stepped: per cluster, how many holders there were at the last instruction.
    """

    keys: bytes
    n_tokens: int
    private: bool
    count: float = 0.0
    error: float = 0.0
    clusters: dict[str, float] = field(default_factory=dict)
    stepped: dict[str, int] = field(default_factory=dict)


class Advisor:
    """See the module's text."""

    def __init__(self, policy: AdvicePolicy | None = None) -> None:
        self.policy = policy or AdvicePolicy()
        self._uses: dict[bytes, _Use] = {}
        self._origin_s = 0.0
        self._out: dict[Instruction, float] = {}  # until when
        self._failed: dict[tuple[bytes, str], float] = {}  # until when
        self.counters = {"uses": 0, "replacements": 0, "advised": 0, "done": 0, "failed": 0, "expired": 0}

    @property
    def outstanding(self) -> tuple[Instruction, ...]:
        """Instructions that nobody has reported on."""
        return tuple(self._out)

    def used(self, keys: bytes, n_tokens: int, cluster: str, *, private: bool, now: float) -> None:
        """A request in ``cluster`` started, or could have started, from this prefix.

        Args:
            keys: of the prefix's blocks: the longest usable anywhere.
            private: it is salted.
        """
        if not keys or len(keys) % KEY_BYTES:
            raise UsageError("not a prefix", expected=f"keys of {KEY_BYTES} bytes", found=len(keys))
        self.counters["uses"] += 1
        name, weight = keys[-KEY_BYTES:], self._weight(now)
        use = self._uses.get(name)
        if use is None:
            use = _Use(keys, n_tokens, private)
            if len(self._uses) >= self.policy.tracked:
                rarest = min(self._uses, key=lambda key: self._uses[key].count)
                use.count = use.error = self._uses.pop(rarest).count
                self.counters["replacements"] += 1
            self._uses[name] = use
        use.count += weight
        use.clusters[cluster] = use.clusters.get(cluster, 0.0) + weight

    def rate(self, key: bytes, *, now: float) -> float:
        """Uses a second of the prefix that ends with a block: no more than there really are."""
        self._weight(now)
        use = self._uses.get(key)
        return 0.0 if use is None else self._per_s(use.count - use.error, now)

    def advise(
        self, manager: CacheManager, nodes: Mapping[str, str], costs: FleetCosts, *, now: float
    ) -> list[Instruction]:
        """What to move now, the most useful first.

        Args:
            nodes: the cluster of every node that prefixes may be brought to.
        """
        self._expire(now)
        self._weight(now)
        busiest = sorted(self._uses.values(), key=lambda use: (use.error - use.count) * use.n_tokens)
        given: list[Instruction] = []
        for use in busiest[: self.policy.examined]:
            # One token more: a match never reaches the end of a prompt.
            match = manager.match(use.keys, n_tokens=use.n_tokens + 1)
            steps: list[Instruction] = [*self._replicas(use, match, nodes, costs, now)]
            steps += self._copies(use, match, nodes, costs, now)
            for step in steps:
                if len(self._out) >= self.policy.max_outstanding:
                    return given
                if self._is_new(step, now):
                    self._out[step] = now + self.policy.deadline_s
                    if isinstance(step, Replicate):
                        use.stepped[step.cluster] = len(_holders(match, use.n_tokens, step.cluster))
                    given.append(step)
                    self.counters["advised"] += 1
        return given

    def done(self, instruction: Instruction, *, ok: bool, now: float) -> None:
        """How an instruction ended; one that was not taken is reported as failed."""
        if self._out.pop(instruction, None) is None:
            return
        self.counters["done" if ok else "failed"] += 1
        if not ok:
            self._fail(instruction, now)

    def _replicas(
        self, use: _Use, match: Match, nodes: Mapping[str, str], costs: FleetCosts, now: float
    ) -> Iterator[Replicate]:
        policy = self.policy
        for cluster in sorted(use.clusters):
            holders = _holders(match, use.n_tokens, cluster)
            if not holders:
                continue
            # What may be others' uses is not this cluster's: newcomers count from their own first use.
            rate, limit = self._per_s(use.clusters[cluster], now), len(holders) * policy.node_hits_per_s
            if rate < policy.low * limit:
                use.stepped.pop(cluster, None)
            if rate <= policy.high * limit or use.stepped.get(cluster, -1) >= len(holders):
                continue
            held = {holder.node_id for holder in holders}
            free = [node for node, where in nodes.items() if where == cluster and node not in held]
            free = sorted(node for node in free if (use.keys[-KEY_BYTES:], f"node {node}") not in self._failed)
            target = min(free, key=self._n_out_to, default=None)
            if target is None:
                continue
            there = match.node(target)
            yield Replicate(
                use.keys, use.n_tokens, costs.kv_bytes(there.rows_tokens if there else 0, use.n_tokens),
                min(held), cluster, target, f"{rate:.1f} uses/s on {len(holders)} nodes that serve {limit:.1f}",
            )  # fmt: skip

    def _copies(
        self, use: _Use, match: Match, nodes: Mapping[str, str], costs: FleetCosts, now: float
    ) -> Iterator[CopyPrefix]:
        policy, best = self.policy, match.by_cluster()
        if use.private and not policy.copy_private:
            return
        for cluster in sorted(use.clusters.keys() & set(nodes.values())):
            rate, there = self._per_s(use.clusters[cluster], now), best.get(cluster)
            usable, rows = (there.usable_tokens, there.rows_tokens) if there else (0, 0)
            if usable >= use.n_tokens or rate < policy.copy_hits_per_s:
                continue
            kv_bytes = costs.kv_bytes(rows, use.n_tokens)
            ways = [
                (kv_bytes * 8 / bandwidth_bps, holder.node_id)
                for holder in _holders(match, use.n_tokens)
                if (bandwidth_bps := costs.bandwidth_bps(holder.cluster, cluster)) > 0
            ]
            compute_s = costs.prefill_s(cluster, usable, use.n_tokens)
            move_s, source = min(ways, default=(math.inf, ""))
            if compute_s > policy.copy_gain * move_s:
                reason = f"{rate:.2f} uses/s; computing takes {compute_s:.3f} s, moving {move_s:.3f} s"
                yield CopyPrefix(use.keys, use.n_tokens, kv_bytes, source, cluster, reason)

    def _is_new(self, step: Instruction, now: float) -> bool:
        """Neither out already, alone or as the beginning of a longer one, nor failed a moment ago."""
        if self._failed.get((step.keys[-KEY_BYTES:], step.target), -math.inf) > now:
            return False
        return not any(out.target == step.target and out.keys.startswith(step.keys) for out in self._out)

    def _n_out_to(self, node: str) -> int:
        return sum(isinstance(out, Replicate) and out.target_node == node for out in self._out)

    def _expire(self, now: float) -> None:
        for step in [step for step, until_s in self._out.items() if until_s <= now]:
            del self._out[step]
            self.counters["expired"] += 1
            self._fail(step, now)
        for which in [which for which, until_s in self._failed.items() if until_s <= now]:
            del self._failed[which]

    def _fail(self, step: Instruction, now: float) -> None:
        name = step.keys[-KEY_BYTES:]
        self._failed[name, step.target] = now + self.policy.retry_s
        if isinstance(step, Replicate) and name in self._uses:
            self._uses[name].stepped.pop(step.cluster, None)  # another node may be tried

    def _weight(self, now: float) -> float:
        """Of a use that happens now, in the scale of the counts; may change that scale, so ask before reading one."""
        doublings = (now - self._origin_s) / self.policy.half_life_s
        if doublings > _MAX_DOUBLINGS:
            scale = 2.0 ** -min(doublings, 1e4)
            for use in self._uses.values():
                use.count, use.error = use.count * scale, use.error * scale
                use.clusters = {cluster: count * scale for cluster, count in use.clusters.items()}
            self._origin_s = now
            doublings = 0.0
        return float(2.0**doublings)

    def _per_s(self, count: float, now: float) -> float:
        # A steady rate r makes counts of r * half_life / ln 2 after many half-lives.
        return count / self._weight(now) * math.log(2) / self.policy.half_life_s


def _holders(match: Match, n_tokens: int, cluster: str | None = None) -> list[NodeMatch]:
    """Nodes that a request could start on with all of the prefix."""
    return [node for node in match.nodes if node.usable_tokens >= n_tokens and cluster in (None, node.cluster)]
