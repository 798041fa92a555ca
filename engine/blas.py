"""How many threads matrix products use.

OpenBLAS, NumPy's usual library, splits each product over all cores and lets the threads wait in a busy loop.
Beside anything else that computes - a second engine, or the node's own event loop and checksums - each of the
thousands of products of a prefill then waits for a thread that is not running: on two cores a prefill of
1.3 s was seen to take 20 s and more. With one thread it takes 1.7 s, whatever else runs.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["limit_blas_threads"]

# The same function under the names that OpenBLAS's builds give it; the first is that of NumPy's wheels.
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def limit_blas_threads(n_threads: int) -> bool:
    """Let products of this process use ``n_threads`` threads, unless OPENBLAS_NUM_THREADS is set: that counts.

    Returns:
        Whether a library was found and told. Where NumPy uses another one, nothing happens.
    """
    if os.environ.get("OPENBLAS_NUM_THREADS"):
        return False
    told = False
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(n_threads))
                told = True
                break
    return told


def _loaded_libraries(part_of_name: str) -> set[str]:
    """Paths of the shared libraries in this process whose file names contain a text."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return {path for path in paths if part_of_name in Path(path).name}
