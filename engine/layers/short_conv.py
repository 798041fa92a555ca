"""The short causal convolution of linear attention: one filter of K taps a channel, then silu.

Its state is the last K-1 inputs of every channel, [channels, K-1], oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backend import Array, Backend
from engine.rows import Rows

__all__ = ["ShortConv"]


class ShortConv:
    """y_t = silu(sum over j of w_j x_(t-K+1+j)), channel by channel.

    Args:
        weight: [channels, 1, K], as checkpoints keep depthwise filters.
    """

    def __init__(self, weight: Array, backend: Backend) -> None:
        # Taps first: each is then one row, as the inputs are.
        self._taps = backend.xp.ascontiguousarray(weight[:, 0].T)
        self._backend = backend

    def forward(self, x: Array, states: Sequence[Array], rows: Rows) -> Array:
        """[rows, channels] to [rows, channels]; each span's state [channels, K-1] is brought up to date in place."""
        if rows.is_step:
            return self._backend.silu(self._step(x, states))
        outputs = [self._span(x[span.rows], state) for span, state in zip(rows.spans, states, strict=True)]
        return self._backend.silu(outputs[0] if len(outputs) == 1 else self._backend.xp.concatenate(outputs))

    def _span(self, x: Array, state: Array) -> Array:
        """Consecutive tokens of one sequence."""
        xp, n_tokens, n_past = self._backend.xp, x.shape[0], state.shape[1]
        window = xp.empty((n_past + n_tokens, x.shape[1]), dtype=xp.float32)
        window[:n_past] = state.T
        window[n_past:] = x
        y = window[:n_tokens] * self._taps[0]
        scratch = xp.empty_like(y)
        for j in range(1, n_past + 1):
            xp.multiply(window[j : j + n_tokens], self._taps[j], out=scratch)
            y += scratch
        state[...] = window[n_tokens:].T
        return y

    def _step(self, x: Array, states: Sequence[Array]) -> Array:
        """One token of each sequence."""
        xp = self._backend.xp
        window = xp.empty((len(states), len(self._taps), x.shape[1]), dtype=xp.float32)
        for index, state in enumerate(states):
            window[index, :-1] = state.T
        window[:, -1] = x
        for index, state in enumerate(states):
            state[...] = window[index, 1:].T
        window *= self._taps
        return window.sum(axis=1)
