"""The gated delta rule with one decay a head (Gated DeltaNet, arXiv:2412.06464), in chunks and step by step.

As :mod:`engine.layers.delta_rule`, but the log-decay g_t is one number a head, so D_ij does too, and scores
are plain products scaled by it: A_ij = b_i (k_i . k_j) D_ij, P_ij = (q_i . k_j) D_ij. The sums of log-decays
are taken in float64: D_ij is then exact to float32 although it comes from a difference of sums, and no exponent
is positive.
"""

from __future__ import annotations

import numpy as np

from engine.backend import Array, Backend
from engine.layers.delta_rule import in_chunks, scan, unit_lower_inverse

__all__ = ["gated_delta_chunks", "gated_delta_step"]

_CHUNK_TOKENS = 64
_MIN_CHUNK_TOKENS = 8


def gated_delta_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, backend: Backend
) -> Array:
    """One token.

    Args:
        q, k: [H, d_k].
        v: [H, d_v].
        log_decay, beta: [H].
        state: [H, d_k, d_v], brought up to date in place.

    Returns:
        [H, d_v]
    """
    state *= backend.xp.exp(log_decay)[:, None, None]
    update = v[:, None] - k[:, None] @ state
    update *= beta[:, None, None]
    state += k[..., None] * update
    return (q[:, None] @ state)[:, 0]


def gated_delta_chunks(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, backend: Backend
) -> Array:
    """T tokens.

    Args:
        q, k: [T, H, d_k].
        v: [T, H, d_v].
        log_decay, beta: [T, H].
        state: [H, d_k, d_v], brought up to date in place.

    Returns:
        [T, H, d_v]
    """
    xp, n_tokens = backend.xp, q.shape[0]
    chunk = _CHUNK_TOKENS
    while chunk > _MIN_CHUNK_TOKENS and chunk >= 2 * n_tokens:
        chunk //= 2
    q, k, v, g, b = (in_chunks(x, chunk, xp) for x in (q, k, v, log_decay[..., None], beta[..., None]))
    sums = xp.cumsum(g.astype(np.float64), axis=-2)  # [N, H, C, 1]
    differences = xp.minimum(sums - sums.swapaxes(-1, -2), 0.0).astype(np.float32)
    between = xp.tril(xp.exp(differences))  # [N, H, C, C]
    from_start = xp.exp(sums).astype(np.float32)
    to_end = xp.exp(sums[:, :, -1:] - sums).astype(np.float32)

    keys_t = k.swapaxes(-1, -2)
    a = k @ keys_t
    a *= between
    a *= b
    diagonal = xp.arange(chunk)
    a[..., diagonal, diagonal] = 0
    solved = unit_lower_inverse(a, xp)
    p = q @ keys_t
    p *= between
    v *= b
    u = solved @ v
    w = solved @ (k * (from_start * b))
    k *= to_end
    states = scan(u, w, k, from_start[:, :, -1], state, xp)
    q *= from_start
    out = q @ states
    out += p @ u
    n_chunks, n_heads, _, d_v = out.shape
    return out.transpose(0, 2, 1, 3).reshape(n_chunks * chunk, n_heads, d_v)[:n_tokens]
