"""Lightning attention (arXiv:2401.04658), as in MiniMax-01: linear attention with a fixed decay for each head.

    S_t = exp(-r) S_(t-1) + k_t v_t^T,    o_t = S_t^T q_t

where q, k and v are silu of a projection. In chunks of C tokens, with D_ij = exp(-r (i - j)) for j <= i:

    O = (Q K^T * D) V + (Q * exp(-r i)) S_0,    S_C = exp(-r C) S_0 + (K * exp(-r (C - i)))^T V

All heads' outputs are normed as one vector and gated. State: ``recurrent`` [H, d, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.delta_rule import in_chunks
from engine.layers.linear import Linear, linear_shapes
from engine.layers.rms_norm import RmsNorm
from engine.rows import Rows
from engine.spec import LayerState, Shapes, Weights
from prfaas_net.kv import KvKind, TensorSpec

__all__ = ["Lightning", "LightningSpec"]

_CHUNK_TOKENS = 128
_NORM_EPS = 1e-6  # whatever the config's rms_norm_eps says


@dataclass(frozen=True)
class LightningSpec:
    """Shapes of lightning attention.

    Attributes:
        layer_index, n_layers: which layer it is of how many; its decay depends on them.
    """

    hidden_size: int
    n_heads: int
    head_dim: int
    layer_index: int
    n_layers: int

    @property
    def kind(self) -> KvKind:
        return KvKind.LINEAR

    @property
    def window_tokens(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return self.n_heads * self.head_dim

    def rates(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """r of each head [H]: 2^(-8 (h + 1) / H), ever less towards the last layer."""
        slopes = np.float32(2.0 ** (-8.0 / self.n_heads)) ** np.arange(1, self.n_heads + 1, dtype=np.float32)
        factor = 1.0 - self.layer_index / (self.n_layers - 1 + 1e-5) + 1e-5
        return (slopes * np.float32(factor)).astype(np.float32)

    def cache_tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("recurrent", (self.n_heads, self.head_dim, self.head_dim)),)

    def weight_shapes(self) -> Shapes:
        return {
            **linear_shapes("qkv_proj", self.hidden_size, 3 * self.width),
            "norm.weight": (self.width,),
            **linear_shapes("output_gate", self.hidden_size, self.width),
            **linear_shapes("out_proj", self.width, self.hidden_size),
        }

    def stored_as(self, dtype: str) -> LightningSpec:
        return self

    def build(self, weights: Weights, backend: Backend) -> Lightning:
        return Lightning(self, weights, backend)


class Lightning:
    """The attention itself."""

    def __init__(self, spec: LightningSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._qkv_proj = Linear(weights, backend, "qkv_proj")
        self._gate_proj = Linear(weights, backend, "output_gate")
        self._norm = RmsNorm(weights["norm.weight"], _NORM_EPS, backend)
        self._out_proj = Linear(weights, backend, "out_proj")
        self._rates = rates = spec.rates()
        self._step_decay = backend.from_host(np.exp(-rates)[:, None, None])
        age = np.arange(_CHUNK_TOKENS)
        distance = age[:, None] - age
        between = np.where(distance >= 0, np.exp(-rates[:, None, None] * np.maximum(distance, 0)), 0.0)
        self._between = backend.from_host(between.astype(np.float32))  # [H, C, C]
        self._from_start = backend.from_host(np.exp(-rates[:, None, None] * (age + 1.0)[:, None]).astype(np.float32))

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """See :meth:`engine.spec.Mixer.forward`."""
        spec, n_rows = self._spec, rows.n_rows
        qkv = self._backend.silu(self._qkv_proj(x)).reshape(n_rows, spec.n_heads, 3 * spec.head_dim)
        q, k, v = (qkv[..., i * spec.head_dim : (i + 1) * spec.head_dim] for i in range(3))
        outputs = []
        for span, state in zip(rows.spans, states, strict=True):
            run = self._step if span.n_rows == 1 else self._chunks
            outputs.append(run(q[span.rows], k[span.rows], v[span.rows], state["recurrent"]))
        out = outputs[0] if len(outputs) == 1 else self._backend.xp.concatenate(outputs)
        y = self._norm(out[n_rows - n_out :].reshape(n_out, spec.width))
        y *= self._backend.sigmoid(self._gate_proj(x[n_rows - n_out :]))
        return self._out_proj(y)

    def _step(self, q: Array, k: Array, v: Array, state: Array) -> Array:
        """[1, H, d] each; returns [1, H, d]."""
        state *= self._step_decay
        state += k[0][..., None] * v[0][:, None]
        return (q[0][:, None] @ state)[:, 0][None]

    def _chunks(self, q: Array, k: Array, v: Array, state: Array) -> Array:
        """[T, H, d] each; returns [T, H, d]."""
        xp, n_tokens = self._backend.xp, len(q)
        q, k, v = (in_chunks(x, _CHUNK_TOKENS, xp) for x in (q, k, v))
        scores = q @ k.swapaxes(-1, -2)
        scores *= self._between
        out = scores @ v
        q *= self._from_start
        for n in range(len(q)):
            size = min(_CHUNK_TOKENS, n_tokens - n * _CHUNK_TOKENS)
            out[n] += q[n] @ state
            # Decay from each token to the chunk's last one: that from the last row of D, shifted to a short chunk.
            to_end = self._between[:, size - 1, :size, None]
            state *= self._from_start[:, size - 1, :, None]
            state += (k[n][:, :size] * to_end).swapaxes(-1, -2) @ v[n][:, :size]
        n_chunks, n_heads, _, d = out.shape
        return out.transpose(0, 2, 1, 3).reshape(n_chunks * _CHUNK_TOKENS, n_heads, d)[:n_tokens]
