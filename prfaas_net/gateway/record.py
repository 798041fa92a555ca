"""What is remembered of one request: the decision, its reasons, and where the time went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from prfaas_net.nodes.messages import TransferReport
from prfaas_net.scheduling import Decision

__all__ = ["RecentRecords", "RequestRecord"]

# Records kept for people and dashboards to look at: about a kilobyte each.
KEPT_RECORDS = 1000


@dataclass
class RequestRecord:
    """One request, as ``explain`` shows it.

    Attributes:
        prefilled_in: name of the cluster that runs the prompt.
        prefilled_tokens: prompt tokens that have passed every layer so far.
        cached_in: by cluster, how long a prefix of the prompt was known to be cached there when it was routed.
        cached_tokens: prompt tokens that the prefill found in its cache: not computed.
        incremental_tokens: ``l``: prompt tokens that had to be computed there.
        held_tokens: prompt tokens whose rows the decode node held already: not sent.
        threshold_tokens: ``t`` at the time, or None if the policy has none.
        kv_bytes: of the transferred KVCache by kind of state.
        prefill_s, transfer_s, exposed_s, queued_s: as the prefill node reported them; None until it did.
        ttft_s: arrival to first token.
        stages_s: seconds from arrival until each stage was reached.
    """

    request_id: str
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

    def note_decision(self, decision: Decision) -> None:
        """Take over what the router decided."""
        self.cached_tokens = decision.cached_tokens
        self.incremental_tokens = decision.incremental_tokens
        self.threshold_tokens = decision.threshold_tokens
        self.policy = decision.policy
        self.prefilled_in, self.prefill_node = decision.prefill_cluster, decision.prefill_node
        self.decoded_in, self.decode_node = decision.decode_cluster, decision.decode_node
        self.reasons.extend(decision.reasons)

    def note_cached(self, cached_tokens: int) -> None:
        """Take over what the prefill node found in its cache."""
        self.cached_tokens = cached_tokens
        self.incremental_tokens = self.prompt_tokens - cached_tokens

    def note_report(self, report: TransferReport) -> None:
        """Take over what the transfer cost."""
        self.note_cached(report.cached_tokens)
        self.held_tokens = report.held_tokens
        self.kv_bytes = dict(report.kv_bytes)
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
