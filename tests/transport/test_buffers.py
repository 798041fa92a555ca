"""Somebody else's buffers, and the examples of docs/embedding.md as they stand there."""

from __future__ import annotations

import array
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas_net.errors import UsageError
from prfaas_net.transport import Identity, MemoryLink, MemoryListener, put, reserve_buffer
from prfaas_net.transport.buffers import bytes_of

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["numpy", "torch"])
def test_the_examples_run(code: str) -> None:
    """Each code block of the page is a whole program and says ``equal: True``."""
    if "import torch" in code and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "equal: True" in result.stdout


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(100_000),
        lambda: np.zeros((100, 7), dtype=np.float64),
        lambda: array.array("d", [0.0] * 500),
        lambda: memoryview(bytearray(77)),
    ],
    ids=["bytearray", "numpy", "array", "memoryview"],
)
async def test_buffers_of_many_kinds(make: Callable[[], Any]) -> None:
    """Whatever has bytes in one piece is moved as it lies."""
    listener = MemoryListener(identity=Identity("d"))
    await listener.start()
    link = await MemoryLink.connect(listener, identity=Identity("p"))
    landing = make()
    source = np.random.default_rng(0).integers(0, 256, bytes_of(landing).nbytes, dtype=np.uint8)
    incoming = reserve_buffer(listener, landing, chunk_bytes=4096)
    await put(link, incoming.ticket, source, body={"n": 1})
    assert await incoming.sealed() == {"n": 1}
    await incoming.landed()
    assert bytes_of(landing) == source.tobytes()
    other = reserve_buffer(listener, make())
    with pytest.raises(UsageError, match="another buffer"):
        await put(link, other.ticket, b"too short")
    await link.close()
    await listener.close()


@pytest.mark.parametrize("buffer", [np.zeros((10, 10))[:, ::2], b"read-only", "text", 7, None])
def test_what_cannot_be_landed_in_is_refused(buffer: Any) -> None:
    """Not contiguous, not writable, no buffer at all: UsageError, never a copy behind one's back."""
    with pytest.raises(UsageError):
        bytes_of(buffer, writable=True)
