"""The array library that a model computes with.

Every array operation of the engine goes through a :class:`Backend`, so that NumPy and CuPy run the same
code. Arrays are of type :data:`Array`: the two libraries share an interface, but no type.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from prfaas_net.errors import ConfigError

__all__ = ["NUMPY", "Array", "Backend", "load_backend"]

# Rows up to which a product goes row by row, and values of the map (512 KiB) that are taken at a time.
_FEW_ROWS = 6
_PIECE_VALUES = 1 << 17

# An array of whichever library the backend names.
Array: TypeAlias = Any


@dataclass(frozen=True)
class Backend:
    """One array library.

    Attributes:
        xp: the module, with NumPy's interface.
        shares_host_memory: whether its arrays can be views of a host buffer. Where they cannot, state is
            kept on the device and copied to the buffer when it is published.
        copies_maps: whether products of few rows cost a copy of the map, as with OpenBLAS; see :meth:`product`.
        new_copier: makes an :class:`engine.publish.Copier`; without one, copies to the host are waited for.
    """

    name: str
    xp: Any
    shares_host_memory: bool
    new_copier: Callable[[], Any] | None = None
    copies_maps: bool = True

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """A host array as an array of this library; the very same one where memory is shared."""
        return array if self.shares_host_memory else self.xp.asarray(array)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """An array of this library as a host array."""
        host: np.ndarray[Any, Any] = array if self.shares_host_memory else self.xp.asnumpy(array)
        return host

    def product(self, x: Array, weight: Array) -> Array:
        """x W^T for rows x [T, n_in] and a map W [n_out, n_in].

        For a few rows OpenBLAS first copies the whole map into its own order, which costs more than the product.
        There the rows are taken one by one, over pieces of the map that stay in the cache; each row's result is
        then also the very same whatever the others are.
        """
        if not self.copies_maps or not 1 < len(x) <= _FEW_ROWS:
            return x @ weight.T
        n_out, n_in = weight.shape
        y = self.xp.empty((len(x), n_out), dtype=np.float32)
        piece = max(64, _PIECE_VALUES // n_in)
        for first in range(0, n_out, piece):
            part = weight[first : first + piece]
            for index in range(len(x)):
                self.xp.dot(part, x[index], out=y[index, first : first + piece])
        return y

    def load(self, stored: Array) -> Array:
        """Rows of keys or values as float32."""
        return stored if stored.dtype == np.float32 else stored.astype(np.float32)

    def rounded(self, values: Array, dtype: str) -> Array:
        """Float32 values rounded to what a type can hold, to nearest even; still float32."""
        if dtype == "float32":
            return values
        bits = values.view(np.uint32)
        bits = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        bits &= np.uint32(0xFFFF0000)
        return bits.view(np.float32)

    def keep(self, target: Array, where: slice, values: Array, dtype: str) -> None:
        """Write rows of keys or values; on a device the target is float32 whatever is stored."""
        target[where] = self.rounded(values, dtype) if target.dtype == np.float32 else values

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

    def gelu(self, x: Array) -> Array:
        """The tanh form of x * normal_cdf(x) (Hendrycks and Gimpel 2016)."""
        xp = self.xp
        inner = x * x
        inner *= np.float32(0.044715)
        inner += np.float32(1.0)
        inner *= x
        inner *= np.float32(0.7978845608028654)  # sqrt(2 / pi)
        y = xp.tanh(inner)
        y += np.float32(1.0)
        y *= x
        y *= np.float32(0.5)
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
            backend: Backend = importlib.import_module("engine.cupy_backend").cupy_backend()
            return backend
        except ImportError as error:
            raise ConfigError(
                "the cupy backend needs CuPy", found=error, do="install prfaas-net[cuda], or use --backend numpy"
            ) from error
    raise ConfigError("no such array backend", expected="numpy or cupy", found=repr(name))
