"""Kimi Delta Attention (arXiv:2510.26692): linear attention by a delta rule with a decay for every channel.

Queries, keys and values pass a short convolution; queries and keys have unit length; decay, learning rate
and output gate come from the input. State: ``recurrent`` [H, d_k, d_v] and ``conv`` [channels, K-1], where
the channels are those of all queries, then keys, then values.

Two variants are about. Kimi Linear's decay is -exp(A) softplus(f + bias), with f and the output gate each
through a bottleneck. Bailing's is bounded, c sigmoid(exp(A) (f + bias)) with c < 0, without bottlenecks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.delta_rule import delta_rule_chunks, delta_rule_step
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm, unit_norm
from engine.layers.short_conv import ShortConv
from engine.rows import Rows
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Kda", "KdaSpec"]


@dataclass(frozen=True)
class KdaSpec:
    """Shapes of Kimi Delta Attention; keys and values of a head have the same size.

    Attributes:
        bottleneck: whether decay and output gate come through a projection to ``head_dim`` entries.
        lower_bound: of a token's log-decay; None if it has none.
        a_log_shape: as the checkpoint has it.
    """

    hidden_size: int
    n_heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float
    bottleneck: bool = True
    lower_bound: float | None = None
    a_log_shape: tuple[int, ...] = ()

    @property
    def kind(self) -> KvKind:
        return KvKind.LINEAR

    @property
    def window_tokens(self) -> int:
        return 0

    @property
    def width(self) -> int:
        """Channels of all queries together; keys and values have as many."""
        return self.n_heads * self.head_dim

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("recurrent", (self.n_heads, self.head_dim, self.head_dim)),
            TensorSpec("conv", (3 * self.width, self.conv_kernel - 1)),
        )

    def weight_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for name in ("q", "k", "v"):
            shapes |= linear_shapes(f"{name}_proj", self.hidden_size, self.width)
            shapes[f"{name}_conv1d.weight"] = (self.width, 1, self.conv_kernel)
        for name in ("f", "g"):  # decay and output gate
            if self.bottleneck:
                shapes |= linear_shapes(f"{name}_a_proj", self.hidden_size, self.head_dim)
                shapes |= linear_shapes(f"{name}_b_proj", self.head_dim, self.width)
            else:
                shapes |= linear_shapes(f"{name}_proj", self.hidden_size, self.width)
        return {
            **shapes,
            **linear_shapes("b_proj", self.hidden_size, self.n_heads),
            "A_log": self.a_log_shape or (1, 1, self.n_heads, 1),
            "dt_bias": (self.width,),
            "o_norm.weight": (self.head_dim,),
            **linear_shapes("o_proj", self.width, self.hidden_size),
        }

    def stored_as(self, dtype: str) -> KdaSpec:
        return self

    def build(self, weights: Weights, backend: Backend) -> Kda:
        return Kda(self, weights, backend)


class Kda:
    """The attention itself."""

    def __init__(self, spec: KdaSpec, weights: Weights, backend: Backend) -> None:
        xp = backend.xp
        self._spec = spec
        self._backend = backend
        for_decay, for_gate = ("f_a_proj", "g_a_proj") if spec.bottleneck else ("f_proj", "g_proj")
        self._in_proj = Linear(weights, backend, "q_proj", "k_proj", "v_proj", for_decay, for_gate, "b_proj")
        self._conv = ShortConv(xp.concatenate([weights[f"{n}_conv1d.weight"] for n in ("q", "k", "v")]), backend)
        self._decay_proj = Linear(weights, backend, "f_b_proj") if spec.bottleneck else None
        self._gate_proj = Linear(weights, backend, "g_b_proj") if spec.bottleneck else None
        self._decay_bias = weights["dt_bias"]
        self._decay_rate = xp.exp(weights["A_log"].reshape(spec.n_heads, 1))
        self._o_norm = RmsNorm(weights["o_norm.weight"], spec.norm_eps, backend)
        self._o_proj = Linear(weights, backend, "o_proj")
        self._scale = np.float32(spec.head_dim**-0.5)

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_rows = self._spec, rows.n_rows
        projected = self._in_proj(x)
        mixed, rest = projected[:, : 3 * spec.width], projected[:, 3 * spec.width :]
        inner = spec.head_dim if spec.bottleneck else spec.width
        beta = self._backend.sigmoid(rest[:, 2 * inner :])
        decay = self._log_decay(rest[:, :inner])

        qkv = self._conv.forward(mixed, [state["conv"] for state in states], rows)
        qkv = qkv.reshape(n_rows, 3, spec.n_heads, spec.head_dim)
        normed = unit_norm(qkv[:, :2], self._backend)
        q, k, v = normed[:, 0], normed[:, 1], qkv[:, 2]
        q *= self._scale
        outputs = []
        for span, state in zip(rows.spans, states, strict=True):
            rule = delta_rule_step if span.n_rows == 1 else delta_rule_chunks
            own = span.first_row if span.n_rows == 1 else span.rows
            out = rule(q[own], k[own], v[own], decay[own], beta[own], state["recurrent"], self._backend)
            outputs.append(out if span.n_rows > 1 else out[None])
        out = outputs[0] if len(outputs) == 1 else self._backend.xp.concatenate(outputs)
        y = self._o_norm(out[n_rows - n_out :]).reshape(n_out, spec.width)
        gate = rest[n_rows - n_out :, inner : 2 * inner]
        y *= self._backend.sigmoid(gate if self._gate_proj is None else self._gate_proj(gate))
        return self._o_proj(y)

    def _log_decay(self, x: Array) -> Array:
        """[T, width or head_dim] to the log-decays [T, H, head_dim], none positive."""
        spec = self._spec
        x = (x if self._decay_proj is None else self._decay_proj(x)) + self._decay_bias
        x = x.reshape(-1, spec.n_heads, spec.head_dim)
        if spec.lower_bound is None:
            decay = self._backend.softplus(x)
            decay *= -self._decay_rate
            return decay
        decay = self._backend.sigmoid(x * self._decay_rate)
        decay *= np.float32(spec.lower_bound)
        return decay
