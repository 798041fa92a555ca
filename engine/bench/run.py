"""The benchmark: our times and transformers', taken in turn, and how prefill grows with length."""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend import NUMPY
from engine.bench.models import BENCH_MODELS, write_model
from engine.bench.theirs import Transformers, start_transformers
from engine.blas import limit_blas_threads
from engine.checkpoint import load_checkpoint
from engine.engine import Engine
from engine.rows import Rows
from engine.sampling import Greedy
from engine.spec import ModelSpec, Weights
from prfaas_net.kv import KvKind, RegionMap

__all__ = ["BenchPlan", "Row", "fit_exponent", "run_bench"]

# A round that takes longer than this is not worth five repetitions.
LONG_ROUND_S = 20.0
DECODE_CONTEXT = 256


@dataclass(frozen=True)
class BenchPlan:
    """What is measured.

    Attributes:
        reference_python: a Python with transformers; this one is tried if none is given.
    """

    models: Sequence[str] = tuple(BENCH_MODELS)
    prefill_tokens: Sequence[int] = (1024, 4096, 16384)
    decode_batches: Sequence[int] = (1, 4, 16)
    decode_steps: int = 16
    rounds: int = 5
    threads: int = 1
    reference_python: str | None = None


@dataclass(frozen=True)
class Row:
    """One figure: a phase of a model, at a prompt length or a batch size (the other is None)."""

    model: str
    phase: str
    tokens: int | None
    batch: int | None
    tokens_per_s: float
    transformers_tokens_per_s: float | None
    over_transformers: float | None
    rounds: int


def run_bench(plan: BenchPlan, told: Callable[[Row], None]) -> dict[str, Any]:
    """Measure everything; ``told`` hears of each row as it is done. Returns the report."""
    limit_blas_threads(plan.threads)
    rows: list[Row] = []
    exponents: dict[str, float] = {}
    mixers: dict[str, float] = {}
    theirs = start_transformers(plan.reference_python, plan.threads)
    try:
        for model in plan.models:
            with tempfile.TemporaryDirectory() as scratch:
                directory = write_model(Path(scratch) / model, model)
                for row in _rows(plan, model, directory, theirs):
                    rows.append(row)
                    told(row)
                mixers |= {f"{model} {kind}": x for kind, x in _mixer_exponents(directory, plan).items()}
            points = [(row.tokens, row.tokens / row.tokens_per_s) for row in rows if row.model == model and row.tokens]
            if len(points) > 1:
                exponents[model] = fit_exponent(points)
    finally:
        if theirs is not None:
            theirs.__exit__(None, None, None)
    return {
        "rows": [asdict(row) for row in rows],
        "prefill_exponent": exponents,
        "mixer_exponent": mixers,
        "threads": plan.threads,
        "decode_context_tokens": DECODE_CONTEXT,
        "machine": platform.machine(),
        "reference": theirs.versions if theirs is not None else None,
    }


def fit_exponent(points: Sequence[tuple[float, float]]) -> float:
    """The p of seconds = c * tokens^p that fits best."""
    tokens, seconds = np.log(np.asarray(points, dtype=np.float64)).T
    return round(float(np.polyfit(tokens, seconds, 1)[0]), 3)


def _rows(plan: BenchPlan, model: str, directory: Path, theirs: Transformers | None) -> Iterator[Row]:
    engine = Engine.load(directory, blas_threads=plan.threads)
    if theirs is not None:
        theirs.load(directory)
    for n in plan.prefill_tokens:
        prompt = [token % 4000 + 5 for token in range(n)]
        other = None if theirs is None else _bound(theirs.prefill, n)
        ours_s, theirs_s, rounds = _in_turn(_bound(_prefill, engine, prompt), other, plan.rounds)
        yield _row(model, "prefill", n, None, n, ours_s, theirs_s, rounds)
    for batch in plan.decode_batches:
        other = None if theirs is None else _bound(theirs.decode, batch, DECODE_CONTEXT, plan.decode_steps)
        ours = _bound(_decode, engine, batch, plan.decode_steps)
        ours_s, theirs_s, rounds = _in_turn(ours, other, plan.rounds)
        yield _row(model, "decode", None, batch, batch * plan.decode_steps, ours_s, theirs_s, rounds)


