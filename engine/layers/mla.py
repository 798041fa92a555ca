"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

A token's keys and values of all heads are linear in one latent of ``kv_rank`` numbers; beside it stand
``rope_dim`` key entries that all heads share, rotated by position (DeepSeek) or not (Kimi Linear). The cache
keeps both as one row, ``latent``: the normed latent, then the shared entries.

With W_uk and W_uv of a head, its key is [W_uk c, r] and its value W_uv c. Prefill expands keys and values
tile by tile. Decode uses the absorbed form: q . W_uk c = (W_uk^T q) . c, so it reads the cache as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.backend import Array, Backend
from engine.layers.attention import causal_attention, softmax_rows
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm
from engine.layers.rope import RopeSpec
from engine.layers.rotary import Rotary
from engine.rows import Rows, Span
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Mla", "MlaSpec"]

# The published models norm the latents with this, whatever the config's rms_norm_eps says.
_LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MlaSpec:
    """Shapes of latent attention.

    Attributes:
        q_rank: size of the queries' own latent; None if queries are projected directly.
        kv_rank: size of the latent.
        nope_dim: entries of a head's key that come from the latent.
        rope_dim: entries of the key that all heads share.
        rope: their positions; None if they have none.
        gated: each head's output is scaled by a gate that comes from the input (Bailing).
        scale: on scores; 0 for 1/sqrt(nope_dim + rope_dim).
    """

    hidden_size: int
    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool
    rope: RopeSpec | None = None
    gated: bool = False
    scale: float = 0.0
    kv_dtype: str = "float32"

    @property
    def kind(self) -> KvKind:
        return KvKind.FULL

    @property
    def window_tokens(self) -> int:
        return 0

    @property
    def key_dim(self) -> int:
        """Size of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("latent", (self.kv_rank + self.rope_dim,), self.kv_dtype),)

    def weight_shapes(self) -> Shapes:
        n_q = self.n_heads * self.key_dim
        if self.q_rank is None:
            shapes = linear_shapes("q_proj", self.hidden_size, n_q)
        else:
            shapes = {
                **linear_shapes("q_a_proj", self.hidden_size, self.q_rank, bias=self.bias),
                "q_a_layernorm.weight": (self.q_rank,),
                **linear_shapes("q_b_proj", self.q_rank, n_q),
            }
        if self.gated:
            shapes |= linear_shapes("g_proj", self.hidden_size, self.n_heads)
        return {
            **shapes,
            **linear_shapes("kv_a_proj_with_mqa", self.hidden_size, self.kv_rank + self.rope_dim, bias=self.bias),
            "kv_a_layernorm.weight": (self.kv_rank,),
            **linear_shapes("kv_b_proj", self.kv_rank, self.n_heads * (self.nope_dim + self.v_dim)),
            **linear_shapes("o_proj", self.n_heads * self.v_dim, self.hidden_size, bias=self.bias),
        }

    def stored_as(self, dtype: str) -> MlaSpec:
        return replace(self, kv_dtype=dtype)

    def build(self, weights: Weights, backend: Backend) -> Mla:
        return Mla(self, weights, backend)


class Mla:
    """The attention itself."""

    def __init__(self, spec: MlaSpec, weights: Weights, backend: Backend) -> None:
        xp = backend.xp
        self._spec = spec
        self._backend = backend
        if spec.q_rank is None:
            self._q_proj = Linear(weights, backend, "q_proj")
        else:
            self._q_a_proj = Linear(weights, backend, "q_a_proj")
            self._q_a_norm = RmsNorm(weights["q_a_layernorm.weight"], _LATENT_NORM_EPS, backend)
            self._q_proj = Linear(weights, backend, "q_b_proj")
        self._kv_a_proj = Linear(weights, backend, "kv_a_proj_with_mqa")
        self._kv_a_norm = RmsNorm(weights["kv_a_layernorm.weight"], _LATENT_NORM_EPS, backend)
        self._gate_proj = Linear(weights, backend, "g_proj") if spec.gated else None
        self._o_proj = Linear(weights, backend, "o_proj")
        self._rotary = Rotary(spec.rope, backend) if spec.rope is not None else None
        self._scale = np.float32(spec.scale or spec.key_dim**-0.5)
        up = weights["kv_b_proj.weight"].reshape(spec.n_heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
        self._w_uk = xp.ascontiguousarray(up[:, : spec.nope_dim])  # [H, nope_dim, kv_rank]
        self._w_uv_t = xp.ascontiguousarray(up[:, spec.nope_dim :].transpose(0, 2, 1))  # [H, kv_rank, v_dim]
        self._w_expand = self._expansion(up)

    def _expansion(self, up: Array) -> Array:
        """[kv_rank + rope_dim, H * (key_dim + v_dim)]: a cache row to every head's whole key and value.

        The shared entries are copied through by an identity: one product with no joining afterwards.
        """
        spec, xp = self._spec, self._backend.xp
        expand = xp.zeros((spec.kv_rank + spec.rope_dim, spec.n_heads, spec.key_dim + spec.v_dim), dtype=xp.float32)
        expand[: spec.kv_rank, :, : spec.nope_dim] = up[:, : spec.nope_dim].transpose(2, 0, 1)
        expand[: spec.kv_rank, :, spec.key_dim :] = up[:, spec.nope_dim :].transpose(2, 0, 1)
        expand[spec.kv_rank :, :, spec.nope_dim : spec.key_dim] = xp.eye(spec.rope_dim, dtype=xp.float32)[:, None]
        return expand.reshape(spec.kv_rank + spec.rope_dim, -1)

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        latent = self._latents(x, rows)
        for span, state in zip(rows.spans, states, strict=True):
            own = slice(span.start, span.stop)
            self._backend.keep(state["latent"], own, latent[span.rows], self._spec.kv_dtype)
        if n_out == 0:
            return x[:0]
        q = self._queries(x[rows.n_rows - n_out :], rows, n_out)
        if n_out == 1 or rows.is_step:
            y = self._attend_one_each(q, states, rows)
        else:
            attended = [
                self._attend_many(q[span.rows] if len(rows.spans) > 1 else q, state["latent"], span)
                for span, state in zip(rows.spans, states, strict=True)
            ]
            y = self._backend.xp.concatenate(attended)
        if self._gate_proj is not None:
            gate = self._backend.sigmoid(self._gate_proj(x[rows.n_rows - n_out :]))
            y = (y.reshape(n_out, self._spec.n_heads, -1) * gate[..., None]).reshape(n_out, -1)
        return self._o_proj(y)

    def _latents(self, x: Array, rows: Rows) -> Array:
        """[T, hidden_size] to the rows that are kept, [T, kv_rank + rope_dim]."""
        rank = self._spec.kv_rank
        latent = self._kv_a_proj(x)
        latent[:, :rank] = self._kv_a_norm(latent[:, :rank])
        if self._rotary is not None:
            latent[:, rank:] = self._rotary.rotate(latent[:, None, rank:], rows.tables(self._rotary))[:, 0]
        return latent

    def _queries(self, x: Array, rows: Rows, n_out: int) -> Array:
        """[n_out, hidden_size], the last rows, to scaled queries [n_out, H, key_dim]."""
        spec = self._spec
        if spec.q_rank is not None:
            x = self._q_a_norm(self._q_a_proj(x))
        q = self._q_proj(x).reshape(n_out, spec.n_heads, spec.key_dim)
        if self._rotary is not None:
            cos, sin = rows.tables(self._rotary)
            tables = (cos[rows.n_rows - n_out :], sin[rows.n_rows - n_out :])
            q[..., spec.nope_dim :] = self._rotary.rotate(q[..., spec.nope_dim :], tables)
        q *= self._scale
        return q

    def _attend_many(self, q: Array, latent: Array, span: Span) -> Array:
        """[T, H, key_dim] queries of a span's last T tokens; returns [T, H * v_dim]. Expanded form."""
        spec, xb, n_rows = self._spec, self._backend, len(q)

        def tile(lo: int, hi: int) -> tuple[Array, Array]:
            expanded = (xb.load(latent[lo:hi]) @ self._w_expand).reshape(hi - lo, spec.n_heads, -1).transpose(1, 0, 2)
            return expanded[..., : spec.key_dim], expanded[..., spec.key_dim :]

        heads_first = xb.xp.ascontiguousarray(q.transpose(1, 0, 2))
        out = causal_attention(heads_first, tile, span.stop - n_rows, spec.v_dim, xb)
        return out.transpose(1, 0, 2).reshape(n_rows, -1)

    def _attend_one_each(self, q: Array, states: Sequence[LayerState], rows: Rows) -> Array:
        """[B, H, key_dim], the query of each span's last token; returns [B, H * v_dim]. Absorbed form."""
        spec, xb, xp = self._spec, self._backend, self._backend.xp
        absorbed = xp.empty((spec.n_heads, len(q), spec.kv_rank + spec.rope_dim), dtype=xp.float32)
        per_head = q.transpose(1, 0, 2)
        absorbed[..., : spec.kv_rank] = per_head[..., : spec.nope_dim] @ self._w_uk
        absorbed[..., spec.kv_rank :] = per_head[..., spec.nope_dim :]
        context = xp.empty((spec.n_heads, len(q), spec.kv_rank), dtype=xp.float32)
        for index, (span, state) in enumerate(zip(rows.spans, states, strict=True)):
            latent = xb.load(state["latent"][: span.stop])
            weights = softmax_rows(absorbed[:, index] @ latent.T, xb)
            context[:, index] = weights @ latent[:, : spec.kv_rank]
        return (context @ self._w_uv_t).transpose(1, 0, 2).reshape(len(q), -1)
