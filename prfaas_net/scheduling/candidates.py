"""The ways to serve a request, each with what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas_net.scheduling.events import Arrival
from prfaas_net.scheduling.links import LinkLoad
from prfaas_net.scheduling.profiles import KvSize
from prfaas_net.scheduling.state import UNKNOWN_PREFILL_S, Alone, ClusterKind, FleetState, NodeState, Role

__all__ = ["Candidate", "Predictor"]

# A node that serves end to end is preferred for its cached prefix only while it runs no more than so many times the
# requests of the least loaded one and so many more: vllm-router's and sglang-router's cache_aware policy balances by
# the same two marks (1.5 and 64; there over hundreds of requests a worker).
BALANCE_RATIO, BALANCE_REQUESTS = 1.5, 8


@dataclass(slots=True)
class Candidate:
    """One way to serve a request: a prefill node and a decode node.

    Attributes:
        kind: of the cluster that prefills.
        local: whether that is the cluster where the request will be decoded.
        cached_tokens: prefix of the prompt that the node can use, after a copy if there is one.
        incremental_tokens: what it would have to compute.
        link: what its KVCache crosses; None inside a cluster, or where the link was never described.
        link_bits: how much of it.
        copy_from: cluster that a prefix is copied from first.
        wait_s: until it could begin; ``prefill_s``: how long it then computes.
        link_wait_s: how long what was promised to the link before takes; ``link_s``: how long its own bits take.
        ttft_s: until the KVCache has landed and decoding can begin.
        decode_wait_s: until the decode node has a place in its batch; only told where there is a choice of them.
        peers: nodes of its cluster that prefill, itself included.
    """

    node: NodeState
    decode: NodeState
    kind: ClusterKind
    local: bool
    cached_tokens: int
    incremental_tokens: int
    link: LinkLoad | None = None
    link_bits: float = 0.0
    copy_from: str | None = None
    wait_s: float = 0.0
    prefill_s: float = 0.0
    link_wait_s: float = 0.0
    link_s: float = 0.0
    ttft_s: float = 0.0
    decode_wait_s: float = 0.0
    peers: int = 1


@dataclass
class Predictor:
    """Builds candidates and predicts their times.

    Attributes:
        kv: S_kv(l) of the model; None: transfers are taken to cost nothing.
        pipelined: whether a layer's KVCache leaves while the next one computes.
        local_bps: rate inside a cluster, bits/s; 0: transfers there are taken to cost nothing.
    """

    kv: KvSize | None = None
    pipelined: bool = True
    local_bps: float = 0.0

    def candidates(
        self, arrival: Arrival, decoders: Sequence[NodeState], state: FleetState, *, now: float, needed_tokens: int
    ) -> list[Candidate]:
        """For every decode node, the node of each cluster that would have computed the prompt first.

        In order of decode nodes as given, then of cluster name.
        """
        soonest = []
        for cluster, nodes in state.groups(Role.PREFILL).items():
            best = self._soonest(arrival, cluster, nodes, now, needed_tokens)
            if best is not None:
                node, wait_s = best
                cached = arrival.cached_in(cluster, node.node_id)
                soonest.append((node, wait_s, cached, state.kind_of(cluster), len(nodes)))
        found = []
        for decode in decoders:
            if decode.alone is Alone.ONLY:
                continue
            for node, wait_s, cached, kind, peers in soonest:
                candidate = Candidate(
                    node, decode, kind, node.cluster == decode.cluster, cached, arrival.prompt_tokens - cached
                )
                candidate.wait_s, candidate.peers = wait_s, peers
                self._predict(candidate, arrival, state, now)
                found.append(candidate)
        return found

    def alone(
        self,
        arrival: Arrival,
        decoders: Sequence[NodeState],
        candidates: Sequence[Candidate],
        state: FleetState,
        *,
        now: float,
        needed_tokens: int,
    ) -> list[Candidate]:
        """For the cluster of every decode node, the one that would serve the request soonest all by itself.

        Args:
            candidates: with a prefill node; a cluster that is in them needs no node that only steps in.
        """
        found, helped = [], {c.node.cluster for c in candidates if c.local}
        for cluster in dict.fromkeys(decode.cluster for decode in decoders):
            able = [
                node
                for node in state.alone().get(cluster, ())
                if node.max_model_tokens >= needed_tokens
                and node.node_id not in arrival.excluded_nodes
                and (node.alone is Alone.ONLY or cluster not in helped)
            ]
            if not able:
                continue
            loads = [node.running_requests + node.foreign_requests for node in able]
            most = min(loads) * BALANCE_RATIO + BALANCE_REQUESTS
            best: Candidate | None = None
            for node, load in zip(able, loads, strict=True):
                if load > most:
                    continue
                cached = arrival.cached_in(cluster, node.node_id)
                candidate = Candidate(
                    node, node, state.kind_of(cluster), True, cached, arrival.prompt_tokens - cached, peers=len(able)
                )
                candidate.wait_s = node.wait_s(now)
                self._predict(candidate, arrival, state, now)
                if best is None or (candidate.ttft_s, node.load) < (best.ttft_s, best.node.load):
                    best = candidate
            if best is not None:
                found.append(best)
        return found

    def with_copies(
        self, arrival: Arrival, candidates: list[Candidate], state: FleetState, *, now: float
    ) -> list[Candidate]:
        """For every candidate whose cluster holds less of the prompt than another: itself after a copy of that."""
        held = arrival.copyable_tokens or arrival.cached_tokens
        if not held:
            return []
        found = []
        holder = max(held, key=lambda name: (held[name], name))
        longest = min(held[holder], arrival.prompt_tokens - 1)
        for old in candidates:
            link = state.links.get((holder, old.node.cluster))
            if holder == old.node.cluster or longest <= old.cached_tokens or link is None or not link.usable:
                continue
            rate_bps = link.rate_bps
            if self.kv is None or rate_bps <= 0.0:
                continue
            bits = 8.0 * self.kv.increment(old.cached_tokens, longest)
            new = Candidate(
                old.node, old.decode, old.kind, old.local, longest, arrival.prompt_tokens - longest, peers=old.peers
            )
            copied_s = (link.promised_bits + bits) / rate_bps + link.rtt_s
            new.wait_s = max(old.wait_s, copied_s)
            new.copy_from = holder
            self._predict(new, arrival, state, now)
            if new.link is None:
                # What it costs a link is the copy; its own transfer stays inside the cluster.
                new.link, new.link_bits, new.link_s = link, bits, bits / rate_bps
                new.link_wait_s = link.promised_bits / rate_bps
            found.append(new)
        return found

    def _soonest(
        self, arrival: Arrival, cluster: str, nodes: list[NodeState], now: float, needed_tokens: int
    ) -> tuple[NodeState, float] | None:
        """The node that would end first, and how long the request waits for it.

        The one loop over every node of the fleet that a decision takes: what is the same for all is taken out of it.
        """
        own, tokens, excluded = arrival.node_cached_tokens, arrival.prompt_tokens, arrival.excluded_nodes
        common = tokens - arrival.cached_in(cluster)
        curve_s, profile, seconds = -1.0, None, 0.0
        best, best_end, best_wait = None, 0.0, 0.0
        for node in nodes:
            if node.max_model_tokens < needed_tokens or (excluded and node.node_id in excluded):
                continue
            wait_s = node.wait_s(now) if node.queue or node.foreign_tokens else 0.0
            if curve_s < 0.0 or node.profile is not profile:
                profile = node.profile
                curve_s = (profile.prefill_s if profile else UNKNOWN_PREFILL_S)(common)
            correction = node.correction
            seconds = curve_s * (correction.pace if correction.seen else node.shared.pace)
            if own and node.node_id in own:
                seconds = node.prefill_s(tokens - arrival.cached_in(cluster, node.node_id))
            end_s = wait_s + seconds
            if best is None or end_s < best_end or (end_s == best_end and node.load < best.load):
                best, best_end, best_wait = node, end_s, wait_s
        return None if best is None else (best, best_wait)

    def _predict(self, candidate: Candidate, arrival: Arrival, state: FleetState, now: float) -> None:
        """Fill in the times of a candidate whose wait is known."""
        node, decode = candidate.node, candidate.decode
        candidate.prefill_s = prefill_s = node.prefill_s(candidate.incremental_tokens)
        ttft_s = candidate.wait_s + prefill_s
        if self.kv is not None:
            bits = 8.0 * self.kv.increment(arrival.cached_in(decode.cluster), arrival.prompt_tokens)
            if candidate.local:
                if self.local_bps and node is not decode:
                    transfer_s = bits / self.local_bps
                    ttft_s = max(ttft_s, candidate.wait_s + transfer_s) if self.pipelined else ttft_s + transfer_s
            else:
                link = state.links.get((node.cluster, decode.cluster))
                if link is not None:
                    ttft_s = self._over(link, bits, candidate, ttft_s)
        ttft_s += node.correction.bias_at(now)
        candidate.ttft_s = ttft_s if ttft_s > 0.0 else 0.0

    def _over(self, link: LinkLoad, bits: float, candidate: Candidate, prefilled_s: float) -> float:
        """Seconds until the KVCache has crossed ``link``, which serves what was promised to it before."""
        rate_bps = link.rate_bps
        candidate.link, candidate.link_bits = link, bits
        if rate_bps <= 0.0:
            return prefilled_s
        candidate.link_wait_s = waiting_s = link.promised_bits / rate_bps
        candidate.link_s = own_s = bits / rate_bps
        if self.pipelined:
            # Sending starts with the prefill; the link is free of earlier promises at ``waiting_s``.
            start_s = candidate.wait_s if candidate.wait_s > waiting_s else waiting_s
            end_s = start_s + own_s
            return (end_s if end_s > prefilled_s else prefilled_s) + link.rtt_s / 2
        start_s = prefilled_s if prefilled_s > waiting_s else waiting_s
        return start_s + own_s + link.rtt_s / 2
