"""A decoder-only model: embedding, layers, and the logits of the tokens that are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backend import Array, Backend
from engine.checkpoint import Checkpoint
from engine.layers.rms_norm import RmsNorm
from engine.spec import LayerState, ModelSpec, Weights

__all__ = ["Layer", "Model"]


class Layer:
    """One layer: x + mixer(norm(x)), then y + mlp(norm(y))."""

    def __init__(self, spec: ModelSpec, index: int, parts: Sequence[Weights], backend: Backend) -> None:
        input_norm, mixer, output_norm, mlp = parts
        self.index = index
        self._input_norm = RmsNorm(input_norm["weight"], spec.norm_eps, backend)
        self._mixer = spec.layers[index].mixer.build(mixer, backend)
        self._mlp_norm = RmsNorm(output_norm["weight"], spec.norm_eps, backend)
        self._mlp = spec.layers[index].mlp.build(mlp, backend)

    def forward(self, x: Array, state: LayerState, start: int, n_out: int) -> Array:
        """[T, hidden_size] to [n_out, hidden_size]; see :meth:`engine.spec.Mixer.forward`."""
        mixed = self._mixer.forward(self._input_norm(x), state, start, n_out)
        if n_out == 0:
            return mixed
        mixed += x[x.shape[0] - n_out :]
        mixed += self._mlp.forward(self._mlp_norm(mixed))
        return mixed


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

        self._embedding = read("model.embed_tokens.weight")
        self.layers: list[Layer] = []
        for index in range(len(spec.layers)):
            parts = [
                {name: read(prefix + name) for name in shapes} for prefix, shapes in spec.layer_parts(index).items()
            ]
            self.layers.append(Layer(spec, index, parts, backend))
        self._norm = RmsNorm(read("model.norm.weight"), spec.norm_eps, backend)
        self._head_t = (self._embedding if spec.tied else read("lm_head.weight")).T

    def embed(self, token_ids: Sequence[int]) -> Array:
        """[T, hidden_size]"""
        return self._embedding[self.backend.xp.asarray(token_ids, dtype=np.int64)]

    def logits(self, x: Array) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """The logits [vocab_size] that follow the last token of ``x``, on the host."""
        return self.backend.to_host((self._norm(x[-1:]) @ self._head_t)[0])
