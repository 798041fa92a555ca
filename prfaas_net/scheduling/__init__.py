"""Where to prefill and where to decode: events in, decisions out.

A pure core: it reads no clock, opens no socket and draws no random number of its own. The gateway drives it
with what it observes, the simulator with what it simulates.
"""

from prfaas_net.scheduling.admission import OverloadedError
from prfaas_net.scheduling.candidates import Candidate, Predictor
from prfaas_net.scheduling.correction import Correction
from prfaas_net.scheduling.earliest_finish import EarliestFinishPolicy
from prfaas_net.scheduling.events import (
    Alternative,
    Arrival,
    Decision,
    FleetEvent,
    LinkSeen,
    NodeDown,
    NodeForgotten,
    NodeSeen,
    PrefillEnded,
    QueueSeen,
    RequestEnded,
    ThresholdSet,
    TransferLanded,
    TransferProgress,
)
from prfaas_net.scheduling.kv_config import kv_size_of_config
from prfaas_net.scheduling.lengths import EmpiricalLengths, LengthDistribution, TruncatedLogNormal
from prfaas_net.scheduling.link_book import LinkBook, LinkReport, parse_links
from prfaas_net.scheduling.links import LinkLoad
from prfaas_net.scheduling.planner import Planner
from prfaas_net.scheduling.planning import (
    Convert,
    Drain,
    Instruction,
    KeepRole,
    Move,
    Plan,
    PlannerSettings,
    SetThreshold,
    instances,
)
from prfaas_net.scheduling.policies import LocalPolicy, RandomPolicy, RemotePolicy
from prfaas_net.scheduling.policy import DEFAULT_POLICY, Policy, PolicySettings, Ranking, make_policy, policy_names
from prfaas_net.scheduling.profiles import DecodeProfile, KvSize, NodeProfile, PiecewiseLinear
from prfaas_net.scheduling.replay import dump_log, load_log, replay
from prfaas_net.scheduling.router import Router
from prfaas_net.scheduling.state import Alone, ClusterKind, FleetState, NodeState, Role
from prfaas_net.scheduling.threshold import Bandwidth, ThresholdPolicy
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
from prfaas_net.scheduling.ttft import zero_load_ttft_s

__all__ = [
    "DEFAULT_POLICY",
    "Alone",
    "Alternative",
    "Arrival",
    "Bandwidth",
    "Candidate",
    "ClusterKind",
    "Convert",
    "Correction",
    "Decision",
    "DecodeProfile",
    "Drain",
    "EarliestFinishPolicy",
    "EmpiricalLengths",
    "Estimate",
    "FleetEvent",
    "FleetState",
    "Instruction",
    "KeepRole",
    "KvSize",
    "LengthDistribution",
    "LinkBook",
    "LinkLoad",
    "LinkReport",
    "LinkSeen",
    "LocalPolicy",
    "Move",
    "NodeDown",
    "NodeForgotten",
    "NodeProfile",
    "NodeSeen",
    "NodeState",
    "OverloadedError",
    "PdCluster",
    "PiecewiseLinear",
    "Plan",
    "Planner",
    "PlannerSettings",
    "Policy",
    "PolicySettings",
    "Predictor",
    "PrefillEnded",
    "PrfaasCluster",
    "QueueSeen",
    "RandomPolicy",
    "Ranking",
    "RemotePolicy",
    "RequestEnded",
    "Role",
    "Router",
    "SetThreshold",
    "Solution",
    "ThresholdPolicy",
    "ThresholdSet",
    "Throughput",
    "TransferLanded",
    "TransferProgress",
    "TruncatedLogNormal",
    "Workload",
    "cluster_egress_bps",
    "dump_log",
    "instances",
    "kv_size_of_config",
    "kv_throughput_bps",
    "load_log",
    "make_policy",
    "parse_links",
    "policy_names",
    "replay",
    "solve",
    "throughput",
    "zero_load_ttft_s",
]
