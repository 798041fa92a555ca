"""The number of threads of a matrix product."""

from __future__ import annotations

import ctypes

import pytest

from engine.blas import _loaded_libraries, limit_blas_threads


def n_threads() -> int | None:
    """What the loaded library says; None if it is not the one of NumPy's wheels."""
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        if hasattr(library, "scipy_openblas_get_num_threads64_"):
            return int(library.scipy_openblas_get_num_threads64_())
    return None


def test_threads_are_limited_unless_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has the number that was asked for; OPENBLAS_NUM_THREADS keeps it from being changed."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    before = n_threads()
    if before is None:
        pytest.skip("NumPy is built with another BLAS library")
    try:
        assert limit_blas_threads(2)
        assert n_threads() == 2
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
        assert not limit_blas_threads(1)
        assert n_threads() == 2
    finally:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
        limit_blas_threads(before)
