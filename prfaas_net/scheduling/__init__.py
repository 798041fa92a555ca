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
from prfaas_net.scheduling.lengths import EmpiricalLengths, LengthDistribution, TruncatedLogNormal
from prfaas_net.scheduling.policies import LocalPolicy, RandomPolicy, RemotePolicy, ThresholdPolicy
from prfaas_net.scheduling.policy import Policy, PolicySettings, Ranking, make_policy, policy_names
from prfaas_net.scheduling.profiles import DecodeProfile, KvSize, NodeProfile, PiecewiseLinear
from prfaas_net.scheduling.router import Router
from prfaas_net.scheduling.state import ClusterKind, FleetState, NodeState, Role
from prfaas_net.scheduling.throughput import (
    Estimate,
    PdCluster,
    PrfaasCluster,
    Solution,
    Throughput,
    Workload,
    cluster_egress_bps,
    kv_throughput_bps,
    solve,
    throughput,
)

__all__ = [
    "Arrival",
    "Candidate",
    "ClusterKind",
    "Decision",
    "DecodeProfile",
    "EmpiricalLengths",
    "Estimate",
    "FleetEvent",
    "FleetState",
    "KvSize",
    "LengthDistribution",
    "LocalPolicy",
    "NodeDown",
    "NodeForgotten",
    "NodeProfile",
    "NodeSeen",
    "NodeState",
    "PdCluster",
    "PiecewiseLinear",
    "Policy",
    "PolicySettings",
    "PrefillEnded",
    "PrfaasCluster",
    "RandomPolicy",
    "Ranking",
    "RemotePolicy",
    "RequestEnded",
    "Role",
    "Router",
    "Solution",
    "ThresholdPolicy",
    "Throughput",
    "TruncatedLogNormal",
    "Workload",
    "cluster_egress_bps",
    "kv_throughput_bps",
    "make_policy",
    "policy_names",
    "solve",
    "throughput",
]
