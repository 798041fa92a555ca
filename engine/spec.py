"""What a model is made of, as plain data: a family reads it from a config, a checkpoint is checked against it.

A layer is a *mixer* (attention or linear attention: it mixes tokens and keeps state) and an *MLP* (which
does neither), each behind a norm and a residual connection. A spec knows the shapes of its weights and of
its state before any weight is read, and builds the part that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.backend import Array, Backend
from prfaas_net.kv import CacheLayout, KvKind, LayerLayout, TensorSpec

__all__ = ["LayerSpec", "LayerState", "Mixer", "MixerSpec", "Mlp", "MlpSpec", "ModelSpec", "Shapes", "Weights"]

# Shape of every weight by its name within the part.
Shapes: TypeAlias = dict[str, tuple[int, ...]]
# Float32 weights by the same names.
Weights: TypeAlias = Mapping[str, Array]
# One layer's cache tensors by name, written in place.
LayerState: TypeAlias = Mapping[str, Array]


class Mixer(Protocol):
    """Mixes the tokens of one sequence."""

    def forward(self, x: Array, state: LayerState, start: int, n_out: int) -> Array:
        """Take tokens ``start`` to ``start + T`` in; bring ``state`` up to date in place.

        Args:
            x: [T, hidden_size], the tokens in order.
            state: the layer's state after ``start`` tokens.
            n_out: how many outputs are wanted, for the last tokens; 0 to T.

        Returns:
            [n_out, hidden_size]
        """
        ...


class Mlp(Protocol):
    """Transforms every token by itself."""

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        ...


class MixerSpec(Protocol):
    """Shapes of a mixer."""

    @property
    def kind(self) -> KvKind: ...

    def cache_tensors(self) -> tuple[TensorSpec, ...]: ...

    def weight_shapes(self) -> Shapes: ...

    def build(self, weights: Weights, backend: Backend) -> Mixer: ...


class MlpSpec(Protocol):
    """Shapes of an MLP."""

    def weight_shapes(self) -> Shapes: ...

    def build(self, weights: Weights, backend: Backend) -> Mlp: ...


@dataclass(frozen=True)
class LayerSpec:
    """One layer."""

    mixer: MixerSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class ModelSpec:
    """A whole model.

    Attributes:
        model_type: as in the config.
        max_tokens: longest prompt plus output.
        tied: whether the output projection is the embedding.
        renames: text that a checkpoint may have in a weight's name, and what it is called here.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_tokens: int
    tied: bool
    layers: tuple[LayerSpec, ...]
    renames: tuple[tuple[str, str], ...] = ()

    def weight_shapes(self) -> Shapes:
        """Every weight that a checkpoint must have, and no other."""
        hidden = self.hidden_size
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(len(self.layers)):
            for part, part_shapes in self.layer_parts(index).items():
                shapes |= {part + name: shape for name, shape in part_shapes.items()}
        return shapes

    def layer_parts(self, index: int) -> dict[str, Shapes]:
        """The weights of one layer, part by part; the key is what all names of the part begin with."""
        base = f"model.layers.{index}."
        norm: Shapes = {"weight": (self.hidden_size,)}
        return {
            f"{base}input_layernorm.": norm,
            f"{base}self_attn.": self.layers[index].mixer.weight_shapes(),
            f"{base}post_attention_layernorm.": norm,
            f"{base}mlp.": self.layers[index].mlp.weight_shapes(),
        }

    def canonical(self, name: str) -> str:
        """The name by which we know a checkpoint's weight."""
        for found, ours in self.renames:
            name = name.replace(found, ours)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a weight beyond :meth:`weight_shapes` is a known redundancy and no sign of another model."""
        # Tied models are often saved with a second copy; old ones with the rotary frequencies.
        return (self.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")

    def layout(self, name: str, weights_digest: str) -> CacheLayout:
        """The state that the model keeps for a sequence."""
        return CacheLayout(
            model=name,
            weights_digest=weights_digest,
            layers=tuple(
                LayerLayout(index, layer.mixer.kind, layer.mixer.cache_tensors())
                for index, layer in enumerate(self.layers)
            ),
        )