def _bound(call: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: call(*arguments)


def _in_turn(
    ours: Callable[[], float], theirs: Callable[[], float] | None, n_rounds: int
) -> tuple[float, float | None, int]:
    """Medians of both, measured alternately after one warm-up each; and how many rounds were made."""
    started = time.perf_counter()
    first = ours(), theirs() if theirs is not None else None
    if time.perf_counter() - started > LONG_ROUND_S:
        return *first, 1
    mine, other = [], []
    for _ in range(n_rounds):
        mine.append(ours())
        if theirs is not None:
            other.append(theirs())
    return statistics.median(mine), statistics.median(other) if other else None, n_rounds


def _row(
    model: str, phase: str, tokens: int | None, batch: int | None, made: int,
    ours_s: float, theirs_s: float | None, rounds: int,
) -> Row:  # fmt: skip
    return Row(
        model, phase, tokens, batch, round(made / ours_s, 1),
        None if theirs_s is None else round(made / theirs_s, 1),
        None if theirs_s is None else round(theirs_s / ours_s, 2), rounds,
    )  # fmt: skip


def _prefill(engine: Engine, prompt: list[int]) -> float:
    regions = RegionMap(engine.layout, len(prompt))
    buffer = bytearray(regions.total_bytes)
    started = time.perf_counter()
    engine.prefill(prompt, Greedy(1, ignore_eos=True), regions, buffer)
    return time.perf_counter() - started


def _decode(engine: Engine, batch_size: int, steps: int) -> float:
    sampling, batch = Greedy(steps + 2, ignore_eos=True), engine.batch()
    for index in range(batch_size):
        first = index * DECODE_CONTEXT
        prompt = [token % 4000 + 5 for token in range(first, first + DECODE_CONTEXT)]
        regions = RegionMap(engine.layout, DECODE_CONTEXT + sampling.max_tokens)
        buffer = bytearray(regions.total_bytes)
        result = engine.prefill(prompt, sampling, regions, buffer)
        assert result is not None
        batch.join(DECODE_CONTEXT, result.first_token, sampling, regions, buffer)
    batch.step()  # warms up
    started = time.perf_counter()
    for _ in range(steps):
        batch.step()
    return time.perf_counter() - started


def _mixer_exponents(directory: Path, plan: BenchPlan) -> dict[str, float]:
    """How the time of one linear or window layer grows with length, without the rest of the model."""
    checkpoint = load_checkpoint(directory)
    exponents = {}
    for index, layer in enumerate(checkpoint.spec.layers):
        if layer.mixer.kind is KvKind.FULL or layer.mixer.kind.value in exponents or len(plan.prefill_tokens) < 2:
            continue
        shapes = layer.mixer.weight_shapes()
        weights = {name: checkpoint.read(f"model.layers.{index}.self_attn.{name}") for name in shapes}
        points = [(n, _mixer_seconds(checkpoint.spec, index, weights, n)) for n in plan.prefill_tokens]
        exponents[layer.mixer.kind.value] = fit_exponent(points)
    return exponents


def _mixer_seconds(spec: ModelSpec, index: int, weights: Weights, n_tokens: int) -> float:
    """The median of three, in passes of 512 tokens as prefill makes them."""
    layer = spec.layers[index].mixer
    mixer = layer.build(weights, NUMPY)
    x = np.random.default_rng(0).standard_normal((512, spec.hidden_size), np.float32)
    rows = layer.window_tokens if layer.window_tokens else 1
    times = []
    for _ in range(3):
        shapes = {t.name: (rows, *t.shape) if layer.window_tokens else t.shape for t in layer.cache_tensors()}
        state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        started = time.perf_counter()
        for start in range(0, n_tokens, 512):
            mixer.forward(x, [state], Rows([(start, 512)], NUMPY), 512)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
