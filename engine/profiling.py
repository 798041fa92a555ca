"""The profile of a model on this machine: what a scheduler and a planner need to know of an engine.

T_prefill(l), the time of one decode step by batch, and S_kv(l), as the paper names them. The file is JSON; its
keys are described in docs/engine.md.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

from engine.engine import Engine
from engine.sampling import Greedy
from prfaas_net.kv import RegionMap

__all__ = ["PROFILE_VERSION", "profile_lengths", "profile_model"]

PROFILE_VERSION = 1
_CONTEXT = 512
_STEPS = 8


def profile_lengths(longest: int) -> list[int]:
    """Prompt lengths to measure: doubling from 128, and the longest."""
    lengths = [128 << index for index in range(24) if 128 << index < longest]
    return [*lengths, longest]


def profile_model(engine: Engine, lengths: Sequence[int], batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure, and return the profile; every time is a median of ``rounds`` after one warm-up."""
    prefill = [{"tokens": n, "seconds": _prefill_s(engine, n, rounds)} for n in lengths]
    context = max(1, min(_CONTEXT, engine.max_model_tokens - _STEPS - 2))
    decode = [
        {"batch": n, "context_tokens": context, "step_seconds": _step_s(engine, n, context, rounds)} for n in batches
    ]
    sizes = [{"tokens": n, **{kind.value: size for kind, size in engine.layout.kv_bytes(n).items()}} for n in lengths]
    return {
        "version": PROFILE_VERSION,
        "model": engine.model_name,
        "weights_digest": engine.layout.weights_digest,
        "layout": engine.layout.fingerprint,
        "max_model_tokens": engine.max_model_tokens,
        "prefill_chunk_tokens": engine.prefill_chunk_tokens,
        "machine": f"{platform.system()} {platform.machine()}",
        "prefill": prefill,
        "decode": decode,
        "kv_bytes": sizes,
    }


def _prompt(engine: Engine, n_tokens: int, seed: int) -> list[int]:
    """Tokens that are not all the same."""
    return [(7919 * (position + seed) + 13) % engine.vocab_size for position in range(n_tokens)]


def _prefill_s(engine: Engine, n_tokens: int, rounds: int) -> float:
    regions = RegionMap(engine.layout, n_tokens)
    buffer, times = bytearray(regions.total_bytes), []
    for seed in range(rounds + 1):
        prompt = _prompt(engine, n_tokens, seed)
        started = time.perf_counter()
        engine.prefill(prompt, Greedy(1, ignore_eos=True), regions, buffer)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _step_s(engine: Engine, batch_size: int, context: int, rounds: int) -> float:
    sampling = Greedy(_STEPS + 2, ignore_eos=True)
    regions, times = RegionMap(engine.layout, context + sampling.max_tokens), []
    for _ in range(rounds):
        batch = engine.batch()
        for seed in range(batch_size):
            buffer = bytearray(regions.total_bytes)
            result = engine.prefill(_prompt(engine, context, seed), sampling, regions, buffer)
            assert result is not None
            batch.join(context, result.first_token, sampling, regions, buffer)
        batch.step()
        started = time.perf_counter()
        for _ in range(_STEPS):
            batch.step()
        times.append((time.perf_counter() - started) / _STEPS)
    return statistics.median(times)
