"""The loop closed: a fleet under open-loop load on an impaired link, of which a competitor takes most for a while.

The same arrivals are served several times. ``detector``: the router is told what the link's detector says. ``frozen``:
fixed shares, every long prompt to the PrfaaS cluster, whatever its link does. ``deaf``: the router of ``detector`` that
is told nothing; it learns only from how late landings were.

The model is random and dense, with little to compute and a large KVCache, so that it is the link that counts. The PD
prefill node is paced, so that it is many times slower than the PrfaaS node, as the hardware of a PD cluster is, and as
slow on every machine. A decode node has room for some prompts, as one that is used well has: what is on its way to it
has its place reserved, and when there is none left, requests wait for it before they are prefilled anywhere.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.models import write_model
from prfaas_net.congestion.detectors import DETECTORS, replay
from prfaas_net.congestion.samples import read_log
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import PrfaasError, UsageError
from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.localfleet.fleet import ClusterPlace, FleetPlan, LocalFleet
from tools.netlab.flows import Load
from tools.netlab.link import Link
from tools.netlab.traffic import Traffic

__all__ = ["ARMS", "Arm", "Experiment", "Played", "Served", "play_arm", "write_closed_loop_model"]

_DEMO = Path(__file__).parents[2] / "prfaas_net" / "data" / "demo_model"
# 96 KiB of KVCache a token: eight layers, 24 heads of 64, keys and values, float32.
_MODEL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 24,
    "num_key_value_heads": 24,
}  # fmt: skip
VOCAB_SIZE = 4096
# Longer prompts than this are the ones worth offloading; ``frozen`` offloads exactly them.
THRESHOLD_TOKENS = 64
# KVCache leaves in pieces of so many tokens, long before a prompt is run on the slow node.
_CHUNK = "32"
_HEALTHY_LIMIT_S, _ANSWER_LIMIT_S = 60.0, 120.0


@dataclass(frozen=True)
class Arm:
    """How requests are routed."""

    policy: str
    follow_state: bool


ARMS = {
    "detector": Arm("earliest-finish", follow_state=True),
    "frozen": Arm("threshold", follow_state=False),
    "deaf": Arm("earliest-finish", follow_state=False),
}


@dataclass(frozen=True)
class Experiment:
    """What happens.

    Attributes:
        rate_bps, delay_ms: of the link, one way.
        budget: that KVCache may use of it.
        requests_per_s: Poisson, of all prompts; ``long_share`` of them have ``long_tokens`` (from, to), the others
            ``short_tokens``.
        arena: memory of each node for KVCache. What is on its way has its place reserved, so a backlog fills it.
        home_tokens_per_s: that the PD cluster's prefill node runs.
        warm_s: before the competitor comes; ``event_s``: while it is there; ``after_s``: from then on.
        competitor_bps: what it is paced to, all its flows together.
        deadline_s: what the link's backlog may be worth at most; ``patience`` is what the router is given for it: how
            much later over the link than at home.
    """

    rate_bps: float = 200e6
    delay_ms: float = 20.0
    budget: str = "180Mbps"
    requests_per_s: float = 1.4
    long_share: float = 0.7
    long_tokens: tuple[int, int] = (96, 160)
    short_tokens: tuple[int, int] = (16, 32)
    output_tokens: int = 8
    arena: str = "64MiB"
    home_tokens_per_s: float = 200.0
    warm_s: float = 25.0
    event_s: float = 30.0
    after_s: float = 25.0
    competitor_bps: float = 160e6
    competitor_flows: int = 16
    deadline_s: float = 10.0
    patience: str = "3s"
    seed: int = 1

    @property
    def total_s(self) -> float:
        return self.warm_s + self.event_s + self.after_s

    def link(self) -> dict[str, Any]:
        """Settings of the link."""
        return {"rate_bps": self.rate_bps, "delay_ms": self.delay_ms}

    def arrivals(self) -> list[tuple[float, list[int]]]:
        """(when, token ids), the same every time; no prompt begins like another."""
        draw, found, at_s = random.Random(self.seed), [], 0.0
        while (at_s := at_s + draw.expovariate(self.requests_per_s)) < self.total_s:
            bounds = self.long_tokens if draw.random() < self.long_share else self.short_tokens
            found.append((at_s, [draw.randrange(16, VOCAB_SIZE) for _ in range(draw.randint(*bounds))]))
        return found


@dataclass(frozen=True)
class Served:
    """One request. Times in seconds: of its arrival since the start, the others since its arrival.

    Attributes:
        reserved_s: when the decode node had room for it; before that it is prefilled nowhere.
        ttft_s: the first token at the client. It overtakes the KVCache.
        second_s: the second token there, which is the first that is decoded from the KVCache.
        landed_s: when the gateway heard that the KVCache had landed.
        exposed_s: from the prompt's end until its KVCache was there: what the link's backlog was really worth then.
        finished_s: the last token; what the decode node held for it is free again.
        error: why there is no answer; times are then 0.
    """

    at_s: float
    prompt_tokens: int
    prefilled_in: str = ""
    reserved_s: float = 0.0
    ttft_s: float = 0.0
    second_s: float = 0.0
    landed_s: float = 0.0
    exposed_s: float = 0.0
    finished_s: float = 0.0
    kv_bytes: int = 0
    error: str | None = None

    @property
    def long(self) -> bool:
        return self.prompt_tokens > THRESHOLD_TOKENS

    @property
    def offloaded(self) -> bool:
        return self.prefilled_in == "prfaas"


@dataclass
class Played:
    """One arm, played to its end.

    Attributes:
        start_s: on the clock of ``verdicts``.
        event: when the competitor began and ended, in seconds since the start.
        competitor_bps: what it brought through.
        verdicts: of the link from the PrfaaS prefill node, by every sample of its sockets.
    """

    arm: str
    experiment: Experiment
    start_s: float = 0.0
    event: tuple[float, float] = (0.0, 0.0)
    competitor_bps: float = 0.0
    served: list[Served] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def drain_s(self, verdict: Verdict) -> float:
        """What the backlog is worth; where the link was not measured, at the rate that is left of it."""
        if verdict.drain_s is not None:
            return verdict.drain_s
        during = self.event[0] <= verdict.at_s - self.start_s < self.event[1]
        rate_bps = self.experiment.rate_bps - (self.experiment.competitor_bps if during else 0.0)
        return 8 * verdict.backlog_bytes / rate_bps


def write_closed_loop_model(directory: Path) -> Path:
    """The model, with the demo model's tokenizer; returns its directory."""
    write_model(directory, "gqa", {**_MODEL, "vocab_size": VOCAB_SIZE})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO / name, directory / name)
    return directory


