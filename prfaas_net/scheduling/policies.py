"""The policies that need no memory: ``local``, ``remote`` and ``random``."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.candidates import Candidate
from prfaas_net.scheduling.events import Arrival
from prfaas_net.scheduling.policy import Policy, PolicySettings, Ranking, register
from prfaas_net.scheduling.state import ClusterKind, FleetState

__all__ = ["LocalPolicy", "RandomPolicy", "RemotePolicy", "towards"]


def _remote_first(candidate: Candidate) -> tuple[int, float, tuple[int, int, str]]:
    """PrfaaS clusters, then the decoding cluster itself, then other PD clusters."""
    place = 0 if candidate.kind is ClusterKind.PRFAAS else 1 if candidate.local else 2
    return (place, candidate.wait_s, candidate.node.load)


def _local_first(candidate: Candidate) -> tuple[int, float, tuple[int, int, str]]:
    """The decoding cluster itself, then other PD clusters, then PrfaaS clusters."""
    place = 2 if candidate.kind is ClusterKind.PRFAAS else 0 if candidate.local else 1
    return (place, candidate.wait_s, candidate.node.load)


def towards(candidates: Sequence[Candidate], *, remote: bool) -> tuple[list[Candidate], tuple[str, ...]]:
    """Rank towards PrfaaS or towards the local PD cluster, and say so where the wish cannot be met."""
    order = sorted(candidates, key=_remote_first if remote else _local_first)
    best = order[0]
    if remote and best.kind is not ClusterKind.PRFAAS:
        return order, (f"no PrfaaS prefill node is up: fell back to PD cluster {best.node.cluster}",)
    if not remote and best.kind is ClusterKind.PRFAAS:
        return order, (f"no PD prefill node is up: fell back to PrfaaS cluster {best.node.cluster}",)
    if not remote and not best.local:
        return order, (f"no local prefill node is up: fell back to PD cluster {best.node.cluster}",)
    return order, ()


class LocalPolicy(Policy):
    """Always in the local PD cluster."""

    name = "local"

    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        order, fallback = towards(candidates, remote=False)
        return Ranking(order, ("policy local: always the local PD cluster", *fallback))


class RemotePolicy(Policy):
    """Always in a PrfaaS cluster."""

    name = "remote"

    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        order, fallback = towards(candidates, remote=True)
        return Ranking(order, ("policy remote: always a PrfaaS cluster", *fallback))


class RandomPolicy(Policy):
    """Any cluster with equal odds; a baseline for comparisons."""

    name = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        order = self._rng.sample(list(candidates), len(candidates))
        return Ranking(order, (f"policy random: drew cluster {order[0].node.cluster} of {len(order)}",))


def _random(settings: PolicySettings) -> Policy:
    if settings.rng is None:
        raise ConfigError("policy random needs a seeded random source", do="pass PolicySettings(rng=...)")
    return RandomPolicy(settings.rng)


register("local", lambda settings: LocalPolicy())
register("remote", lambda settings: RemotePolicy())
register("random", _random)
