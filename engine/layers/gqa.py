"""Grouped-query attention (Ainslie et al. 2023) with norms on queries and keys and rotary positions.

Several query heads share one head of keys and values. The cache keeps ``k``, normed and rotated, and ``v``,
each [n_kv_heads, head_dim] a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.attention import causal_attention, softmax_rows
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm
from engine.layers.rotary import Rotary
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Gqa", "GqaSpec"]


@dataclass(frozen=True)
class GqaSpec:
    """Shapes of grouped-query attention; ``n_heads`` is a multiple of ``n_kv_heads``."""

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    bias: bool

    @property
    def kind(self) -> KvKind:
        return KvKind.FULL

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        row = (self.n_kv_heads, self.head_dim)
        return (TensorSpec("k", row), TensorSpec("v", row))

    def weight_shapes(self) -> Shapes:
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            **linear_shapes("q_proj", self.hidden_size, n_q, bias=self.bias),
            **linear_shapes("k_proj", self.hidden_size, n_kv, bias=self.bias),
            **linear_shapes("v_proj", self.hidden_size, n_kv, bias=self.bias),
            **linear_shapes("o_proj", n_q, self.hidden_size, bias=self.bias),
            "q_norm.weight": (self.head_dim,),
            "k_norm.weight": (self.head_dim,),
        }

    def build(self, weights: Weights, backend: Backend) -> Gqa:
        return Gqa(self, weights, backend)


class Gqa:
    """The attention itself."""

    def __init__(self, spec: GqaSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._q_proj = Linear(weights, backend, "q_proj")
        self._kv_proj = Linear(weights, backend, "k_proj", "v_proj")
        self._o_proj = Linear(weights, backend, "o_proj")
        self._q_norm = RmsNorm(weights["q_norm.weight"], spec.norm_eps, backend)
        self._k_norm = RmsNorm(weights["k_norm.weight"], spec.norm_eps, backend)
        self._rotary = Rotary(spec.head_dim, spec.rope_theta, backend)
        self._scale = np.float32(spec.head_dim**-0.5)

    def forward(self, x: Array, state: LayerState, start: int, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_tokens = self._spec, x.shape[0]
        stop = start + n_tokens
        cos, sin = self._rotary.tables(start, stop)
        kv = self._kv_proj(x).reshape(n_tokens, 2, spec.n_kv_heads, spec.head_dim)
        state["k"][start:stop] = self._rotary.rotate(self._k_norm(kv[:, 0]), (cos, sin))
        state["v"][start:stop] = kv[:, 1]
        if n_out == 0:
            return x[:0]
        q = self._q_proj(x[n_tokens - n_out :]).reshape(n_out, spec.n_heads, spec.head_dim)
        q = self._rotary.rotate(self._q_norm(q), (cos[n_tokens - n_out :], sin[n_tokens - n_out :]))
        q *= self._scale
        attend = self._attend_one if n_out == 1 else self._attend_many
        return self._o_proj(attend(q, state["k"][:stop], state["v"][:stop]))

    def _attend_many(self, q: Array, k: Array, v: Array) -> Array:
        """[T, n_heads, d] queries of the last T tokens; returns [T, n_heads * d]."""

        def tile(lo: int, hi: int) -> tuple[Array, Array]:
            return k[lo:hi].transpose(1, 0, 2), v[lo:hi].transpose(1, 0, 2)

        xp, n_rows = self._backend.xp, q.shape[0]
        heads_first = xp.ascontiguousarray(q.transpose(1, 0, 2))
        out = causal_attention(heads_first, tile, k.shape[0] - n_rows, self._spec.head_dim, self._backend)
        return out.transpose(1, 0, 2).reshape(n_rows, -1)

    def _attend_one(self, q: Array, k: Array, v: Array) -> Array:
        """[1, n_heads, d], the query of the last token; returns [1, n_heads * d]."""
        spec = self._spec
        grouped = q.reshape(spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim)
        weights = softmax_rows(grouped @ k.transpose(1, 2, 0), self._backend)
        return (weights @ v.transpose(1, 0, 2)).reshape(1, -1)
