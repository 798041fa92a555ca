"""What several tests of the engine need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import Engine, PrefillResult
from engine.sampling import Greedy
from prfaas_net.kv import RegionMap

__all__ = ["RecordingSink", "Run", "greedy", "prefill", "random_prompt"]


def random_prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that every checkpoint of the tests has, none of them special."""
    tokens: list[int] = np.random.default_rng(seed).integers(5, 260, n_tokens).tolist()
    return tokens


def greedy(max_tokens: int = 8) -> Greedy:
    """Greedy, never ended by a token."""
    return Greedy(max_tokens=max_tokens, ignore_eos=True)


@dataclass
class RecordingSink:
    """Remembers what it was told; cancels after ``cancel_after`` questions."""

    cancel_after: int | None = None
    emitted: list[tuple[int, int]] = field(default_factory=list)
    asked: int = 0

    def emit(self, layer_index: int, stop_token: int) -> None:
        self.emitted.append((layer_index, stop_token))

    def cancelled(self) -> bool:
        self.asked += 1
        return self.cancel_after is not None and self.asked > self.cancel_after


@dataclass
class Run:
    """A prefill and the buffer that it filled."""

    engine: Engine
    sampling: Greedy
    result: PrefillResult
    regions: RegionMap
    buffer: bytearray
    n_tokens: int

    def array(self, layer_index: int, tensor: str) -> np.ndarray[Any, Any]:
        """One tensor of the state."""
        return self.regions.array(self.buffer, layer_index, tensor)

    def decode(self) -> list[int]:
        """The tokens of the whole answer, decoded in this buffer."""
        tokens, reason = [self.result.first_token], self.result.finish_reason
        decoding = self.engine.resume(self.n_tokens, self.sampling, self.regions, self.buffer)
        while reason is None:
            token, reason = decoding.step(tokens[-1])
            tokens.append(token)
        return tokens


def prefill(engine: Engine, prompt: list[int], sampling: Greedy, sink: Any = None) -> Run:
    """Prefill into a new buffer that is full of garbage."""
    regions = RegionMap(engine.layout, len(prompt) + sampling.max_tokens)
    buffer = bytearray(b"\xff" * regions.total_bytes)  # as float32, not numbers
    result = engine.prefill(prompt, sampling, regions, buffer, sink)
    assert result is not None
    return Run(engine, sampling, result, regions, buffer, len(prompt))
