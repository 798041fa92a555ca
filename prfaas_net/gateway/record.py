"""What is remembered of one request: the decision, its reasons, and where the time went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from prfaas_net.nodes.messages import TransferReport
from prfaas_net.scheduling import Alternative, Decision

__all__ = ["RUNGS", "Fallback", "RecentRecords", "RequestRecord"]

# Records kept for people and dashboards to look at: about a kilobyte each.
KEPT_RECORDS = 1000
# What a gateway does, in this order, when an attempt at a request fails; ``no_room``: some node
# had none, and another one or a later time was tried.
RUNGS = ("prefill_node", "local_prefill", "decode_node", "no_room", "error")
# Stages that are reached once, however many attempts it takes.
LASTING_STAGES = ("tokenized", "first_token")


@dataclass
class Fallback:
    """One rung of the ladder, in a request's story.

    Attributes:
        rung: one of :data:`RUNGS`.
        at_s: since arrival.
        failed: the side that failed, and the node; ``error``: how, in one line.
        prefill_node, decode_node: where it went on; None where it did not.
        answered_tokens: that the client had by then.
        resumed: whether they were made part of the prompt; else that was run once more.
        times: attempts that ended in the same way, one after the other.
        stages_s: what the attempt that failed had reached, in seconds since arrival.
    """

    rung: str
    at_s: float
    failed: str
    error: str
    prefill_node: str | None = None
    decode_node: str | None = None
    answered_tokens: int = 0
    resumed: bool = False
    times: int = 1
    stages_s: dict[str, float] = field(default_factory=dict)


@dataclass
class RequestRecord:
    """One request, as ``explain`` shows it.

    Attributes:
        key_name: of the API key that it came with, where keys are asked for.
        prefilled_in: name of the cluster that runs the prompt.
        prefilled_tokens: prompt tokens that have passed every layer so far.
        cached_in: by cluster, how long a prefix of the prompt was known to be cached there when it was routed.
        cached_tokens: prompt tokens that the prefill found in its cache: not computed.
        incremental_tokens: ``l``: prompt tokens that had to be computed there.
        held_tokens: prompt tokens whose rows the decode node held already: not sent.
        threshold_tokens: ``t`` at the time, or None if the policy has none.
        alternatives: the ways to serve it that were considered, each with its predicted TTFT and its link's verdict.
        predicted_ttft_s: of the one that was taken, from the decision on.
        kv_bytes: of the transferred KVCache by kind of state.
        prefill_s, transfer_s, exposed_s, queued_s: as the prefill node reported them; None until it did.
        ttft_s: arrival to first token.
        fallbacks: what was done when nodes or links failed it, in order. The other fields tell of the attempts that
            ran the prompt itself, the last one first; those that resumed an answer only add to ``kv_bytes``.
        stages_s: seconds from arrival until each stage was reached.
    """

    request_id: str
    key_name: str | None = None
    prompt_tokens: int = 0
    cached_in: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    incremental_tokens: int = 0
    held_tokens: int | None = None
    threshold_tokens: int | None = None
    policy: str | None = None
    prefilled_in: str | None = None
    prefill_node: str | None = None
    decoded_in: str | None = None
    decode_node: str | None = None
    reasons: list[str] = field(default_factory=list)
    alternatives: tuple[Alternative, ...] = ()
    predicted_ttft_s: float | None = None
    prefilled_tokens: int = 0
    kv_bytes: dict[str, int] | None = None
    connections: int | None = None
    resent_chunks: int | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    ttft_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)

    def reached(self, stage: str, after_s: float) -> None:
        """Note when a stage was reached, once for each attempt."""
        self.stages_s.setdefault(stage, after_s)

    def begin_again(self) -> dict[str, float]:
        """Another attempt begins: its stages replace those of the last one, which are returned."""
        old, self.stages_s = self.stages_s, {}
        self.stages_s = {stage: at_s for stage, at_s in old.items() if stage in LASTING_STAGES}
        self.prefilled_tokens = 0
        return {stage: round(at_s, 6) for stage, at_s in old.items() if stage not in LASTING_STAGES}

    def note_fallback(self, step: Fallback) -> None:
        """Add a rung, or count it once more."""
        last = self.fallbacks[-1] if self.fallbacks else None
        if last is not None and last.rung == step.rung == "no_room":
            last.times += 1
            last.prefill_node, last.decode_node = step.prefill_node, step.decode_node
        else:
            self.fallbacks.append(step)

    def note_decision(self, decision: Decision) -> None:
        """Take over what the router decided."""
        self.cached_tokens = decision.cached_tokens
        self.incremental_tokens = decision.incremental_tokens
        self.threshold_tokens = decision.threshold_tokens
        self.policy = decision.policy
        self.prefilled_in, self.prefill_node = decision.prefill_cluster, decision.prefill_node
        self.decoded_in, self.decode_node = decision.decode_cluster, decision.decode_node
        self.reasons.extend(decision.reasons)
        self.alternatives, self.predicted_ttft_s = decision.alternatives, decision.ttft_s

    def note_cached(self, cached_tokens: int) -> None:
        """Take over what the prefill node found in its cache."""
        self.cached_tokens = cached_tokens
        self.incremental_tokens = self.prompt_tokens - cached_tokens

    def note_report(self, report: TransferReport, *, resumed: bool = False) -> None:
        """Take over what the transfer cost."""
        before = self.kv_bytes or {}
        self.kv_bytes = {kind: n_bytes + before.get(kind, 0) for kind, n_bytes in report.kv_bytes.items()}
        if resumed:
            return
        self.note_cached(report.cached_tokens)
        self.held_tokens = report.held_tokens
        self.connections, self.resent_chunks = report.connections, report.resent_chunks
        self.queued_s, self.prefill_s = report.queued_s, report.prefill_s
        self.transfer_s, self.exposed_s = report.transfer_s, report.exposed_s

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field, times rounded to microseconds."""
        body = asdict(self)
        body["stages_s"] = {stage: round(at_s, 6) for stage, at_s in self.stages_s.items()}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in body.items()}


class RecentRecords:
    """The records of requests in flight and of those that ended last, by the id that the client knows."""

    def __init__(self, kept: int = KEPT_RECORDS) -> None:
        self._kept = kept
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, client_id: str, record: RequestRecord) -> None:
        """Remember a record; an older one of the same id is forgotten."""
        self._records.pop(client_id, None)
        self._records[client_id] = record
        if len(self._records) > self._kept:
            self._records.popitem(last=False)

    def find(self, client_id: str) -> RequestRecord | None:
        """The latest record of this id."""
        return self._records.get(client_id)
