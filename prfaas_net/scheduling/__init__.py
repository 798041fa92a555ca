"""Where to prefill and where to decode: events in, decisions out.

A pure core: it reads no clock, opens no socket and draws no random number of its own. The gateway drives it
with what it observes, the simulator with what it simulates.
"""

from prfaas_net.scheduling.events import (
    Arrival,
    Candidate,
    Decision,
    FleetEvent,
    NodeDown,
    NodeForgotten,
    NodeSeen,
    PrefillEnded,
    RequestEnded,
)
from prfaas_net.scheduling.policies import LocalPolicy, RandomPolicy, RemotePolicy, ThresholdPolicy
from prfaas_net.scheduling.policy import Policy, PolicySettings, Ranking, make_policy, policy_names
from prfaas_net.scheduling.router import Router
from prfaas_net.scheduling.state import ClusterKind, FleetState, NodeState, Role

__all__ = [
    "Arrival",
    "Candidate",
    "ClusterKind",
    "Decision",
    "FleetEvent",
    "FleetState",
    "LocalPolicy",
    "NodeDown",
    "NodeForgotten",
    "NodeSeen",
    "NodeState",
    "Policy",
    "PolicySettings",
    "PrefillEnded",
    "RandomPolicy",
    "Ranking",
    "RemotePolicy",
    "RequestEnded",
    "Role",
    "Router",
    "ThresholdPolicy",
    "make_policy",
    "policy_names",
]
