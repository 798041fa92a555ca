"""NumPy that plays a device: arrays apart from host memory, and copies that arrive only when they are waited for."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from engine.backend import Backend

__all__ = ["Device", "DeviceNumPy"]


class DeviceNumPy:
    """NumPy's interface; what enters and leaves is copied, as with CuPy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, array: Any, dtype: Any = None) -> Any:
        return np.array(array, dtype=dtype)

    def asnumpy(self, array: Any) -> Any:
        return np.array(array)


class Device:
    """Makes backends whose copies are under way until asked for.

    Attributes:
        most_pending: the most copies that were under way at one time.
        pinned: staging arrays that were made; they are used again.
        late: copies arrive only when waited for; else at the second question.
    """

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.pending: deque[_Copy] = deque()
        self.most_pending = 0
        self.pinned = 0
        self.free: list[np.ndarray[Any, Any]] = []

    def backend(self) -> Backend:
        return Backend("device", DeviceNumPy(), shares_host_memory=False, new_copier=lambda: self)

    def start(self, array: Any) -> _Copy:
        copy = _Copy(self, np.array(array))
        self.pending.append(copy)
        self.most_pending = max(self.most_pending, len(self.pending))
        return copy


class _Copy:
    def __init__(self, device: Device, data: np.ndarray[Any, Any]) -> None:
        self._device = device
        self._data = data
        self._asked = 0
        fitting = [index for index, free in enumerate(device.free) if free.size >= data.size]
        if fitting:
            self._staging = device.free.pop(fitting[0])
        else:
            device.pinned += 1
            self._staging = np.empty(data.size, np.float32)
        self._staging[:] = np.nan

    def done(self) -> bool:
        self._asked += 1
        return not self._device.late and self._asked > 1

    def result(self) -> np.ndarray[Any, Any]:
        self._staging[: self._data.size] = self._data.reshape(-1)
        return self._staging[: self._data.size].reshape(self._data.shape)

    def release(self) -> None:
        self._device.pending.remove(self)
        self._staging[:] = np.nan
        self._device.free.append(self._staging)
