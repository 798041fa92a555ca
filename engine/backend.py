"""The array library that a model computes with.

Every array operation of the engine goes through a :class:`Backend`, so that NumPy and CuPy run the same
code. Arrays are of type :data:`Array`: the two libraries share an interface, but no type.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from prfaas_net.errors import ConfigError

__all__ = ["NUMPY", "Array", "Backend", "load_backend"]

# An array of whichever library the backend names.
Array: TypeAlias = Any


@dataclass(frozen=True)
class Backend:
    """One array library.

    Attributes:
        xp: the module, with NumPy's interface.
        shares_host_memory: whether its arrays can be views of a host buffer. Where they cannot, state is
            kept on the device and copied to the buffer when it is published.
    """

    name: str
    xp: Any
    shares_host_memory: bool

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """A host array as an array of this library; the very same one where memory is shared."""
        return array if self.shares_host_memory else self.xp.asarray(array)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """An array of this library as a host array."""
        host: np.ndarray[Any, Any] = array if self.shares_host_memory else self.xp.asnumpy(array)
        return host

    def silu(self, x: Array) -> Array:
        """x * sigmoid(x), by tanh: it cannot overflow, and NumPy has it vectorised."""
        xp = self.xp
        half = x * np.float32(0.5)
        y = xp.tanh(half)
        y += np.float32(1.0)
        y *= half
        return y

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + exp(-x)), exact to rounding for very negative x too: small scores are compared and summed."""
        xp = self.xp
        small = xp.exp(-xp.abs(x))
        y = xp.where(x >= 0, np.float32(1.0), small)
        small += np.float32(1.0)
        y /= small
        return y

    def softplus(self, x: Array) -> Array:
        """log(1 + exp(x)), exact to rounding for large and for very negative x."""
        xp = self.xp
        y = xp.log1p(xp.exp(-xp.abs(x)))
        y += xp.maximum(x, np.float32(0.0))
        return y


NUMPY = Backend("numpy", np, shares_host_memory=True)


def load_backend(name: str) -> Backend:
    """The backend of that name: ``numpy`` or ``cupy``.

    Raises:
        ConfigError: there is no such backend, or its library is not installed.
    """
    if name == "numpy":
        return NUMPY
    if name == "cupy":
        try:
            return Backend("cupy", importlib.import_module("cupy"), shares_host_memory=False)
        except ImportError as error:
            raise ConfigError(
                "the cupy backend needs CuPy", found=error, do="install prfaas-net[cuda], or use --backend numpy"
            ) from error
    raise ConfigError("no such array backend", expected="numpy or cupy", found=repr(name))
