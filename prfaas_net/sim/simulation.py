"""One run: requests through the real router, on simulated nodes and links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import BusyError, RefusedError, UsageError
from prfaas_net.scheduling import (
    Arrival,
    ClusterKind,
    Convert,
    Decision,
    Drain,
    KeepRole,
    LinkSeen,
    NodeDown,
    NodeSeen,
    OverloadedError,
    Planner,
    Policy,
    Predictor,
    PrefillEnded,
    RequestEnded,
    Role,
    Router,
    SetThreshold,
    ThresholdPolicy,
    ThresholdSet,
    TransferLanded,
)
from prfaas_net.sim.caches import FleetCaches
from prfaas_net.sim.fleet import ClusterSpec, FleetSpec, LinkSpec, NodeFailure
from prfaas_net.sim.loop import Loop
from prfaas_net.sim.network import LEAST_BPS, Flow, SimLink
from prfaas_net.sim.nodes import SimDecode, SimPrefill
from prfaas_net.sim.prefix import block_keys
from prfaas_net.sim.requests import MOONCAKE_BLOCK_TOKENS, SimRequest
from prfaas_net.sim.result import BUCKET_S, SimResult
from prfaas_net.sim.telemetry import LinkTelemetry

__all__ = ["Simulation"]

# A request whose node died is tried again so often before it counts as lost.
MAX_RETRIES = 3
# Seconds between two looks of the planner at what drains.
PLAN_EVERY_S = 5.0
# Requests between two calls of progress.
PROGRESS_EVERY = 20_000
# A link at which less than this share of its budget is left is congested; at less than the second a queue builds.
CONGESTED_SHARE, BUILDING_SHARE = 0.5, 0.9


class _Job:
    """A request on its way."""

    __slots__ = (
        "decision", "flow", "generation", "keys", "prefilled", "request", "request_id", "retries", "size_bytes",
        "start_tokens",
    )  # fmt: skip

    def __init__(self, request_id: str, request: SimRequest) -> None:
        self.request_id = request_id
        self.request = request
        self.retries = 0
        self.generation = 0
        self.decision: Decision | None = None
        self.size_bytes = 0.0
        self.flow: Flow | None = None
        self.prefilled = False
        self.keys = b""
        self.start_tokens = 0


class Simulation:
    """Runs a workload over a fleet.

    Args:
        policy: the very object that a gateway would route with.
        ttft_limit_s: requests carry it as their limit, and are shed when nobody can meet it.
        detector: whether the router hears of links what the real congestion detector makes of them. Without, which is
            several times as fast, it is told what they carry.
        validate_every: events between two checks of the router's invariants; 0 checks at the end only.
        planner: looks at the fleet every few seconds; what it says is done.
        progress: told (requests so far, seconds simulated) now and then.
    """

    def __init__(
        self,
        fleet: FleetSpec,
        policy: Policy,
        *,
        seed: int = 1,
        ttft_limit_s: float | None = None,
        detector: bool = True,
        validate_every: int = 0,
        planner: Planner | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        self.fleet = fleet
        self.loop = Loop()
        self.result = SimResult()
        kinds = {c.name: ClusterKind.PD if c.decode else ClusterKind.PRFAAS for c in fleet.clusters}
        self.router = Router(policy, kinds, Predictor(fleet.kv, fleet.pipelined, fleet.local_bps))
        self._limit_s = ttft_limit_s
        self._detects = detector
        self._validate_every = validate_every
        self._progress = progress
        self._planner = planner
        self._source: Iterator[SimRequest] = iter(())
        self._rng = Random(seed)
        self._kinds = kinds
        self._prefill: dict[str, SimPrefill] = {}
        self._decode: dict[str, SimDecode] = {}
        self._links: dict[tuple[str, str], SimLink] = {}
        self._telemetry: list[LinkTelemetry] = []
        self._jobs: dict[str, _Job] = {}
        self._more = True
        self._sent_bits = self._offered_bits = 0.0
        pools = {spec.name: spec.cache_bytes for spec in fleet.clusters if fleet.cached and spec.cache_bytes}
        self.caches = FleetCaches(self.loop, fleet.kv, pools, MOONCAKE_BLOCK_TOKENS, delay_s=fleet.feed_s)
        for cluster in fleet.clusters:
            self._add_cluster(cluster)
        for link in fleet.links:
            self._add_link(link)
        for failure in fleet.failures:
            self._add_failure(failure)

    def run(self, requests: Iterable[SimRequest]) -> SimResult:
        """Serve requests, in order of arrival, until the last one has ended.

        Raises:
            UsageError: it has run before.
        """
        if self.result.arrivals:
            raise UsageError("a simulation runs once", do="make another one")
        self._source = iter(requests)
        self._next_arrival()
        self.loop.after(BUCKET_S, self._measure)
        if self._planner is not None:
            self.loop.after(PLAN_EVERY_S, self._plan)
        self.loop.run()
        self.router.validate_state()
        self.result.seconds = self.loop.now
        self.result.events = self.loop.done
        self.result.verdicts = {telemetry.name: telemetry.verdicts for telemetry in self._telemetry}
        return self.result

    def set_threshold(self, threshold_tokens: int) -> None:
        """What the planner does."""
        self.router.observe(ThresholdSet(threshold_tokens), now=self.loop.now)
        self.result.thresholds.append((self.loop.now, threshold_tokens))

    def _plan(self, _: Any) -> None:
        planner, now = self._planner, self.loop.now
        assert planner is not None
        for instruction in planner.step(self.router.state, now=now):
            self.result.instructions.append((now, instruction))
            match instruction:
                case SetThreshold(threshold_tokens):
                    self.set_threshold(threshold_tokens)
                case Drain(node_id):
                    self._observe(NodeDown(node_id))
                case KeepRole(node_id):
                    self._come_back(node_id)
                case Convert(node_id, role):
                    self._convert(node_id, role)
        if self._more or self._jobs:
            self.loop.after(PLAN_EVERY_S, self._plan)

    def _convert(self, node_id: str, role: Role) -> None:
        """A node that has drained becomes one of the other kind."""
        old = self._prefill.pop(node_id, None) or self._decode.pop(node_id)
        spec = next(spec for spec in self.fleet.clusters if spec.name == old.cluster)
        if role is Role.PREFILL:
            self._add_prefill(node_id, spec)
        else:
            self._add_decode(node_id, spec)
        self._come_back(node_id)

    # What the fleet is made of.

    def _add_cluster(self, spec: ClusterSpec) -> None:
        for i in range(spec.prefill):
            self._add_prefill(f"{spec.name}-prefill-{i}", spec)
            self._come_back(f"{spec.name}-prefill-{i}")
        for i in range(spec.decode):
            self._add_decode(f"{spec.name}-decode-{i}", spec)
            self._come_back(f"{spec.name}-decode-{i}")
        policy = self.router.policy
        if isinstance(policy, ThresholdPolicy) and not self.result.thresholds:
            self.result.thresholds.append((0.0, policy.threshold_tokens))

    def _add_prefill(self, node_id: str, spec: ClusterSpec) -> None:
        self._prefill[node_id] = SimPrefill(
            self.loop, node_id, spec.name, spec.profile, self._begun, self._prefilled, spec.speed, spec.noise, self._rng
        )

    def _add_decode(self, node_id: str, spec: ClusterSpec) -> None:
        self._decode[node_id] = SimDecode(self.loop, node_id, spec.name, spec.profile, self._decoded, spec.room_bytes)

    def _add_link(self, spec: LinkSpec) -> None:
        key = (spec.source, spec.destination)
        link = self._links[key] = SimLink(self.loop, *key, spec.steps[0][1], spec.rtt_s)
        budget_bps = spec.budget_bps or spec.best_bps
        # Nothing was sent yet: all that is known is what was configured, and what a ping takes.
        self._observe(LinkSeen(*key, LinkState.IDLE, None, budget_bps, spec.rtt_s))
        if self._detects:
            telemetry = LinkTelemetry(
                self.loop, link, best_bps=spec.best_bps, budget_bps=budget_bps, rivals=spec.rivals,
                beat_s=self.fleet.report_s, rng=Random(self._rng.random()), told=self._observe,
            )  # fmt: skip
            self._telemetry.append(telemetry)
        for at_s, bps in spec.steps[1:]:
            self.loop.at(at_s, lambda bps, link=link: self._link_step(link, bps, budget_bps), bps)  # type: ignore[misc]

    def _link_step(self, link: SimLink, bps: float, budget_bps: float) -> None:
        """What the link carries changes now; without a detector the router is told a little later."""
        if self._more or self._jobs:
            link.set_capacity(bps)
        if not self._detects:
            self.loop.after(self.fleet.report_s, lambda _: self._report(link, budget_bps))

    def _report(self, link: SimLink, budget_bps: float) -> None:
        share = link.capacity_bps / budget_bps
        state = LinkState.CLEAR
        if share < BUILDING_SHARE:
            state = LinkState.CONGESTED if share < CONGESTED_SHARE else LinkState.BUILDING
        if link.capacity_bps <= LEAST_BPS:
            state = LinkState.DOWN
        # What is available was measured: it is not to be discounted again for the state that it was measured in.
        available = link.capacity_bps
        self._observe(LinkSeen(link.source, link.destination, state, available, budget_bps, link.rtt_s))

    def _add_failure(self, failure: NodeFailure) -> None:
        self.loop.at(failure.at_s, self._fail, failure.node_id)
        if failure.back_s is not None:
            self.loop.at(failure.back_s, self._come_back, failure.node_id)

    def _fail(self, node_id: str) -> None:
        self._observe(NodeDown(node_id))
        node = self._prefill.get(node_id)
        if node is not None:
            node.fail()
        for job in [j for j in self._jobs.values() if _uses(j, node_id)]:
            self._retry(job)

    def _come_back(self, node_id: str) -> None:
        node = self._prefill.get(node_id)
        if node is not None:
            both = self._kinds[node.cluster] is ClusterKind.PD
            seen = NodeSeen(
                node_id, node.cluster, Role.PREFILL, self.fleet.max_tokens, 1, node.profile, convertible=both
            )
            self._observe(seen)
            return
        decode = self._decode[node_id]
        batch = decode.profile.decode.max_batch if decode.profile.decode else 0
        seen = NodeSeen(
            node_id, decode.cluster, Role.DECODE, self.fleet.max_tokens, 1, decode.profile, batch, convertible=True
        )
        self._observe(seen)

    def _retry(self, job: _Job) -> None:
        """One of its nodes died: all that it held is given back, and it begins anew."""
        decision = job.decision
        assert decision is not None
        job.generation += 1
        job.retries += 1
        link = self._links.get((decision.prefill_cluster, decision.decode_cluster))
        if job.flow is not None and link is not None:
            link.cancel(job.flow)
        decode = self._decode[decision.decode_node]
        if not decode.withdraw(job):
            decode.release(job.size_bytes)
        self._observe(RequestEnded(job.request_id))
        del self._jobs[job.request_id]
        if job.retries > MAX_RETRIES:
            self.result.lost += 1
            return
        self.result.retried += 1
        again = _Job(f"{job.request_id}+", job.request)
        again.retries = job.retries
        self._route(again)

    # The way of a request.

    def _next_arrival(self) -> None:
        request = next(self._source, None)
        if request is None:
            self._more = False
            return
        self.loop.at(request.at_s, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        result = self.result
        result.arrivals += 1
        if self._progress is not None and result.arrivals % PROGRESS_EVERY == 0:
            self._progress(result.arrivals, self.loop.now)
        self._route(_Job(f"r{result.arrivals}", request))
        self._next_arrival()

    def _route(self, job: _Job) -> None:
        request = job.request
        arrival = Arrival(
            job.request_id, request.prompt_tokens, request.output_tokens, self._cached(job),
            ttft_limit_s=self._limit_s,
        )  # fmt: skip
        try:
            decision = self.router.decide(arrival, now=self.loop.now)
        except OverloadedError:
            self.result.shed += 1
            return
        except (BusyError, RefusedError):
            self.result.lost += 1
            return
        job.decision = decision
        if self._planner is not None:
            self._planner.arrived(decision.incremental_tokens, now=self.loop.now)
        self._jobs[job.request_id] = job
        job.size_bytes = self.fleet.kv(request.prompt_tokens + request.output_tokens)
        self._decode[decision.decode_node].reserve(job.size_bytes, self._reserved, job)

    def _cached(self, job: _Job) -> dict[str, int]:
        """By cluster, what the gateway believes to be cached of its prompt."""
        request = job.request
        if not self.fleet.cached or not request.block_ids:
            return {}
        job.keys = block_keys(request.block_ids, request.prompt_tokens, MOONCAKE_BLOCK_TOKENS)
        return self.caches.heard(job.keys, request.prompt_tokens)

    def _reserved(self, job: _Job) -> None:
        decision = job.decision
        assert decision is not None
        if decision.copy_from is not None:
            # A prefix comes over first; the prompt joins the queue when it is there.
            link = self._links[(decision.copy_from, decision.prefill_cluster)]
            bits = 8.0 * self.fleet.kv.increment(0, decision.cached_tokens)
            link.send(bits, 0.0, self._copied, (job, job.generation))
            return
        self._give(job, 0)

    def _give(self, job: _Job, copied_tokens: int) -> None:
        """The prompt joins its node's queue; what is really cached there counts, not what the gateway believed."""
        decision, tokens = job.decision, job.request.prompt_tokens
        assert decision is not None
        if job.keys:
            usable, _ = self.caches.held(decision.prefill_cluster, job.keys, tokens)
            job.start_tokens = max(usable, copied_tokens)
            self.result.stale_matches += job.start_tokens != decision.cached_tokens
        self._prefill[decision.prefill_node].give((job, job.generation), tokens - job.start_tokens)

    def _copied(self, tag: Any) -> None:
        job, generation = tag
        if job.generation == generation:
            self._give(job, job.decision.cached_tokens)

    def _begun(self, tag: Any, seconds: float) -> None:
        job, generation = tag
        if self.fleet.pipelined and job.generation == generation:
            self._send(job, seconds)

    def _prefilled(self, tag: Any) -> None:
        job, generation = tag
        if job.generation != generation:
            return
        job.prefilled = True
        decision = job.decision
        self._observe(PrefillEnded(job.request_id))
        tokens, start = job.request.prompt_tokens, job.start_tokens
        self.caches.keep(decision.prefill_cluster, job.keys, tokens, start_tokens=start, computed=True)
        if not self.fleet.pipelined:
            self._send(job, 0.0)

    def _send(self, job: _Job, made_in_s: float) -> None:
        """The KVCache leaves: over a link, or inside the cluster at a rate of its own."""
        decision = job.decision
        assert decision is not None
        tag = (job, job.generation)
        link = self._links.get((decision.prefill_cluster, decision.decode_cluster))
        bits = self._bits(job)
        if decision.prefill_cluster == decision.decode_cluster or link is None:
            seconds = bits / self.fleet.local_bps if self.fleet.local_bps else 0.0
            self.loop.after(max(made_in_s, seconds), self._landed, tag)
            return
        job.flow = link.send(bits, made_in_s, self._landed, tag)

    def _bits(self, job: _Job) -> float:
        """What the decoding cluster does not hold yet."""
        assert job.decision is not None
        # Rows alone are enough where decoding goes on: the state comes along.
        _, cached = self.caches.held(job.decision.decode_cluster, job.keys, job.request.prompt_tokens)
        return 8.0 * self.fleet.kv.increment(cached, job.request.prompt_tokens)

    def _landed(self, tag: Any) -> None:
        job, generation = tag
        if job.generation != generation:
            return
        if not job.prefilled:
            # Both end in the same instant; the prefill is accounted for first.
            self.loop.after(0.0, self._landed, tag)
            return
        decision, request, result, now = job.decision, job.request, self.result, self.loop.now
        ttft_s = now - request.at_s
        result.arrived_s.append(request.at_s)
        result.ttft_s.append(ttft_s)
        result.error_s.append(abs(ttft_s - decision.ttft_s))
        result.offloaded.append(self._kinds[decision.prefill_cluster] is ClusterKind.PRFAAS)
        self._observe(TransferLanded(job.request_id))
        if decision.prefill_cluster != decision.decode_cluster:
            self.caches.keep(decision.decode_cluster, job.keys, request.prompt_tokens, start_tokens=0, computed=False)
        node = self._decode[decision.decode_node]
        step_s = node.profile.decode.step_s if node.profile.decode else 0.0
        node.landed(tag, step_s * request.output_tokens)

    def _decoded(self, tag: Any) -> None:
        job, generation = tag
        if job.generation != generation:
            return
        self._decode[job.decision.decode_node].release(job.size_bytes)
        del self._jobs[job.request_id]
        self.result.finished += 1
        if self._planner is not None:
            self._planner.answered(job.request.output_tokens, now=self.loop.now)
        self._observe(RequestEnded(job.request_id))

    def _observe(self, event: Any) -> None:
        self.router.observe(event, now=self.loop.now)
        if self._validate_every and self.loop.done % self._validate_every == 0:
            self.router.validate_state()

    def _measure(self, _: Any) -> None:
        """Close a bucket of the plots over time."""
        sent_bits = sum(link.busy_bits() for link in self._links.values())
        self.result.link_bits.append(sent_bits - self._sent_bits)
        offered_bits = sum(link.offered_bits for link in self._links.values())
        self.result.link_capacity_bits.append(offered_bits - self._offered_bits)
        self._sent_bits, self._offered_bits = sent_bits, offered_bits
        if self._more or self._jobs:
            self.loop.after(BUCKET_S, self._measure)


def _uses(job: _Job, node_id: str) -> bool:
    decision = job.decision
    if decision is None:
        return False
    return decision.decode_node == node_id or (decision.prefill_node == node_id and not job.prefilled)
