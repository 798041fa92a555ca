"""The engine: prefill and decode of single sequences, in buffers that the caller owns."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.backend import Backend, load_backend
from engine.blas import limit_blas_threads
from engine.checkpoint import Checkpoint, load_checkpoint
from engine.decode import DecodeBatch, Decoding, Stepped
from engine.model import Model
from engine.publish import Publisher
from engine.rows import Rows
from engine.sampling import Sampler, SamplingParams, TokenLogprobs, check_sampling
from engine.state import SequenceState
from prfaas_net.errors import InvalidRequest, UsageError
from prfaas_net.kv import CacheLayout, KvKind, RegionMap

__all__ = ["Batch", "Engine", "PrefillResult", "Sink", "Snapshots"]

# How long a prefill that waits for its pace takes at most to notice that it was cancelled.
_PACE_LOOK_S = 0.02


class Sink(Protocol):
    """Told of state the moment it is final in the buffer."""

    def emit(self, layer_index: int, stop_token: int) -> None: ...

    def cancelled(self) -> bool: ...


class Snapshots(Protocol):
    """Wants the state of a prompt at certain lengths, for a prefix cache."""

    def boundaries(self, start: int, stop: int) -> Sequence[int]:
        """Lengths in ``start < length < stop`` at which to be told, ascending."""
        ...

    def take(self, n_tokens: int) -> None:
        """The buffer holds the state after exactly ``n_tokens`` tokens, of every kind, until this returns."""
        ...


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill ends with.

    Attributes:
        first_token: the token after the prompt.
        finish_reason: ``"stop"`` or ``"length"`` if it already ends the request.
        logits: [vocab_size], the model's own.
        logprobs: if the request asked for them.
    """

    first_token: int
    finish_reason: str | None
    logits: np.ndarray[Any, Any]
    logprobs: TokenLogprobs | None = None


