"""Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it.

Queries, keys and values pass a short convolution; queries and keys have unit length, and each of their heads
serves several heads of values. Decay and learning rate are one number for each head of values; the normed output
is gated by silu(z). State: ``recurrent`` [H_v, d_k, d_v] and ``conv`` [channels, K-1], where the channels are
those of all queries, then keys, then values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.gated_delta import gated_delta_chunks, gated_delta_step
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm, unit_norm
from engine.layers.short_conv import ShortConv
from engine.rows import Rows
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Gdn", "GdnSpec"]


@dataclass(frozen=True)
class GdnSpec:
    """Shapes of Gated DeltaNet; ``n_v_heads`` is a multiple of ``n_k_heads``.

    Attributes:
        grouped: whether the maps of queries, keys, values and gate are stored as one, head of keys by head of keys
            (Qwen3-Next), or as four (Qwen3.5).
    """

    hidden_size: int
    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    norm_eps: float
    grouped: bool

    @property
    def kind(self) -> KvKind:
        return KvKind.LINEAR

    @property
    def window_tokens(self) -> int:
        return 0

    @property
    def k_width(self) -> int:
        """Channels of all queries together; keys have as many."""
        return self.n_k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Channels of all values together."""
        return self.n_v_heads * self.v_dim

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("recurrent", (self.n_v_heads, self.k_dim, self.v_dim)),
            TensorSpec("conv", (2 * self.k_width + self.v_width, self.conv_kernel - 1)),
        )

    def weight_shapes(self) -> Shapes:
        n_in, mixed = self.hidden_size, 2 * self.k_width + self.v_width
        if self.grouped:
            shapes = {
                **linear_shapes("in_proj_qkvz", n_in, mixed + self.v_width),
                **linear_shapes("in_proj_ba", n_in, 2 * self.n_v_heads),
            }
        else:
            shapes = {
                **linear_shapes("in_proj_qkv", n_in, mixed),
                **linear_shapes("in_proj_z", n_in, self.v_width),
                **linear_shapes("in_proj_b", n_in, self.n_v_heads),
                **linear_shapes("in_proj_a", n_in, self.n_v_heads),
            }
        return {
            **shapes,
            "conv1d.weight": (mixed, 1, self.conv_kernel),
            "A_log": (self.n_v_heads,),
            "dt_bias": (self.n_v_heads,),
            "norm.weight": (self.v_dim,),
            **linear_shapes("out_proj", self.v_width, self.hidden_size),
        }

    def stored_as(self, dtype: str) -> GdnSpec:
        return self

    def build(self, weights: Weights, backend: Backend) -> Gdn:
        return Gdn(self, _ungrouped(self, weights, backend) if self.grouped else weights, backend)


def _ungrouped(spec: GdnSpec, weights: Weights, backend: Backend) -> Weights:
    """The maps with their rows in plain order: all queries, all keys, all values; gate; b; a."""
    xp, per_k = backend.xp, spec.n_v_heads // spec.n_k_heads
    joined = weights["in_proj_qkvz.weight"].reshape(spec.n_k_heads, -1, spec.hidden_size)
    ends = np.cumsum([spec.k_dim, spec.k_dim, per_k * spec.v_dim])
    parts = [joined[:, lo:hi] for lo, hi in zip([0, *ends], [*ends, None], strict=True)]
    q, k, v, z = (xp.ascontiguousarray(part).reshape(-1, spec.hidden_size) for part in parts)
    rates = weights["in_proj_ba.weight"].reshape(spec.n_k_heads, 2, per_k, spec.hidden_size)
    return {
        **weights,
        "in_proj_qkv.weight": xp.concatenate([q, k, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": xp.ascontiguousarray(rates[:, 0]).reshape(-1, spec.hidden_size),
        "in_proj_a.weight": xp.ascontiguousarray(rates[:, 1]).reshape(-1, spec.hidden_size),
    }


class Gdn:
    """The attention itself."""

    def __init__(self, spec: GdnSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._in_proj = Linear(weights, backend, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        self._conv = ShortConv(weights["conv1d.weight"], backend)
        self._decay_bias = weights["dt_bias"]
        self._decay_rate = -backend.xp.exp(weights["A_log"])
        self._norm = RmsNorm(weights["norm.weight"], spec.norm_eps, backend)
        self._out_proj = Linear(weights, backend, "out_proj")
        self._scale = np.float32(spec.k_dim**-0.5)

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_rows, xp = self._spec, rows.n_rows, self._backend.xp
        projected = self._in_proj(x)
        z_at = 2 * spec.k_width + spec.v_width
        b_at = z_at + spec.v_width
        beta = self._backend.sigmoid(projected[:, b_at : b_at + spec.n_v_heads])
        decay = self._backend.softplus(projected[:, b_at + spec.n_v_heads :] + self._decay_bias)
        decay *= self._decay_rate

        mixed = self._conv.forward(projected[:, :z_at], [state["conv"] for state in states], rows)
        qk = mixed[:, : 2 * spec.k_width].reshape(n_rows, 2, spec.n_k_heads, spec.k_dim)
        qk = unit_norm(qk, self._backend)
        q, k, v = qk[:, 0], qk[:, 1], mixed[:, 2 * spec.k_width :].reshape(n_rows, spec.n_v_heads, spec.v_dim)
        q *= self._scale
        per_k = spec.n_v_heads // spec.n_k_heads
        if per_k > 1:
            q, k = xp.repeat(q, per_k, axis=1), xp.repeat(k, per_k, axis=1)
        outputs = []
        for span, state in zip(rows.spans, states, strict=True):
            rule = gated_delta_step if span.n_rows == 1 else gated_delta_chunks
            own = span.first_row if span.n_rows == 1 else span.rows
            out = rule(q[own], k[own], v[own], decay[own], beta[own], state["recurrent"], self._backend)
            outputs.append(out if span.n_rows > 1 else out[None])
        out = outputs[0] if len(outputs) == 1 else xp.concatenate(outputs)
        y = self._norm(out[n_rows - n_out :]).reshape(n_out, spec.v_width)
        y *= self._backend.silu(projected[n_rows - n_out :, z_at:b_at])
        return self._out_proj(y)
