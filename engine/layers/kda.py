"""Kimi Delta Attention (arXiv:2510.26692): linear attention by a delta rule with a decay for every channel.

Queries, keys and values pass a short convolution; queries and keys have unit length; decay, learning rate
and output gate come from the input. State: ``recurrent`` [H, d_k, d_v] and ``conv`` [channels, K-1], where
the channels are those of all queries, then keys, then values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.delta_rule import delta_rule_chunks, delta_rule_step
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm, unit_norm
from engine.layers.short_conv import ShortConv
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Kda", "KdaSpec"]


@dataclass(frozen=True)
class KdaSpec:
    """Shapes of Kimi Delta Attention; keys and values of a head have the same size."""

    hidden_size: int
    n_heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float

    @property
    def kind(self) -> KvKind:
        return KvKind.LINEAR

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
        for name in ("f", "g"):  # decay and output gate, each through a bottleneck
            shapes |= linear_shapes(f"{name}_a_proj", self.hidden_size, self.head_dim)
            shapes |= linear_shapes(f"{name}_b_proj", self.head_dim, self.width)
        return {
            **shapes,
            **linear_shapes("b_proj", self.hidden_size, self.n_heads),
            "A_log": (1, 1, self.n_heads, 1),
            "dt_bias": (self.width,),
            "o_norm.weight": (self.head_dim,),
            **linear_shapes("o_proj", self.width, self.hidden_size),
        }

    def build(self, weights: Weights, backend: Backend) -> Kda:
        return Kda(self, weights, backend)


class Kda:
    """The attention itself."""

    def __init__(self, spec: KdaSpec, weights: Weights, backend: Backend) -> None:
        xp = backend.xp
        self._spec = spec
        self._backend = backend
        self._in_proj = Linear(
            weights, backend,
            "q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj",
        )  # fmt: skip
        self._conv = ShortConv(xp.concatenate([weights[f"{n}_conv1d.weight"] for n in ("q", "k", "v")]), backend)
        self._decay_proj = Linear(weights, backend, "f_b_proj")
        self._decay_bias = weights["dt_bias"]
        self._decay_rate = -xp.exp(weights["A_log"].reshape(spec.n_heads, 1))
        self._gate_proj = Linear(weights, backend, "g_b_proj")
        self._o_norm = RmsNorm(weights["o_norm.weight"], spec.norm_eps, backend)
        self._o_proj = Linear(weights, backend, "o_proj")
        self._scale = np.float32(spec.head_dim**-0.5)

    def forward(self, x: Array, state: LayerState, start: int, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_tokens = self._spec, x.shape[0]
        heads = (n_tokens, spec.n_heads, spec.head_dim)
        projected = self._in_proj(x)
        mixed, bottlenecks = projected[:, : 3 * spec.width], projected[:, 3 * spec.width :]
        for_decay = bottlenecks[:, : spec.head_dim]
        for_gate = bottlenecks[n_tokens - n_out :, spec.head_dim : 2 * spec.head_dim]
        beta = self._backend.sigmoid(bottlenecks[:, 2 * spec.head_dim :])

        qkv = self._conv.forward(mixed, state["conv"]).reshape(n_tokens, 3, spec.n_heads, spec.head_dim)
        normed = unit_norm(qkv[:, :2], self._backend)
        q, k, v = normed[:, 0], normed[:, 1], qkv[:, 2]
        q *= self._scale
        decay = self._backend.softplus(self._decay_proj(for_decay) + self._decay_bias).reshape(heads)
        decay *= self._decay_rate

        if n_tokens == 1:
            recurrent = state["recurrent"]
            out = delta_rule_step(q[0], k[0], v[0], decay[0], beta[0], recurrent, self._backend)[None]
        else:
            out = delta_rule_chunks(q, k, v, decay, beta, state["recurrent"], self._backend)
        y = self._o_norm(out[n_tokens - n_out :]).reshape(n_out, spec.width)
        y *= self._backend.sigmoid(self._gate_proj(for_gate))
        return self._o_proj(y)
