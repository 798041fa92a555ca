"""CuPy: the array library of NVIDIA GPUs, and copies from the device that run beside the computation."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.backend import Array, Backend

__all__ = ["CupyCopier", "cupy_backend"]


def cupy_backend() -> Backend:
    """The backend on the current device.

    Raises:
        ImportError: CuPy is not installed.
    """
    cupy = importlib.import_module("cupy")
    return Backend("cupy", cupy, shares_host_memory=False, new_copier=lambda: CupyCopier(cupy), copies_maps=False)


class CupyCopier:
    """Copies on a stream of their own into pinned memory that is used again.

    Pinned (page-locked) memory is what the device's copy engine can write to while the host and the compute
    stream go on; from ordinary memory or into it every copy is waited for. See :mod:`engine.publish`.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._free: dict[int, list[Any]] = {}

    def start(self, array: Array) -> _CupyCopy:
        """See :meth:`engine.publish.Copier.start`."""
        cupy = self._cupy
        source = cupy.ascontiguousarray(array)  # what is published is final: nothing overwrites it meanwhile
        computed = cupy.cuda.Event(disable_timing=True)
        computed.record()
        self._stream.wait_event(computed)
        n_bytes = _size_class(source.nbytes)
        pool = self._free.setdefault(n_bytes, [])
        memory = pool.pop() if pool else cupy.cuda.alloc_pinned_memory(n_bytes)
        target = np.frombuffer(memory, dtype=source.dtype, count=source.size).reshape(source.shape)
        source.get(stream=self._stream, out=target, blocking=False)
        copied = cupy.cuda.Event(disable_timing=True)
        copied.record(self._stream)
        return _CupyCopy(copied, target, source, lambda: pool.append(memory))


class _CupyCopy:
    """See :class:`engine.publish.PendingCopy`. Holds the source until it has been read."""

    def __init__(self, event: Any, target: np.ndarray[Any, Any], source: Array, give_back: Callable[[], None]) -> None:
        self._event = event
        self._target = target
        self._source: Array | None = source
        self._give_back = give_back

    def done(self) -> bool:
        return bool(self._event.done)

    def result(self) -> np.ndarray[Any, Any]:
        self._event.synchronize()
        self._source = None
        return self._target

    def release(self) -> None:
        self._give_back()


def _size_class(n_bytes: int) -> int:
    """The next power of two: few sizes, so that memory is found again."""
    return 1 << max(12, math.ceil(math.log2(max(1, n_bytes))))
