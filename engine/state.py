"""The state of one sequence, in the buffer that the node gave for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.backend import Array, Backend
from engine.spec import LayerState
from prfaas_net.errors import UsageError
from prfaas_net.kv import CacheLayout, KvKind, RegionMap

__all__ = ["SequenceState"]


class SequenceState:
    """Arrays over a buffer: layers write their state where it is sent from and decoded in.

    With a backend whose arrays cannot lie in host memory, layers work on device arrays instead, float32 whatever
    is stored, filled from the buffer here and copied back by a :mod:`publisher <engine.publish>`.

    Raises:
        UsageError: the buffer is laid out for another model, too small, or read-only.
    """

    def __init__(
        self, layout: CacheLayout, regions: RegionMap, buffer: Any, capacity_tokens: int, backend: Backend
    ) -> None:
        if regions.layout.fingerprint != layout.fingerprint:
            raise UsageError(
                "the buffer is laid out for another model", expected=layout.model, found=regions.layout.model
            )
        if regions.capacity_tokens < capacity_tokens:
            raise UsageError(
                "the buffer is too small", expected=f"{capacity_tokens} tokens", found=regions.capacity_tokens
            )
        n_bytes = memoryview(buffer).nbytes
        if n_bytes < regions.total_bytes:
            raise UsageError("the buffer is too small", expected=f"{regions.total_bytes} bytes", found=n_bytes)
        self._backend = backend
        self._host: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
        self._arrays: dict[int, dict[str, Array]] = {}
        self.kinds = {layer.index: layer.kind for layer in layout.layers}
        for layer in layout.layers:
            views = {t.name: regions.array(buffer, layer.index, t.name) for t in layer.tensors}
            if not all(view.flags.writeable for view in views.values()):
                raise UsageError("the buffer is read-only", expected="a writable buffer")
            self._host[layer.index] = views
            self._arrays[layer.index] = {name: self._array(view) for name, view in views.items()}

    def _array(self, view: np.ndarray[Any, Any]) -> Array:
        if self._backend.shares_host_memory:
            return view
        return self._backend.from_host(view.astype(np.float32))

    def layer(self, index: int) -> LayerState:
        """One layer's tensors by name."""
        return self._arrays[index]

    def clear(self) -> None:
        """Make it the state of the empty sequence. Rows of attention need no clearing: none is valid."""
        for index, kind in self.kinds.items():
            if kind is KvKind.LINEAR:
                for array in self._arrays[index].values():
                    array[...] = 0

    def pieces(self, index: int, start: int, stop: int) -> list[tuple[Array, np.ndarray[Any, Any]]]:
        """What one layer wrote for tokens ``start`` to ``stop``: arrays, and their places in the buffer."""
        rows = slice(start, stop) if self.kinds[index] is KvKind.FULL else slice(None)
        return [(array[rows], self._host[index][name][rows]) for name, array in self._arrays[index].items()]
