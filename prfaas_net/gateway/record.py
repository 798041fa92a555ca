"""What is remembered of one request: the decision, its reasons, and where the time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from prfaas_net.nodes.messages import TransferReport
from prfaas_net.scheduling import Decision

__all__ = ["RequestRecord"]


@dataclass
class RequestRecord:
    """One request, as ``explain`` shows it.

    Attributes:
        prefilled_in: name of the cluster that ran the prompt.
        incremental_tokens: ``l``: prompt tokens that had to be computed there.
        threshold_tokens: ``t`` at the time, or None if the policy has none.
        kv_bytes: of the transferred KVCache by kind of state.
        prefill_s, transfer_s, exposed_s, queued_s: as the prefill node reported them; None until it did.
        ttft_s: arrival to first token.
        stages_s: seconds from arrival until each stage was reached.
    """

    request_id: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    incremental_tokens: int = 0
    threshold_tokens: int | None = None
    policy: str | None = None
    prefilled_in: str | None = None
    prefill_node: str | None = None
    decoded_in: str | None = None
    decode_node: str | None = None
    reasons: list[str] = field(default_factory=list)
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

    def note_report(self, report: TransferReport) -> None:
        """Take over what the transfer cost."""
        self.kv_bytes = dict(report.kv_bytes)
        self.connections, self.resent_chunks = report.connections, report.resent_chunks
        self.queued_s, self.prefill_s = report.queued_s, report.prefill_s
        self.transfer_s, self.exposed_s = report.transfer_s, report.exposed_s

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field, times rounded to microseconds."""
        body = asdict(self)
        body["stages_s"] = {stage: round(at_s, 6) for stage, at_s in self.stages_s.items()}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in body.items()}
