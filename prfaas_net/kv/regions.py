"""Where a sequence's state lies in one flat buffer.

Both engines keep the state of a sequence in a single buffer laid out by a :class:`RegionMap`: for every layer
and tensor one contiguous region with room for ``capacity_tokens`` rows. The prefill node sends straight out
of it; on the decode node it is the landing place *and* the cache that decode appends to, so a KVCache
crosses from memory to memory without a copy on either host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_net.errors import UsageError
from prfaas_net.kv.layout import CacheLayout, KvKind, LayerLayout, TensorSpec

__all__ = ["Region", "RegionMap"]

# A cache line, and the alignment that BLAS kernels like.
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Region:
    """One tensor of one layer inside the buffer.

    Attributes:
        offset: of its first byte in the buffer.
        rows: room in rows (1 for linear state).
    """

    layer: LayerLayout
    tensor: TensorSpec
    offset: int
    rows: int

    @property
    def n_bytes(self) -> int:
        return self.rows * self.tensor.row_bytes


class RegionMap:
    """Offsets of every region for a layout and a capacity.

    Args:
        layout: what the model keeps.
        capacity_tokens: room for that many tokens of full attention (prompt plus tokens to generate).
    """

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise UsageError("a sequence needs room for at least one token", found=capacity_tokens)
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self._regions: dict[tuple[int, str], Region] = {}
        offset = 0
        for layer in layout.layers:
            rows = layer.window_tokens if layer.kind is KvKind.WINDOW else layer.rows(capacity_tokens)
            for tensor in layer.tensors:
                region = Region(layer, tensor, offset, rows)
                self._regions[layer.index, tensor.name] = region
                offset += -(-region.n_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.total_bytes = offset

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def region(self, layer_index: int, tensor: str) -> Region:
        """The region of one tensor.

        Raises:
            UsageError: the layout has no such tensor.
        """
        try:
            return self._regions[layer_index, tensor]
        except KeyError:
            raise UsageError("no such tensor in the layout", found=f"layer {layer_index}, {tensor!r}") from None

    def array(self, buffer: Any, layer_index: int, tensor: str) -> np.ndarray[Any, Any]:
        """The region as an array of shape ``[rows, *shape]`` (``shape`` for linear state), a view of ``buffer``."""
        region = self.region(layer_index, tensor)
        shape = region.tensor.shape
        if region.layer.kind is not KvKind.LINEAR:
            shape = (region.rows, *shape)
        dtype = np.dtype(region.tensor.dtype)
        flat = np.frombuffer(buffer, dtype=dtype, count=region.n_bytes // dtype.itemsize, offset=region.offset)
        return flat.reshape(shape)
