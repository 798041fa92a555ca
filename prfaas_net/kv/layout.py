"""What one model's cache looks like: which layers keep what, and how many bytes that is.

Three kinds of state appear in hybrid-attention models (paper, Fig. 4):

* ``FULL``: full attention (GQA, MLA). One row a token; grows with the prompt.
* ``WINDOW``: sliding-window attention. One row a token, only the last ``window_tokens`` count.
* ``LINEAR``: linear attention and state-space layers (KDA, GDN, Lightning, SSM), with their short
  convolutions. One block of fixed size, whatever the length; meaningful only at exactly one length.

A layout is plain data. Two sides may exchange KVCache only if their fingerprints are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a dtype that NumPy knows by name)
import numpy as np
import orjson
import xxhash

from prfaas_net.errors import UsageError

__all__ = ["CacheLayout", "KvKind", "LayerLayout", "TensorSpec"]


class KvKind(StrEnum):
    """The three kinds of state a layer keeps."""

    FULL = "full"
    WINDOW = "window"
    LINEAR = "linear"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer's state.

    Attributes:
        name: the field's name for it, such as ``k``, ``v``, ``latent``, ``recurrent``, ``conv``.
        shape: of one token's row for ``FULL`` and ``WINDOW``, of the whole state for ``LINEAR``.
        dtype: a NumPy dtype name, or ``bfloat16``; little-endian on the wire.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's row, or of the whole state."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class LayerLayout:
    """The state that one layer keeps.

    Attributes:
        index: the layer's place in the model, from 0.
        window_tokens: for ``WINDOW``, how many of the last tokens are kept; 0 otherwise.
    """

    index: int
    kind: KvKind
    tensors: tuple[TensorSpec, ...]
    window_tokens: int = 0

    def rows(self, n_tokens: int) -> int:
        """How many rows each tensor has after ``n_tokens`` tokens (1 for ``LINEAR``)."""
        if self.kind is KvKind.LINEAR:
            return 1
        return min(n_tokens, self.window_tokens) if self.kind is KvKind.WINDOW else n_tokens


@dataclass(frozen=True)
class CacheLayout:
    """The state that a whole model keeps for one sequence.

    Attributes:
        model: a name for people; not part of the fingerprint.
        weights_digest: identifies the weights. Equal shapes with other weights must not mix.
        layers: in model order. A layer without state is left out.
    """

    model: str
    weights_digest: str
    layers: tuple[LayerLayout, ...]

    def __post_init__(self) -> None:
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise UsageError("layers must be listed once each, in order", found=indices)

    @cached_property
    def fingerprint(self) -> str:
        """128 bits over everything that must agree on both sides, as hex."""
        body = self.to_json()
        del body["model"]
        return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))

    def kv_bytes(self, n_tokens: int) -> dict[KvKind, int]:
        """S_kv(l) of the paper, split by kind, in bytes, for a sequence of ``n_tokens`` tokens."""
        total = dict.fromkeys(KvKind, 0)
        for layer in self.layers:
            total[layer.kind] += layer.rows(n_tokens) * sum(t.row_bytes for t in layer.tensors)
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` is the inverse."""
        return {
            "model": self.model,
            "weights_digest": self.weights_digest,
            "layers": [
                {
                    "index": layer.index,
                    "kind": layer.kind.value,
                    "window_tokens": layer.window_tokens,
                    "tensors": [[t.name, list(t.shape), t.dtype] for t in layer.tensors],
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> CacheLayout:
        """Rebuild a layout that :meth:`to_json` wrote."""
        return cls(
            model=body["model"],
            weights_digest=body["weights_digest"],
            layers=tuple(
                LayerLayout(
                    index=layer["index"],
                    kind=KvKind(layer["kind"]),
                    window_tokens=layer["window_tokens"],
                    tensors=tuple(TensorSpec(n, tuple(s), d) for n, s, d in layer["tensors"]),
                )
                for layer in body["layers"]
            ),
        )
