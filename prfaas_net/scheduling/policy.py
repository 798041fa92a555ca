"""The interface that every routing policy stands behind, and the registry of policies by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.candidates import Candidate
from prfaas_net.scheduling.events import Arrival, FleetEvent
from prfaas_net.scheduling.state import FleetState

__all__ = ["DEFAULT_POLICY", "Policy", "PolicySettings", "Ranking", "make_policy", "policy_names", "register"]

# The one that measures best: docs/simulator.md has the table.
DEFAULT_POLICY = "earliest-finish"


@dataclass(frozen=True)
class PolicySettings:
    """What a policy may be made from.

    Attributes:
        threshold_tokens: ``t``: incremental prefill above it is offloaded.
        rng: the only source of randomness; seeded by whoever passes it in.
        price: what ``earliest-finish`` charges a candidate for those who will wait behind it; 0 is plain greed.
        link_patience_s: it refuses a link on which a KVCache would take so much longer than computing at home; None: as
            long as suits the case study.
    """

    threshold_tokens: int = 0
    rng: Random | None = None
    price: float = 3.0
    link_patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates from best to worst, and why.

    Attributes:
        threshold_tokens: the ``t`` that was applied, if any.
    """

    order: Sequence[Candidate]
    reasons: tuple[str, ...]
    threshold_tokens: int | None = None


class Policy(ABC):
    """Ranks the ways to serve a request.

    Attributes:
        copies: whether it wants candidates that copy a prefix from another cluster first.
        every_decode_cluster: whether it wants candidates for the best decode node of every PD cluster, and not only
            for the least loaded one of all.
    """

    name: ClassVar[str]
    copies: bool = False
    every_decode_cluster: bool = False

    @abstractmethod
    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        """Order ``candidates`` from best to worst.

        For a decode node there is one for each cluster, in order of cluster name, then those with a copy.
        The ranking holds every candidate that may be used; what it leaves out is never used.
        """

    def observe(self, event: FleetEvent, state: FleetState, *, now: float) -> None:  # noqa: B027
        """Take note of something that happened; ``state`` has it already. Most policies have no memory."""


_MAKERS: dict[str, Callable[[PolicySettings], Policy]] = {}


def register(name: str, make: Callable[[PolicySettings], Policy]) -> None:
    """Make a policy known by name."""
    _MAKERS[name] = make


def policy_names() -> list[str]:
    """Every registered policy, sorted."""
    return sorted(_MAKERS)


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """The policy registered as ``name``.

    Raises:
        ConfigError: there is none, or the settings do not suit it.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise ConfigError("unknown policy", expected=f"one of {', '.join(policy_names())}", found=repr(name))
    return make(settings)
