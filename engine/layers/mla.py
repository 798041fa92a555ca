"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) without positions, as Kimi Linear has it.

A token's keys and values of all heads are linear in one latent of ``kv_rank`` numbers; beside it stand
``rope_dim`` key entries that all heads share (the place of rotary positions in DeepSeek's models, here left
unrotated). The cache keeps both as one row, ``latent``: the normed latent, then the shared entries.

With W_uk and W_uv of a head, its key is [W_uk c, r] and its value W_uv c. Prefill expands keys and values
tile by tile. Decode uses the absorbed form: q . W_uk c = (W_uk^T q) . c, so it reads the cache as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.attention import causal_attention, softmax_rows
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm
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
    """

    hidden_size: int
    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool

    @property
    def kind(self) -> KvKind:
        return KvKind.FULL

    @property
    def key_dim(self) -> int:
        """Size of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("latent", (self.kv_rank + self.rope_dim,)),)

    def weight_shapes(self) -> Shapes:
        n_q = self.n_heads * self.key_dim
        if self.q_rank is None:
            queries = linear_shapes("q_proj", self.hidden_size, n_q)
        else:
            queries = {
                **linear_shapes("q_a_proj", self.hidden_size, self.q_rank, bias=self.bias),
                "q_a_layernorm.weight": (self.q_rank,),
                **linear_shapes("q_b_proj", self.q_rank, n_q),
            }
        return {
            **queries,
            **linear_shapes("kv_a_proj_with_mqa", self.hidden_size, self.kv_rank + self.rope_dim, bias=self.bias),
            "kv_a_layernorm.weight": (self.kv_rank,),
            **linear_shapes("kv_b_proj", self.kv_rank, self.n_heads * (self.nope_dim + self.v_dim)),
            **linear_shapes("o_proj", self.n_heads * self.v_dim, self.hidden_size, bias=self.bias),
        }

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
        self._o_proj = Linear(weights, backend, "o_proj")
        self._scale = np.float32(spec.key_dim**-0.5)
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

    def forward(self, x: Array, state: LayerState, start: int, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_tokens = self._spec, x.shape[0]
        stop = start + n_tokens
        compressed = self._kv_a_proj(x)
        latent = state["latent"][:stop]
        latent[start:, : spec.kv_rank] = self._kv_a_norm(compressed[:, : spec.kv_rank])
        latent[start:, spec.kv_rank :] = compressed[:, spec.kv_rank :]
        if n_out == 0:
            return x[:0]
        y = x[n_tokens - n_out :]
        if spec.q_rank is not None:
            y = self._q_a_norm(self._q_a_proj(y))
        q = self._q_proj(y).reshape(n_out, spec.n_heads, spec.key_dim)
        q *= self._scale
        return self._o_proj(self._attend_one(q, latent) if n_out == 1 else self._attend_many(q, latent))

    def _attend_many(self, q: Array, latent: Array) -> Array:
        """[T, H, key_dim] queries of the last T tokens; returns [T, H * v_dim]. Expanded form."""
        spec, xp, n_rows = self._spec, self._backend.xp, q.shape[0]

        def tile(lo: int, hi: int) -> tuple[Array, Array]:
            expanded = (latent[lo:hi] @ self._w_expand).reshape(hi - lo, spec.n_heads, -1).transpose(1, 0, 2)
            return expanded[..., : spec.key_dim], expanded[..., spec.key_dim :]

        heads_first = xp.ascontiguousarray(q.transpose(1, 0, 2))
        out = causal_attention(heads_first, tile, latent.shape[0] - n_rows, spec.v_dim, self._backend)
        return out.transpose(1, 0, 2).reshape(n_rows, -1)

    def _attend_one(self, q: Array, latent: Array) -> Array:
        """[1, H, key_dim], the query of the last token; returns [1, H * v_dim]. Absorbed form."""
        spec, xp = self._spec, self._backend.xp
        per_head = q.transpose(1, 0, 2)  # [H, 1, key_dim]
        absorbed = xp.empty((spec.n_heads, spec.kv_rank + spec.rope_dim), dtype=xp.float32)
        absorbed[:, : spec.kv_rank] = (per_head[..., : spec.nope_dim] @ self._w_uk)[:, 0]
        absorbed[:, spec.kv_rank :] = per_head[:, 0, spec.nope_dim :]
        weights = softmax_rows(absorbed @ latent.T, self._backend)
        context = weights @ latent[:, : spec.kv_rank]
        return (context[:, None] @ self._w_uv_t).reshape(1, -1)
