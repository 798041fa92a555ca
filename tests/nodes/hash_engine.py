"""An engine whose every token depends on every byte of its state.

It has the shape of a hybrid model (full attention, a window, linear state) and the contract of
:mod:`prfaas_net.nodes.engine_api`, but "attention" is a hash over the cache: a single byte that is lost, swapped or
left over changes all tokens that follow. It is fast, and can be told to be slow, to fail, or to forget a layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from prfaas_net.errors import InternalError, InvalidRequest, PrfaasError
from prfaas_net.kv import CacheLayout, KvKind, LayerLayout, RegionMap, TensorSpec
from prfaas_net.nodes.engine_api import PrefillSink, Sampling, Snapshots

VOCAB = 1000
WINDOW = 8
# Seeds of requests that the batch does not take, and that fail in it.
REFUSED_SEED, BROKEN_SEED = 666, 667
LAYOUT = CacheLayout(
    "hash-model",
    "v1",
    (
        LayerLayout(0, KvKind.LINEAR, (TensorSpec("state", (4, 8)),)),
        LayerLayout(1, KvKind.FULL, (TensorSpec("k", (2, 16)), TensorSpec("v", (2, 16)))),
        LayerLayout(2, KvKind.WINDOW, (TensorSpec("k", (8,)),), window_tokens=WINDOW),
        LayerLayout(3, KvKind.FULL, (TensorSpec("latent", (24,)),)),
    ),
)


@dataclass(frozen=True)
class HashLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class HashResult:
    first_token: int
    finish_reason: str | None
    logprobs: HashLogprobs | None = None


@dataclass(frozen=True)
class HashStep:
    key: int
    token: int
    finish_reason: str | None
    logprobs: HashLogprobs | None = None
    error: PrfaasError | None = None


def logprobs_of(token: int, sampling: Sampling) -> HashLogprobs | None:
    """Invented ones, that depend on the token."""
    if sampling.logprobs is None:
        return None
    return HashLogprobs(-float(token), tuple((token + i, -float(token + i)) for i in range(sampling.logprobs)))


@dataclass
class HashEngine:
    """Satisfies ``Engine``.

    Attributes:
        chunk_seconds: what a prefill chunk takes.
        fail_at_token: the prefill raises when it gets there.
        forget_layer: this layer is never emitted.
        step_seconds: what a decode step takes.
        fail_step: the next decode step raises.
        batch_sizes: of every decode step so far.
        joined: the prompt tokens that each sequence came with.
        started_at: the token that each prefill began at.
    """

    model_name: str = "hash-model"
    layout: CacheLayout = LAYOUT
    max_model_tokens: int = 4096
    vocab_size: int = VOCAB
    prefill_chunk_tokens: int = 64
    chunk_seconds: float = 0.0
    fail_at_token: int | None = None
    forget_layer: int | None = None
    running: threading.Event = field(default_factory=threading.Event)
    step_seconds: float = 0.0
    fail_step: bool = False
    batch_sizes: list[int] = field(default_factory=list)
    joined: list[list[int]] = field(default_factory=list)
    started_at: list[int] = field(default_factory=list)

    def prefill(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        regions: RegionMap,
        buffer: Any,
        sink: PrefillSink,
        *,
        start_token: int = 0,
        snapshots: Snapshots | None = None,
    ) -> HashResult | None:
        state = _State(regions, buffer)
        self.running.set()
        self.started_at.append(start_token)
        wanted = set(snapshots.boundaries(start_token, len(token_ids))) if snapshots else set()
        steps = range(start_token + self.prefill_chunk_tokens, len(token_ids), self.prefill_chunk_tokens)
        start = start_token
        for stop in sorted({*steps, *wanted, len(token_ids)}):
            if self.fail_at_token is not None and stop > self.fail_at_token:
                raise RuntimeError("the engine broke")
            time.sleep(self.chunk_seconds)
            for layer in self.layout.layers:
                if sink.cancelled():
                    return None
                for position in range(start, stop):
                    state.write(layer, position, token_ids[position])
                done = stop == len(token_ids)
                if (layer.kind is KvKind.FULL or done) and layer.index != self.forget_layer:
                    sink.emit(layer.index, stop)
            if snapshots is not None and stop in wanted:
                snapshots.take(stop)
            start = stop
        token = state.next_token(len(token_ids))
        reason = "length" if sampling.max_tokens == 1 else None
        return HashResult(token, reason, logprobs_of(token, sampling))

    def resume(self, n_tokens: int, sampling: Sampling, regions: RegionMap, buffer: Any) -> HashSequence:
        return HashSequence(_State(regions, buffer), n_tokens, sampling.max_tokens - 1)

    def batch(self) -> HashBatch:
        return HashBatch(self)

    def generate(self, token_ids: Sequence[int], sampling: Sampling) -> list[int]:
        """The single-process run."""
        regions = RegionMap(self.layout, len(token_ids) + sampling.max_tokens)
        buffer = bytearray(regions.total_bytes)
        result = self.prefill(token_ids, sampling, regions, buffer, _NoSink())
        assert result is not None
        tokens, reason = [result.first_token], result.finish_reason
        sequence = self.resume(len(token_ids), sampling, regions, buffer)
        while reason is None:
            token, reason = sequence.step(tokens[-1])
            tokens.append(token)
        return tokens


class HashBatch:
    """Steps every sequence; counts what it is asked for."""

    def __init__(self, engine: HashEngine) -> None:
        self._engine = engine
        self._running: dict[int, tuple[HashSequence, int, Sampling]] = {}
        self._next_key = 0

    def join(
        self,
        n_tokens: int,
        first_token: int,
        sampling: Sampling,
        regions: RegionMap,
        buffer: Any,
        prompt_tokens: Collection[int] = (),
    ) -> int:
        if sampling.seed == REFUSED_SEED:
            raise InvalidRequest("the engine refuses this seed")
        self._engine.joined.append(sorted(prompt_tokens))
        self._next_key += 1
        self._running[self._next_key] = (
            self._engine.resume(n_tokens, sampling, regions, buffer),
            first_token,
            sampling,
        )
        return self._next_key

    def leave(self, key: int) -> None:
        self._running.pop(key, None)

    def step(self) -> list[HashStep]:
        time.sleep(self._engine.step_seconds)
        self._engine.batch_sizes.append(len(self._running))
        if self._engine.fail_step:
            raise RuntimeError("the engine broke")
        steps = []
        for key, (sequence, token, sampling) in list(self._running.items()):
            if sampling.seed == BROKEN_SEED:
                del self._running[key]
                steps.append(HashStep(key, -1, None, error=InternalError("the sequence broke")))
                continue
            token, reason = sequence.step(token)
            if reason is None:
                self._running[key] = (sequence, token, sampling)
            else:
                del self._running[key]
            steps.append(HashStep(key, token, reason, logprobs_of(token, sampling)))
        return steps


class HashSequence:
    def __init__(self, state: _State, n_tokens: int, left: int) -> None:
        self._state, self._n_tokens, self._left = state, n_tokens, left

    def step(self, token: int) -> tuple[int, str | None]:
        for layer in LAYOUT.layers:
            self._state.write(layer, self._n_tokens, token)
        self._n_tokens += 1
        self._left -= 1
        return self._state.next_token(self._n_tokens), "length" if self._left == 0 else None


class _State:
    def __init__(self, regions: RegionMap, buffer: Any) -> None:
        self.arrays = {
            (layer.index, tensor.name): regions.array(buffer, layer.index, tensor.name)
            for layer in LAYOUT.layers
            for tensor in layer.tensors
        }

    def write(self, layer: LayerLayout, position: int, token: int) -> None:
        for tensor in layer.tensors:
            array = self.arrays[layer.index, tensor.name]
            row = np.float32(xxhash.xxh3_64_intdigest(b"%d %d %d" % (layer.index, position, token)) % 65521)
            if layer.kind is KvKind.LINEAR:
                if position == 0:
                    array[:] = 0  # whatever the memory held before
                array[:] = array * np.float32(0.5) + row
            elif layer.kind is KvKind.WINDOW:
                if position >= WINDOW:
                    array[:-1] = array[1:].copy()
                array[min(position, WINDOW - 1)] = row
            else:
                array[position] = row

    def next_token(self, n_tokens: int) -> int:
        digest = xxhash.xxh3_64()
        for layer in LAYOUT.layers:
            for tensor in layer.tensors:
                array = self.arrays[layer.index, tensor.name]
                rows = array if layer.kind is KvKind.LINEAR else array[: layer.rows(n_tokens)]
                digest.update(np.ascontiguousarray(rows).tobytes())
        return digest.intdigest() % VOCAB


class _NoSink:
    def emit(self, layer_index: int, stop_token: int) -> None: ...

    def cancelled(self) -> bool:
        return False
