"""Grouped-query attention (Ainslie et al. 2023): several query heads share one head of keys and values.

The cache keeps ``k``, normed and rotated, and ``v``: [n_kv_heads, head_dim] and [n_kv_heads, v_dim] a token, of
every token or, with a window, of the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.backend import Array, Backend
from engine.layers.full_attention import FullAttention
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm
from engine.layers.rope import RopeSpec
from engine.layers.rotary import Rotary
from engine.layers.window_attention import WindowAttention
from engine.rows import Rows
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Gqa", "GqaSpec"]


@dataclass(frozen=True)
class GqaSpec:
    """Shapes and variants of grouped-query attention; ``n_heads`` is a multiple of ``n_kv_heads``.

    Attributes:
        v_dim: size of a value; 0 for that of a key.
        norm: whether queries and keys are normed: ``""`` not, ``"head"`` each head alone, ``"whole"`` all heads
            of a token as one vector (MiniMax-M2).
        norm_offset: added to the norms' weights.
        bias, out_bias: whether the maps in and the map out have biases.
        gated: the query map also gives a gate for each output entry, head by head (Qwen3-Next).
        window: tokens that a query sees; 0 for all.
        sinks: the name of the learned sinks, or ``""``.
        scale: on scores; 0 for 1/sqrt(head_dim).
        value_scale: on values, before they are kept (MiMo-V2-Flash).
    """

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeSpec
    norm_eps: float
    v_dim: int = 0
    norm: str = ""
    norm_offset: float = 0.0
    bias: bool = False
    out_bias: bool = False
    gated: bool = False
    window: int = 0
    sinks: str = ""
    scale: float = 0.0
    value_scale: float = 1.0
    kv_dtype: str = "float32"

    @property
    def kind(self) -> KvKind:
        return KvKind.WINDOW if self.window else KvKind.FULL

    @property
    def window_tokens(self) -> int:
        return self.window

    @property
    def value_dim(self) -> int:
        """Size of a head's value."""
        return self.v_dim or self.head_dim

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("k", (self.n_kv_heads, self.head_dim), self.kv_dtype),
            TensorSpec("v", (self.n_kv_heads, self.value_dim), self.kv_dtype),
        )

    def weight_shapes(self) -> Shapes:
        n_q, n_k = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        n_v, n_out = self.n_kv_heads * self.value_dim, self.n_heads * self.value_dim
        shapes = {
            **linear_shapes("q_proj", self.hidden_size, 2 * n_q if self.gated else n_q, bias=self.bias),
            **linear_shapes("k_proj", self.hidden_size, n_k, bias=self.bias),
            **linear_shapes("v_proj", self.hidden_size, n_v, bias=self.bias),
            **linear_shapes("o_proj", n_out, self.hidden_size, bias=self.out_bias),
        }
        if self.norm:
            whole = self.norm == "whole"
            shapes["q_norm.weight"] = (n_q if whole else self.head_dim,)
            shapes["k_norm.weight"] = (n_k if whole else self.head_dim,)
        if self.sinks:
            shapes[self.sinks] = (self.n_heads,)
        return shapes

    def stored_as(self, dtype: str) -> GqaSpec:
        return replace(self, kv_dtype=dtype)

    def build(self, weights: Weights, backend: Backend) -> Gqa:
        return Gqa(self, weights, backend)


class Gqa:
    """The attention itself."""

    def __init__(self, spec: GqaSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._qkv_proj = Linear(weights, backend, "q_proj", "k_proj", "v_proj")
        self._o_proj = Linear(weights, backend, "o_proj")
        if spec.norm:
            offset = np.float32(spec.norm_offset)
            self._q_norm = RmsNorm(weights["q_norm.weight"] + offset, spec.norm_eps, backend)
            self._k_norm = RmsNorm(weights["k_norm.weight"] + offset, spec.norm_eps, backend)
        self._rotary = Rotary(spec.rope, backend)
        self._scale = np.float32(spec.scale or spec.head_dim**-0.5)
        sinks = weights[spec.sinks] if spec.sinks else None
        self._attention: FullAttention | WindowAttention
        if spec.window:
            self._attention = WindowAttention(spec.window, spec.kv_dtype, sinks, backend)
        else:
            self._attention = FullAttention(spec.kv_dtype, sinks, backend)
        n_q = spec.n_heads * spec.head_dim * (2 if spec.gated else 1)
        self._k_at = n_q
        self._v_at = n_q + spec.n_kv_heads * spec.head_dim

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        first = rows.n_rows - n_out
        tables = rows.tables(self._rotary)
        if n_out == rows.n_rows:
            projected = self._qkv_proj(x)
            q, gate = self._queries(projected[:, : self._k_at], tables)
            kv = projected[:, self._k_at :]
        else:
            kv = self._qkv_proj.part(x, self._k_at, None)
            late = (tables[0][first:], tables[1][first:])
            q, gate = self._queries(self._qkv_proj.part(x[first:], 0, self._k_at), late)
        k, v = self._keys_values(kv, tables)
        outputs = []
        for span, state in zip(rows.spans, states, strict=True):
            own = q if len(rows.spans) == 1 else q[span.rows]
            outputs.append(self._attention.forward(own, k[span.rows], v[span.rows], state, span))
        y = outputs[0] if len(outputs) == 1 else self._backend.xp.concatenate(outputs)
        if n_out == 0:
            return x[:0]
        if gate is not None:
            y *= self._backend.sigmoid(gate)
        return self._o_proj(y)

    def _queries(self, projected: Array, tables: tuple[Array, Array]) -> tuple[Array, Array | None]:
        """[T, ...] to scaled queries [T, n_heads, head_dim], and the gates [T, n_heads * v_dim] if there are any."""
        spec, gate = self._spec, None
        if spec.gated:
            both = projected.reshape(-1, spec.n_heads, 2 * spec.head_dim)
            projected, gate = both[..., : spec.head_dim], both[..., spec.head_dim :].reshape(len(both), self._k_at // 2)
        elif spec.norm == "whole":
            projected = self._q_norm(projected)
        q = projected.reshape(-1, spec.n_heads, spec.head_dim)
        q = self._rotary.rotate(self._q_norm(q) if spec.norm == "head" else q, tables)
        q *= self._scale
        return q, gate

    def _keys_values(self, kv: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
        """[T, ...] to keys [T, n_kv_heads, head_dim] and values [T, n_kv_heads, v_dim] as they are kept."""
        spec, n_k = self._spec, self._v_at - self._k_at
        k, v = kv[:, :n_k], kv[:, n_k:].reshape(-1, spec.n_kv_heads, spec.value_dim)
        if spec.norm == "whole":
            k = self._k_norm(k)
        k = k.reshape(-1, spec.n_kv_heads, spec.head_dim)
        k = self._rotary.rotate(self._k_norm(k) if spec.norm == "head" else k, tables)
        if spec.value_scale != 1.0:
            v = v * np.float32(spec.value_scale)
        return k, v
