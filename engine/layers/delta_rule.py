"""The gated delta rule with a decay for every channel, step by step and in chunks.

For one head, with state S [d_k, d_v], queries q_t, keys k_t, values v_t, log-decays g_t <= 0 (one for every
key channel) and learning rates b_t in (0, 1) (Kimi Linear, arXiv:2510.26692, section 3):

    S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_(t-1) + b_t k_t v_t^T,    o_t = S_t^T q_t

**In chunks** of C tokens. Let D_ij = exp(g_(j+1) + ... + g_i) be the decay from after token j to token i and
G_i = D_i0 that since the chunk's start, both per channel. With the update written S_i += k_i u_i^T, the u_i
of a chunk solve a triangular system, and all else is matrix products:

    A_ij = b_i sum_c k_ic k_jc D_ijc  for j < i        P_ij = sum_c q_ic k_jc D_ijc  for j <= i
    U = (I + A)^-1 b (V - (K * G) S_0)                 O = (Q * G) S_0 + P U
    S_C = diag(G_C) S_0 + (K * D_C.)^T U

**Safety.** Writing D_ij as exp(G_i) / exp(G_j) overflows where decay is strong. Here every exponent is a sum
of log-decays between two tokens, so it is never positive, and none is a difference of sums, so none cancels.
A block of scores between two halves factors through the boundary between them, D_ij = D_ir D_rj; halves are
halved again down to blocks of 8 tokens, whose scores are summed directly. The system is solved by forward
substitution on those blocks and block inversion above: unlike a power series, that is stable when keys repeat.
"""

from __future__ import annotations

from engine.backend import Array, Backend

__all__ = ["delta_rule_chunks", "delta_rule_step", "in_chunks", "scan", "unit_lower_inverse"]

# More tokens a chunk mean fewer steps in sequence and more work in each; between 32 and 64 nothing is to choose.
_CHUNK_TOKENS = 64
_BLOCK_TOKENS = 8


def delta_rule_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, backend: Backend
) -> Array:
    """One token.

    Args:
        q, k, log_decay: [H, d_k].
        v: [H, d_v].
        beta: [H].
        state: [H, d_k, d_v], brought up to date in place.

    Returns:
        [H, d_v]
    """
    state *= backend.xp.exp(log_decay)[..., None]
    update = v[:, None] - k[:, None] @ state
    update *= beta[:, None, None]
    state += k[..., None] * update
    return (q[:, None] @ state)[:, 0]


def delta_rule_chunks(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, backend: Backend
) -> Array:
    """T tokens.

    Args:
        q, k, log_decay: [T, H, d_k].
        v: [T, H, d_v].
        beta: [T, H].
        state: [H, d_k, d_v], brought up to date in place.

    Returns:
        [T, H, d_v]
    """
    xp, n_tokens = backend.xp, q.shape[0]
    chunk = _CHUNK_TOKENS
    while chunk > _BLOCK_TOKENS and chunk >= 2 * n_tokens:
        chunk //= 2
    q, k, v, g, b = (in_chunks(x, chunk, xp) for x in (q, k, v, log_decay, beta[..., None]))

    a, p = _scores(q, k, g, backend)
    a *= b
    solved = unit_lower_inverse(a, xp)
    from_start = _running_sums(g, xp)
    xp.exp(from_start, out=from_start)
    u = solved @ (v * b)
    w = solved @ (k * from_start * b)
    carried = k * xp.exp(_remaining_sums(g, xp))
    states = scan(u, w, carried, from_start[:, :, -1], state, xp)
    q *= from_start
    out = q @ states
    out += p @ u
    n_chunks, n_heads, _, d_v = out.shape
    return out.transpose(0, 2, 1, 3).reshape(n_chunks * chunk, n_heads, d_v)[:n_tokens]