def _plan(link: Link, model: Path, arm: Arm, experiment: Experiment, log: Path) -> FleetPlan:
    common = {"PRFAAS_PREFILL__CACHE__ENABLED": "false", "PRFAAS_DECODE__CACHE__ENABLED": "false"}
    common["PRFAAS_PREFILL__PREFILL_CHUNK_TOKENS"] = _CHUNK
    fast = {"PRFAAS_PREFILL__KV__TELEMETRY_LOG": str(log)}
    slow = {
        "PRFAAS_PREFILL__PREFILL_PACE": str(experiment.home_tokens_per_s),
        "PRFAAS_GATEWAY__FLEET__FOLLOW_STATE": str(arm.follow_state).lower(),
        "PRFAAS_GATEWAY__LINK_PATIENCE": experiment.patience,
    }
    return FleetPlan(
        model=str(model), host=link.door("b"), port=0, threshold_tokens=THRESHOLD_TOKENS, policy=arm.policy,
        budget=experiment.budget, arena=experiment.arena,
        prfaas=ClusterPlace(link.a.space, link.a.address, {**common, **fast}),
        pd=ClusterPlace(link.b.space, link.b.address, {**common, **slow}),
    )  # fmt: skip


def play_arm(name: str, experiment: Experiment, link: Link, model: Path) -> Played:
    """Play one of :data:`ARMS` on a link; about ten seconds longer than the experiment lasts.

    Args:
        link: as :meth:`Experiment.link` has it, with nothing on it.
        model: of :func:`write_closed_loop_model`.

    Raises:
        UsageError: there is no such arm.
    """
    if name not in ARMS:
        raise UsageError("no such arm", expected=f"one of {', '.join(ARMS)}", found=repr(name))
    played = Played(name, experiment)
    with tempfile.TemporaryDirectory() as folder:
        plan = _plan(link, model, ARMS[name], experiment, Path(folder))
        asyncio.run(_play(played, plan, link))
        for path in sorted(Path(folder).glob("*.jsonl")):
            with path.open("rb") as file:
                played.verdicts += replay(next(iter(DETECTORS)), *read_log(file))
    played.verdicts.sort(key=lambda verdict: verdict.at_s)
    return played