class Engine:
    """One model, ready to prefill and decode. Safe for use from several threads, each with its own buffer.

    Args:
        prefill_chunk_tokens: tokens that one pass through the layers takes. More are faster up to a point;
            fewer let state leave earlier.
        pace_tokens_per_s: a prefill takes at least this long: to rehearse slower hardware. None: as fast as it can.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        *,
        prefill_chunk_tokens: int = 512,
        pace_tokens_per_s: float | None = None,
    ) -> None:
        if prefill_chunk_tokens < 1:
            raise UsageError("a prefill chunk needs tokens", expected="1 or more", found=prefill_chunk_tokens)
        if pace_tokens_per_s is not None and pace_tokens_per_s <= 0:
            raise UsageError("a pace is above 0", expected="tokens a second, or None", found=pace_tokens_per_s)
        self._model = Model(checkpoint, backend)
        self._backend = backend
        self._eos_token_ids = checkpoint.eos_token_ids
        self._layout = checkpoint.spec.layout(checkpoint.name, checkpoint.weights_digest)
        self._kinds = [layer.kind for layer in self._layout.layers]
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._pace_tokens_per_s = pace_tokens_per_s

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        name: str | None = None,
        backend: str = "numpy",
        prefill_chunk_tokens: int = 512,
        blas_threads: int = 1,
        kv_dtype: str = "float32",
        pace_tokens_per_s: float | None = None,
    ) -> Engine:
        """An engine for a Hugging Face checkpoint directory.

        Args:
            name: what the model is called; the directory's name if not given.
            backend: ``numpy`` or ``cupy``.
            blas_threads: threads of a matrix product, for the whole process; see :mod:`engine.blas` for why
                more than one is rarely good. OPENBLAS_NUM_THREADS overrides it.
            kv_dtype: ``float32`` or ``bfloat16``: in which keys, values and latents are kept; part of the layout.

        Raises:
            ConfigError: the checkpoint or the backend cannot be used; nothing is half loaded.
        """
        arrays = load_backend(backend)
        checkpoint = load_checkpoint(Path(directory), name, kv_dtype)
        limit_blas_threads(blas_threads)
        return cls(checkpoint, arrays, prefill_chunk_tokens=prefill_chunk_tokens, pace_tokens_per_s=pace_tokens_per_s)

    @property
    def model_name(self) -> str:
        return self._layout.model

    @property
    def layout(self) -> CacheLayout:
        return self._layout

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus output that the model admits."""
        return self._model.spec.max_tokens

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._eos_token_ids

    @property
    def prefill_chunk_tokens(self) -> int:
        """Tokens that one pass through the layers takes: the granularity of ``Sink.emit``."""
        return self._prefill_chunk_tokens

    def prefill(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        regions: RegionMap,
        buffer: Any,
        sink: Sink | None = None,
        *,
        start_token: int = 0,
        snapshots: Snapshots | None = None,
    ) -> PrefillResult | None:
        """Run the prompt; fill ``buffer``; tell ``sink``, if there is one, as layers complete.

        Args:
            token_ids: the whole prompt.
            start_token: the buffer holds the state of so many tokens of it already: they are not run again.
            snapshots: is shown the state at the lengths that it names.

        Returns:
            None if the sink cancelled it.

        Raises:
            InvalidRequest: no node could serve the request.
            UsageError: the buffer does not fit, or the whole prompt is cached.
        """
        self._check(token_ids, sampling)
        n_tokens = len(token_ids)
        if not 0 <= start_token < n_tokens:
            raise UsageError("a prefill needs a token to run", expected=f"0 to {n_tokens - 1}", found=start_token)
        sink = _NoSink() if sink is None else sink
        state = SequenceState(self._layout, regions, buffer, n_tokens, self._backend)
        if start_token == 0:
            state.clear()
        publisher = Publisher(state, self._backend, sink.emit)
        last_row, began_s = None, time.monotonic()
        try:
            for start, stop, wanted in self._chunks(start_token, n_tokens, snapshots):
                last_row = self._pass(token_ids[start:stop], state, start, sink, publisher, last=stop == n_tokens)
                if last_row is None or not self._keep_pace(began_s, stop - start_token, sink):
                    return None
                if wanted and snapshots is not None:
                    self._show(stop, publisher, snapshots)
            publisher.finish()
        finally:
            publisher.abandon()
        logits = self._model.logits(last_row)[0]
        sampler = Sampler(sampling, self._eos_token_ids, set(token_ids) if sampling.repetition_penalty != 1 else ())
        choice = sampler.choose(logits, n_tokens)
        return PrefillResult(choice.token, sampler.accept(choice.token), logits, choice.logprobs)

    def _chunks(self, start: int, n_tokens: int, snapshots: Snapshots | None) -> Iterator[tuple[int, int, bool]]:
        """Where each pass begins and ends, and whether a snapshot is wanted after it."""
        wanted = set(snapshots.boundaries(start, n_tokens)) if snapshots is not None else set()
        step = self._prefill_chunk_tokens
        wanted = {cut for cut in wanted if start < cut < n_tokens}
        cuts = sorted({*range(start + step, n_tokens, step), *wanted, n_tokens})
        for stop in cuts:
            yield start, stop, stop in wanted
            start = stop

    def _keep_pace(self, began_s: float, n_tokens: int, sink: Sink) -> bool:
        """Wait until so many tokens may have been run; False if it was cancelled meanwhile."""
        if self._pace_tokens_per_s is None:
            return True
        due_s = began_s + n_tokens / self._pace_tokens_per_s
        while (left_s := due_s - time.monotonic()) > 0:
            if sink.cancelled():
                return False
            time.sleep(min(left_s, _PACE_LOOK_S))
        return True

    def _show(self, n_tokens: int, publisher: Publisher, snapshots: Snapshots) -> None:
        publisher.finish()  # rows that are still on their way
        for layer in self._layout.layers:
            if layer.kind is not KvKind.FULL:
                publisher.write_now(layer.index)
        snapshots.take(n_tokens)

    def _pass(
        self,
        token_ids: Sequence[int],
        state: SequenceState,
        start: int,
        sink: Sink,
        publisher: Publisher,
        *,
        last: bool,
    ) -> Any:
        """One chunk through all layers. Returns the last token's output, or None if cancelled.

        The last layer's output matters only after the prompt's last token; of earlier chunks it takes in
        nothing but state. In Kimi Linear that spares half of the full attention.
        """
        x, stop = self._model.embed(token_ids), start + len(token_ids)
        rows = Rows([(start, len(token_ids))], self._backend)
        for layer in self._model.layers:
            if sink.cancelled():
                return None
            n_out = len(token_ids) if layer is not self._model.layers[-1] else int(last)
            x = layer.forward(x, [state.layer(layer.index)], rows, n_out)
            if last or self._kinds[layer.index] is KvKind.FULL:
                publisher.publish(layer.index, start, stop)
        return x

    def resume(
        self,
        n_tokens: int,
        sampling: SamplingParams,
        regions: RegionMap,
        buffer: Any,
        prompt_tokens: Collection[int] = (),
    ) -> Decoding:
        """Take up decoding from a buffer that holds the state of ``n_tokens`` tokens.

        The first token is taken as already chosen, by prefill. ``buffer`` is decoded in, so it must be
        writable and have room for ``n_tokens + sampling.max_tokens`` tokens.

        Args:
            prompt_tokens: the tokens that occur in the prompt, for the repetition penalty.

        Raises:
            InvalidRequest: no node could serve the request.
            UsageError: the buffer does not fit.
        """
        check_sampling(sampling, self.vocab_size)
        self._check_length(n_tokens, sampling)
        state = SequenceState(self._layout, regions, buffer, n_tokens + sampling.max_tokens, self._backend)
        sampler = Sampler(sampling, self._eos_token_ids, prompt_tokens)
        return Decoding(self._model, state, n_tokens, sampler, sampling.max_tokens)

    def batch(self) -> Batch:
        """An empty batch for decoding."""
        return Batch(self, DecodeBatch(self._model))

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Prefill and decode here, in one buffer: what any split of the work must equal."""
        self._check(token_ids, sampling)
        regions = RegionMap(self._layout, len(token_ids) + sampling.max_tokens)
        buffer = bytearray(regions.total_bytes)
        result = self.prefill(token_ids, sampling, regions, buffer)
        assert result is not None  # nobody can cancel it
        token, reason = result.first_token, result.finish_reason
        tokens = [token]
        decoding = self.resume(len(token_ids), sampling, regions, buffer, set(token_ids))
        while reason is None:
            token, reason = decoding.step(token)
            tokens.append(token)
        return tokens

    def _check(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        check_sampling(sampling, self.vocab_size)
        self._check_length(len(token_ids), sampling)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequest(
                "a token id is not in the vocabulary",
                expected=f"0 to {self.vocab_size - 1}",
                found=low if low < 0 else high,
                do="tokenize with the tokenizer of the served model",
            )

    def _check_length(self, n_tokens: int, sampling: SamplingParams) -> None:
        if n_tokens < 1:
            raise InvalidRequest("the prompt is empty", expected="at least one token", found=n_tokens)
        if n_tokens + sampling.max_tokens > self.max_model_tokens:
            raise InvalidRequest(
                "the request is too long for the model",
                expected=f"prompt plus max_tokens up to {self.max_model_tokens}",
                found=f"{n_tokens} + {sampling.max_tokens}",
                do="shorten the prompt or lower max_tokens",
            )


class Batch:
    """Sequences that are decoded together; see :class:`~engine.decode.DecodeBatch`. For one thread at a time."""

    def __init__(self, engine: Engine, batch: DecodeBatch) -> None:
        self._engine = engine
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def join(
        self,
        n_tokens: int,
        first_token: int,
        sampling: SamplingParams,
        regions: RegionMap,
        buffer: Any,
        prompt_tokens: Collection[int] = (),
    ) -> int:
        """Take a sequence in; see :meth:`Engine.resume`. Returns its key in this batch.

        Raises:
            InvalidRequest: no node could serve the request.
            UsageError: the buffer does not fit.
        """
        decoding = self._engine.resume(n_tokens, sampling, regions, buffer, prompt_tokens)
        return self._batch.join(decoding, first_token)

    def leave(self, key: int) -> None:
        """Let a sequence go; its buffer is not touched any more."""
        self._batch.leave(key)

    def step(self) -> list[Stepped]:
        """One token for each sequence. Those whose last one it was have left."""
        return self._batch.step()


class _NoSink:
    """Wants to know nothing."""

    def emit(self, layer_index: int, stop_token: int) -> None:
        pass

    def cancelled(self) -> bool:
        return False