def in_chunks(x: Array, chunk: int, xp: Array) -> Array:
    """[T, H, d] to a copy [N, H, chunk, d].

    Padding with zeros changes nothing: such a token neither decays nor writes.
    """
    n_tokens, n_heads, width = x.shape
    n_chunks = -(-n_tokens // chunk)
    padded = xp.zeros((n_chunks * chunk, n_heads, width), dtype=xp.float32)
    padded[:n_tokens] = x
    return xp.ascontiguousarray(padded.reshape(n_chunks, chunk, n_heads, width).transpose(0, 2, 1, 3))


def _running_sums(g: Array, xp: Array) -> Array:
    """g_1 + ... + g_i along the second last axis, as a product: much faster than a cumulative sum."""
    return xp.tri(g.shape[-2], dtype=xp.float32) @ g


def _remaining_sums(g: Array, xp: Array) -> Array:
    """g_(i+1) + ... + g_n along the second last axis."""
    n = g.shape[-2]
    return xp.triu(xp.ones((n, n), dtype=xp.float32), 1) @ g


def _scores(q: Array, k: Array, g: Array, backend: Backend) -> tuple[Array, Array]:
    """Decayed products of keys with keys (below the diagonal) and of queries with keys (with the diagonal).

    Args:
        q, k, g: [N, H, C, d].

    Returns:
        Two arrays [N, H, C, C], zero above.
    """
    xp = backend.xp
    n_chunks, n_heads, chunk, width = k.shape
    both = xp.stack([k, q])
    scores = xp.zeros((2, n_chunks, n_heads, chunk, chunk), dtype=xp.float32)
    _scores_within_blocks(both, g, scores, xp)
    half = _BLOCK_TOKENS
    while half < chunk:
        pairs = (n_chunks, n_heads, chunk // (2 * half), 2, half, width)
        decay = g.reshape(pairs)
        after = xp.exp(_running_sums(decay[..., 1, :, :], xp))  # from the boundary to each later token
        before = xp.exp(_remaining_sums(decay[..., 0, :, :], xp))  # from each earlier token to the boundary
        later = both.reshape(2, *pairs)[..., 1, :, :] * after
        earlier = k.reshape(pairs)[..., 0, :, :] * before
        products = later @ earlier.swapaxes(-1, -2)
        for pair in range(chunk // (2 * half)):
            middle = (2 * pair + 1) * half
            scores[..., middle : middle + half, middle - half : middle] = products[:, :, :, pair]
        half *= 2
    return scores[0], scores[1]


def _scores_within_blocks(both: Array, g: Array, scores: Array, xp: Array) -> None:
    """Fill in the blocks on the diagonal, one diagonal at a time: tokens i and i - distance."""
    n_chunks, n_heads, chunk, width = g.shape
    blocks = (n_chunks, n_heads, chunk // _BLOCK_TOKENS, _BLOCK_TOKENS, width)
    both = both.reshape(2, *blocks)
    k, g = both[0], g.reshape(blocks)
    rows = xp.arange(chunk).reshape(-1, _BLOCK_TOKENS)
    decay = xp.zeros(blocks, dtype=xp.float32)
    for distance in range(_BLOCK_TOKENS):
        n = _BLOCK_TOKENS - distance
        if distance == 0:
            earlier = k
        else:
            decay = decay[..., 1:, :] + g[..., 1 : n + 1, :]
            earlier = k[..., :n, :] * xp.exp(decay)
        i = rows[:, distance:].reshape(-1)
        products = xp.einsum("xnhbtc,nhbtc->xnhbt", both[..., distance:, :], earlier)
        scores[..., i, i - distance] = products.reshape(2, n_chunks, n_heads, -1)
    diagonal = xp.arange(chunk)
    scores[0][..., diagonal, diagonal] = 0


def unit_lower_inverse(a: Array, xp: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a [..., C, C]."""
    chunk = a.shape[-1]
    inverse = xp.zeros_like(a)
    n = _BLOCK_TOKENS
    corners = range(0, chunk, n)
    blocks = xp.stack([a[..., c : c + n, c : c + n] for c in corners])
    solved = xp.zeros_like(blocks)
    solved[..., 0, 0] = 1
    for row in range(1, n):
        solved[..., row, :row] = -xp.einsum("...j,...jk->...k", blocks[..., row, :row], solved[..., :row, :row])
        solved[..., row, row] = 1
    for index, c in enumerate(corners):
        inverse[..., c : c + n, c : c + n] = solved[index]
    while n < chunk:
        # The inverse of [[X, 0], [Y, Z]] is [[X', 0], [-Z' Y X', Z']].
        for c in range(0, chunk, 2 * n):
            x, z = inverse[..., c : c + n, c : c + n], inverse[..., c + n : c + 2 * n, c + n : c + 2 * n]
            inverse[..., c + n : c + 2 * n, c : c + n] = -(z @ (a[..., c + n : c + 2 * n, c : c + n] @ x))
        n *= 2
    return inverse


def scan(u: Array, w: Array, carried: Array, decay: Array, state: Array, xp: Array) -> Array:
    """The only part in sequence: carry the state from chunk to chunk.

    Args:
        u: [N, H, C, d_v], as if the state had been zero; the true updates on return.
        w: [N, H, C, d_k], what a state takes away from them.
        carried: [N, H, C, d_k], the keys decayed to the chunk's end.
        decay: [N, H, d_k] or [N, H, 1], over the whole chunk.
        state: [H, d_k, d_v], brought up to date in place.

    Returns:
        [N, H, d_k, d_v], the state at the start of each chunk.
    """
    states = xp.empty((u.shape[0], *state.shape), dtype=xp.float32)
    transposed = carried.swapaxes(-1, -2)
    for n in range(u.shape[0]):
        states[n] = state
        u[n] -= w[n] @ state
        state *= decay[n][..., None]
        state += transposed[n] @ u[n]
    return states
