"""What a model is made of, as plain data: a family reads it from a config, a checkpoint is checked against it.

A layer is a *mixer* (attention or linear attention: it mixes tokens and keeps state) and an *MLP* (which
does neither), each behind a norm and a residual connection. A spec knows the shapes of its weights and of
its state before any weight is read, and builds the part that computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from engine.backend import Array, Backend
from engine.rows import Rows
from prfaas_net.kv import CacheLayout, KvKind, LayerLayout, TensorSpec

__all__ = [
    "LayerSpec", "LayerState", "Mixer", "MixerSpec", "Mlp", "MlpSpec", "ModelSpec", "Residuals", "Shapes", "Weights",
]  # fmt: skip

# Shape of every weight by its name within the part.
Shapes: TypeAlias = dict[str, tuple[int, ...]]
# Float32 weights by the same names.
Weights: TypeAlias = Mapping[str, Array]
# One layer's cache tensors by name, written in place.
LayerState: TypeAlias = Mapping[str, Array]


class Mixer(Protocol):
    """Mixes the tokens of each sequence."""

    def forward(self, x: Array, states: Sequence[LayerState], rows: Rows, n_out: int) -> Array:
        """Take the tokens of a pass in; bring the states up to date in place.

        Args:
            x: [rows, hidden_size], the tokens of all spans.
            states: of each span, the layer's state after the tokens before it.
            n_out: how many outputs are wanted, for the last rows; fewer than all only with a single span.

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

    @property
    def window_tokens(self) -> int:
        """How many of the last tokens it sees, itself included; 0 for all."""
        ...

    def cache_tensors(self) -> tuple[TensorSpec, ...]: ...

    def weight_shapes(self) -> Shapes: ...

    def stored_as(self, dtype: str) -> MixerSpec:
        """The same with rows of keys and values kept in another type. State that is summed up stays float32."""
        ...

    def build(self, weights: Weights, backend: Backend) -> Mixer: ...


class MlpSpec(Protocol):
    """Shapes of an MLP."""

    def weight_shapes(self) -> Shapes: ...

    def build(self, weights: Weights, backend: Backend) -> Mlp: ...


@dataclass(frozen=True)
class Residuals:
    """Where a layer's norms stand, and how its halves are added to what passes by.

    Attributes:
        norms: names of the norms before the mixer, after it, before the MLP, after it; None where there is none.
        norm_offset: added to the norms' weights (Gemma's and Qwen3-Next's are stored minus 1).
        from_normed: what is added to is the normed input, not the input (MiniMax).
        mixer_scales, mlp_scales: factors on (what passes by, the half's output).
    """

    norms: tuple[str, str | None, str, str | None] = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: float = 0.0
    from_normed: bool = False
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class LayerSpec:
    """One layer."""

    mixer: MixerSpec
    mlp: MlpSpec
    residuals: Residuals = Residuals()


@dataclass(frozen=True)
class ModelSpec:
    """A whole model.

    Attributes:
        model_type: as in the config.
        max_tokens: longest prompt plus output.
        tied: whether the output projection is the embedding.
        renames: text that a checkpoint may have in a weight's name, and what it is called here.
        norm_offset: added to the last norm's weights.
        embedding_scale: factor on the embeddings on their way in.
        ignored: beginnings and ends of the names of weights that nothing here reads, such as further heads.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_tokens: int
    tied: bool
    layers: tuple[LayerSpec, ...]
    renames: tuple[tuple[str, str], ...] = ()
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    ignored: tuple[str, ...] = ()

    def stored_as(self, kv_dtype: str) -> ModelSpec:
        """The same model with keys and values kept in another type."""
        layers = tuple(replace(layer, mixer=layer.mixer.stored_as(kv_dtype)) for layer in self.layers)
        return replace(self, layers=layers)

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
        """The weights of one layer, part by part; the key is what all names of the part begin with.

        Mixer and MLP come first, then the norms in the order of :attr:`Residuals.norms`.
        """
        base, layer = f"model.layers.{index}.", self.layers[index]
        norm: Shapes = {"weight": (self.hidden_size,)}
        return {
            f"{base}self_attn.": layer.mixer.weight_shapes(),
            f"{base}mlp.": layer.mlp.weight_shapes(),
            **{f"{base}{name}.": norm for name in layer.residuals.norms if name is not None},
        }

    def canonical(self, name: str) -> str:
        """The name by which we know a checkpoint's weight."""
        for found, ours in self.renames:
            name = name.replace(found, ours)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a weight beyond :meth:`weight_shapes` is a known redundancy and no sign of another model."""
        # Tied models are often saved with a second copy; old ones with the rotary frequencies.
        if (self.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq"):
            return True
        return any(name.startswith(text) or name.endswith(text) for text in self.ignored)

    def layout(self, name: str, weights_digest: str) -> CacheLayout:
        """The state that the model keeps for a sequence."""
        return CacheLayout(
            model=name,
            weights_digest=weights_digest,
            layers=tuple(
                LayerLayout(index, layer.mixer.kind, layer.mixer.cache_tensors(), layer.mixer.window_tokens)
                for index, layer in enumerate(self.layers)
            ),
        )
