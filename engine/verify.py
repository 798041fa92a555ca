"""Comparing the engine with an oracle, over the same paths that serve requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.oracle import OraclePrompt, expected_state
from engine.sampling import Greedy
from prfaas_net.errors import ConfigError
from prfaas_net.kv import KvKind, RegionMap

__all__ = ["TOLERANCE", "PromptCheck", "Report", "verify"]

# Float32 against float32 agrees to 1e-5 or so; wrong computations differ by 1e-1 and more.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class PromptCheck:
    """How one prompt came out.

    Attributes:
        max_abs_cache_diff: over every cache tensor after the prompt; None if the oracle has none.
        tokens_equal: how many of the ``tokens`` greedy tokens are the oracle's, place by place.
    """

    name: str
    max_abs_logit_diff: float
    max_abs_cache_diff: float | None
    tokens_equal: int
    tokens: int

    @property
    def ok(self) -> bool:
        # Written so that a difference that is not a number is a miss.
        diffs = [self.max_abs_logit_diff, self.max_abs_cache_diff or 0.0]
        return self.tokens_equal == self.tokens and all(diff <= TOLERANCE for diff in diffs)


@dataclass(frozen=True)
class Report:
    """How all prompts came out."""

    prompts: list[PromptCheck]

    @property
    def ok(self) -> bool:
        return all(prompt.ok for prompt in self.prompts)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "prompts": [asdict(prompt) for prompt in self.prompts]}

    def to_text(self) -> str:
        """A table and a verdict."""
        lines = [f"{'prompt':12} {'logits':>9} {'cache':>9}  tokens"]
        for check in self.prompts:
            cache = "-" if check.max_abs_cache_diff is None else f"{check.max_abs_cache_diff:.1e}"
            lines.append(
                f"{check.name:12} {check.max_abs_logit_diff:9.1e} {cache:>9}  {check.tokens_equal}/{check.tokens}"
                f"{'' if check.ok else '  MISS'}"
            )
        verdict = "ok" if self.ok else "MISS"
        return "\n".join([*lines, f"{verdict}: largest differences, allowed {TOLERANCE:g}; tokens equal of all"])


def verify(engine: Engine, prompts: list[OraclePrompt]) -> Report:
    """Run every prompt and compare."""
    return Report([_check(engine, prompt) for prompt in prompts])


def _check(engine: Engine, prompt: OraclePrompt) -> PromptCheck:
    n_prompt, sampling = len(prompt.input_ids), Greedy(max_tokens=len(prompt.greedy), ignore_eos=True)
    regions = RegionMap(engine.layout, n_prompt + sampling.max_tokens)
    buffer = bytearray(regions.total_bytes)
    result = engine.prefill(prompt.input_ids, sampling, regions, buffer)
    assert result is not None  # nobody can cancel it
    cache_diff = _cache_diff(engine, prompt, regions, buffer) if prompt.cache else None
    tokens, decoding = [result.first_token], engine.resume(n_prompt, sampling, regions, buffer)
    while len(tokens) < len(prompt.greedy):
        tokens.append(decoding.step(tokens[-1])[0])
    return PromptCheck(
        name=prompt.name,
        max_abs_logit_diff=float(np.abs(result.logits - prompt.last_logits).max()),
        max_abs_cache_diff=cache_diff,
        tokens_equal=sum(ours == theirs for ours, theirs in zip(tokens, prompt.greedy, strict=True)),
        tokens=len(tokens),
    )


def _cache_diff(engine: Engine, prompt: OraclePrompt, regions: RegionMap, buffer: bytearray) -> float:
    """The largest difference over all cache tensors after the prompt."""
    diffs = [0.0]
    for layer in engine.layout.layers:
        for name, theirs in expected_state(layer, prompt.cache).items():
            ours = regions.array(buffer, layer.index, name)
            if layer.kind is not KvKind.LINEAR:
                ours = ours[: layer.rows(len(prompt.input_ids))]
            if layer.kind is KvKind.WINDOW:
                ours = ours[-len(theirs) :]
            if ours.shape != theirs.shape:
                raise ConfigError(
                    "the oracle's cache is another model's",
                    expected=f"{name} of layer {layer.index} with shape {list(ours.shape)}",
                    found=list(theirs.shape),
                )
            diffs.append(float(np.abs(ours.astype(np.float32) - theirs).max()))
    return float(np.max(diffs))  # unlike max(), keeps a NaN
