"""A decoder-only model: embedding, layers, and the logits of the rows that are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backend import Array, Backend
from engine.checkpoint import Checkpoint
from engine.layers.rms_norm import RmsNorm
from engine.rows import Rows
from engine.spec import LayerState, ModelSpec, Shapes, Weights

__all__ = ["Layer", "Model"]


class Layer:
    """One layer: a mixer and an MLP, each added to what passes by, with norms as :class:`Residuals` says."""

    def __init__(self, spec: ModelSpec, index: int, mixer: Weights, mlp: Weights, norms: Weights, xb: Backend) -> None:
        layer = spec.layers[index]
        self.index = index
        self._mixer = layer.mixer.build(mixer, xb)
        self._mlp = layer.mlp.build(mlp, xb)
        self._from_normed = layer.residuals.from_normed
        self._mixer_scales = layer.residuals.mixer_scales
        self._mlp_scales = layer.residuals.mlp_scales
        offset = np.float32(layer.residuals.norm_offset)
        self._before_mixer, self._after_mixer, self._before_mlp, self._after_mlp = (
            RmsNorm(norms[name] + offset, spec.norm_eps, xb) if name is not None else None
            for name in layer.residuals.norms
        )

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """[rows, hidden_size] to [n_out, hidden_size]; see :meth:`engine.spec.Mixer.forward`."""
        assert self._before_mixer is not None
        assert self._before_mlp is not None
        normed = self._before_mixer(x)
        mixed = self._mixer.forward(normed, states, rows, n_out)
        if n_out == 0:
            return mixed
        passing = (normed if self._from_normed else x)[x.shape[0] - n_out :]
        y = _joined(passing, mixed, self._after_mixer, self._mixer_scales)
        normed = self._before_mlp(y)
        return _joined(normed if self._from_normed else y, self._mlp.forward(normed), self._after_mlp, self._mlp_scales)


def _joined(passing: Array, half: Array, norm: RmsNorm | None, scales: tuple[float, float]) -> Array:
    """passing * scales[0] + norm(half) * scales[1]; may change ``half``."""
    if norm is not None:
        half = norm(half)
    if scales[1] != 1.0:
        half *= np.float32(scales[1])
    half += passing if scales[0] == 1.0 else passing * np.float32(scales[0])
    return half


class Model:
    """The whole model. It holds weights and no state, so any number of threads may use it.

    Args:
        checkpoint: its weights are read one part at a time, so that no second copy of all of them exists.
    """

    def __init__(self, checkpoint: Checkpoint, backend: Backend) -> None:
        self.spec = spec = checkpoint.spec
        self.backend = backend

        def read(name: str) -> Array:
            return backend.from_host(checkpoint.read(name))

        def read_all(prefix: str, shapes: Shapes) -> Weights:
            return {name: read(prefix + name) for name in shapes}

        self._embedding = read("model.embed_tokens.weight")
        self._embedding_scale = np.float32(spec.embedding_scale)
        self.layers: list[Layer] = []
        for index in range(len(spec.layers)):
            mixer, mlp, *norms = spec.layer_parts(index).items()
            by_name = {prefix.split(".")[-2]: read(prefix + "weight") for prefix, _ in norms}
            self.layers.append(Layer(spec, index, read_all(*mixer), read_all(*mlp), by_name, backend))
        self._norm = RmsNorm(read("model.norm.weight") + np.float32(spec.norm_offset), spec.norm_eps, backend)
        self._head = self._embedding if spec.tied else read("lm_head.weight")

    def embed(self, token_ids: Sequence[int]) -> Array:
        """[rows, hidden_size]"""
        x = self._embedding[self.backend.xp.asarray(token_ids, dtype=np.int64)]
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def logits(self, x: Array) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """The logits [rows, vocab_size] that follow each row of ``x``, on the host."""
        return self.backend.to_host(self.backend.product(self._norm(x), self._head))