async def _play(played: Played, plan: FleetPlan, link: Link) -> None:
    experiment = played.experiment
    rival = Load(cc="cubic", rate_bps=experiment.competitor_bps / experiment.competitor_flows)
    with Traffic(link, "ab", rival, flows=0) as traffic:
        async with (
            LocalFleet(plan) as fleet,
            GatewayClient(fleet.url, api_key=fleet.api_key, timeout_s=_ANSWER_LIMIT_S) as client,
        ):
            await client.wait_healthy(within_s=_HEALTHY_LIMIT_S)
            model, _ = await client.model()
            await _teach(client, model)
            played.start_s = time.monotonic()
            tasks = [asyncio.create_task(_serve(client, model, played, *arrival)) for arrival in experiment.arrivals()]
            await _compete(played, traffic, rival)
            played.served = sorted(await asyncio.gather(*tasks), key=lambda served: served.at_s)


async def _teach(client: GatewayClient, model: str) -> None:
    """A few prompts one after the other, so that each node has shown its pace, and the link stands."""
    draw = random.Random(0)
    for n_tokens in (128, 128, 24, 128, 24, 128):
        prompt = [draw.randrange(16, VOCAB_SIZE) for _ in range(n_tokens)]
        await client.complete(_body(model, prompt, 2))


def _body(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def _serve(client: GatewayClient, model: str, played: Played, at_s: float, prompt: list[int]) -> Served:
    """Send a request when its time has come, whatever became of those before."""
    await asyncio.sleep(max(0.0, played.start_s + at_s - time.monotonic()))
    try:
        answer = await client.complete(_body(model, prompt, played.experiment.output_tokens))
    except (PrfaasError, TimeoutError) as error:
        return Served(at_s, len(prompt), error=str(error))
    record: Mapping[str, Any] = answer.record
    stages_s: Mapping[str, float] = record["stages_s"]
    return Served(
        at_s=at_s,
        prompt_tokens=len(prompt),
        prefilled_in=str(record["prefilled_in"]),
        reserved_s=stages_s["reserved"],
        ttft_s=answer.ttft_s,
        second_s=answer.token_s[1],
        landed_s=stages_s["landed"],
        exposed_s=float(record["exposed_s"] or 0.0),
        finished_s=stages_s["finished"],
        kv_bytes=sum((record["kv_bytes"] or {}).values()),
    )


async def _compete(played: Played, traffic: Traffic, rival: Load) -> None:
    experiment = played.experiment
    await asyncio.sleep(max(0.0, played.start_s + experiment.warm_s - time.monotonic()))
    began_s = time.monotonic() - played.start_s
    for _ in range(experiment.competitor_flows):
        await asyncio.to_thread(traffic.add, rival)
    before_s, before = await asyncio.to_thread(traffic.received)
    await asyncio.sleep(max(0.0, played.start_s + began_s + experiment.event_s - time.monotonic()))
    after_s, after = await asyncio.to_thread(traffic.received)
    await asyncio.to_thread(traffic.stop)
    played.event = (began_s, time.monotonic() - played.start_s)
    played.competitor_bps = 8 * (after - before) / (after_s - before_s)
