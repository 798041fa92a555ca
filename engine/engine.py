"""The engine: prefill and decode of single sequences, in buffers that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.backend import Backend, load_backend
from engine.blas import limit_blas_threads
from engine.checkpoint import Checkpoint, load_checkpoint
from engine.decode import Decoding, finish_reason
from engine.model import Model
from engine.sampling import SamplingParams, check_sampling, choose_token
from engine.state import SequenceState
from prfaas_net.errors import InvalidRequest, UsageError
from prfaas_net.kv import CacheLayout, KvKind, RegionMap

__all__ = ["Engine", "PrefillResult", "Sink"]


class Sink(Protocol):
    """Told of state the moment it is final in the buffer."""

    def emit(self, layer_index: int, stop_token: int) -> None: ...

    def cancelled(self) -> bool: ...


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill ends with.

    Attributes:
        first_token: the token after the prompt.
        finish_reason: ``"stop"`` or ``"length"`` if it already ends the request.
        logits: [vocab_size], those it was chosen from.
    """

    first_token: int
    finish_reason: str | None
    logits: np.ndarray[Any, Any]


class Engine:
    """One model, ready to prefill and decode. Safe for use from several threads, each with its own buffer.

    Args:
        prefill_chunk_tokens: tokens that one pass through the layers takes. More are faster up to a point;
            fewer let state leave earlier.
    """

    def __init__(self, checkpoint: Checkpoint, backend: Backend, *, prefill_chunk_tokens: int = 512) -> None:
        if prefill_chunk_tokens < 1:
            raise UsageError("a prefill chunk needs tokens", expected="1 or more", found=prefill_chunk_tokens)
        self._model = Model(checkpoint, backend)
        self._backend = backend
        self._eos_token_ids = checkpoint.eos_token_ids
        self._layout = checkpoint.spec.layout(checkpoint.name, checkpoint.weights_digest)
        self._kinds = [layer.kind for layer in self._layout.layers]
        self._prefill_chunk_tokens = prefill_chunk_tokens

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        name: str | None = None,
        backend: str = "numpy",
        prefill_chunk_tokens: int = 512,
        blas_threads: int = 1,
    ) -> Engine:
        """An engine for a Hugging Face checkpoint directory.

        Args:
            name: what the model is called; the directory's name if not given.
            backend: ``numpy`` or ``cupy``.
            blas_threads: threads of a matrix product, for the whole process; see :mod:`engine.blas` for why
                more than one is rarely good. OPENBLAS_NUM_THREADS overrides it.

        Raises:
            ConfigError: the checkpoint or the backend cannot be used; nothing is half loaded.
        """
        arrays = load_backend(backend)
        checkpoint = load_checkpoint(Path(directory), name)
        limit_blas_threads(blas_threads)
        return cls(checkpoint, arrays, prefill_chunk_tokens=prefill_chunk_tokens)

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
    ) -> PrefillResult | None:
        """Run the prompt; fill ``buffer``; tell ``sink``, if there is one, as layers complete.

        Returns:
            None if the sink cancelled it.

        Raises:
            InvalidRequest: no node could serve the request.
            UsageError: the buffer does not fit.
        """
        self._check(token_ids, sampling)
        sink = _NoSink() if sink is None else sink
        n_tokens, step = len(token_ids), self._prefill_chunk_tokens
        state = SequenceState(self._layout, regions, buffer, n_tokens, self._backend)
        state.clear()
        for start in range(0, n_tokens, step):
            stop = min(start + step, n_tokens)
            last_row = self._pass(token_ids[start:stop], state, start, sink, last=stop == n_tokens)
            if last_row is None:
                return None
        logits = self._model.logits(last_row)
        token = choose_token(logits, sampling, n_tokens)
        return PrefillResult(token, finish_reason(token, 1, sampling, self._eos_token_ids), logits)

    def _pass(self, token_ids: Sequence[int], state: SequenceState, start: int, sink: Sink, *, last: bool) -> Any:
        """One chunk through all layers. Returns the last token's output, or None if cancelled.

        The last layer's output matters only after the prompt's last token; of earlier chunks it takes in
        nothing but state. In Kimi Linear that spares half of the full attention.
        """
        x, stop = self._model.embed(token_ids), start + len(token_ids)
        for layer in self._model.layers:
            if sink.cancelled():
                return None
            n_out = len(token_ids) if layer is not self._model.layers[-1] else int(last)
            x = layer.forward(x, state.layer(layer.index), start, n_out)
            if last or self._kinds[layer.index] is KvKind.FULL:
                state.publish(layer.index, start, stop)
                sink.emit(layer.index, stop)
        return x

    def resume(self, n_tokens: int, sampling: SamplingParams, regions: RegionMap, buffer: Any) -> Decoding:
        """Take up decoding from a buffer that holds the state of ``n_tokens`` tokens.

        The first token is taken as already chosen, by prefill. ``buffer`` is decoded in, so it must be
        writable and have room for ``n_tokens + sampling.max_tokens`` tokens.

        Raises:
            InvalidRequest: no node could serve the request.
            UsageError: the buffer does not fit.
        """
        check_sampling(sampling)
        self._check_length(n_tokens, sampling)
        state = SequenceState(self._layout, regions, buffer, n_tokens + sampling.max_tokens, self._backend)
        return Decoding(self._model, state, n_tokens, sampling, self._eos_token_ids)

    def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Prefill and decode here, in one buffer: what any split of the work must equal."""
        self._check(token_ids, sampling)
        regions = RegionMap(self._layout, len(token_ids) + sampling.max_tokens)
        buffer = bytearray(regions.total_bytes)
        result = self.prefill(token_ids, sampling, regions, buffer)
        assert result is not None  # nobody can cancel it
        token, reason = result.first_token, result.finish_reason
        tokens = [token]
        decoding = self.resume(len(token_ids), sampling, regions, buffer)
        while reason is None:
            token, reason = decoding.step(token)
            tokens.append(token)
        return tokens

    def _check(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        check_sampling(sampling)
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


class _NoSink:
    """Wants to know nothing."""

    def emit(self, layer_index: int, stop_token: int) -> None:
        pass

    def cancelled(self) -> bool:
        return False
