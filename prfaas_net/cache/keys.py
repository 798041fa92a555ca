"""Names of cached blocks: a chain of hashes, so that one key stands for a whole prefix.

The key of block ``i`` is the first 16 bytes of ``SHA-256(key of block i - 1, the block's tokens)``; the root that
block 0 follows is a hash of everything that makes state unfit for another use: the layout's fingerprint (weights,
shapes, dtype), the adapter, the cache salt, the block size. So equal keys mean equal tokens from the first one on.

SHA-256 because prompts come from strangers: whoever can make two prefixes collide can read another's cache or
spoil it (vLLM moved to it for that reason). 128 bits of it are kept: 64 bits of work against collisions among all
blocks ever, at 16 bytes a key. Processors hash 1-2 GB/s of it, and the block size bounds the number of calls.

Only full blocks have keys. A group (see :class:`~prfaas_net.kv.KvKind`) is not hashed in: it stands beside the key.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_net.errors import UsageError

__all__ = ["KEY_BYTES", "PrefixScope", "extend_keys", "prefix_keys"]

KEY_BYTES = 16


@dataclass(frozen=True)
class PrefixScope:
    """What must agree for state to be reused.

    Attributes:
        layout: fingerprint of the cache layout: weights, shapes, dtypes.
        block_tokens: tokens of a block.
        salt: requests with different salts never share anything (vLLM's ``cache_salt``).
        adapter: name of the LoRA adapter, if one is used.
    """

    layout: str
    block_tokens: int
    salt: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise UsageError("a block needs tokens", expected="1 or more", found=self.block_tokens)

    @property
    def root(self) -> bytes:
        """The key that block 0 follows."""
        parts = (self.layout, str(self.block_tokens), self.salt, self.adapter)
        # Each part with its length: no two scopes may be spelt alike.
        body = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
        return hashlib.sha256(b"prfaas prefix 1" + body).digest()[:KEY_BYTES]


def prefix_keys(scope: PrefixScope, token_ids: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    """The keys of every full block of a prompt, one after the other: ``KEY_BYTES`` each.

    Args:
        token_ids: a list, or an array of any integer type.

    Raises:
        UsageError: a token id does not fit 32 bits.
    """
    n_blocks = len(token_ids) // scope.block_tokens
    if not n_blocks:
        return b""
    part = token_ids[: n_blocks * scope.block_tokens]
    try:
        # Of a list, ``array`` makes numbers of 32 bits four times as fast as NumPy, and refuses all others.
        tokens = part if isinstance(part, np.ndarray) else np.frombuffer(array("I", part), dtype=np.uint32)
    except (OverflowError, TypeError):
        raise UsageError("a token id does not fit 32 bits") from None
    if tokens.dtype != np.uint32 and (tokens.min() < 0 or tokens.max() >> 32):
        raise UsageError("a token id does not fit 32 bits", found=f"{tokens.min()} to {tokens.max()}")
    return extend_keys(scope.root, tokens.astype("<u4").tobytes(), scope.block_tokens)


def extend_keys(parent: bytes, tokens: bytes, block_tokens: int) -> bytes:
    """The keys of full blocks that follow a block (or a root), one after the other: ``KEY_BYTES`` each.

    Args:
        tokens: 4 bytes each, little-endian; whole blocks.
    """
    raw, width = memoryview(tokens), block_tokens * 4
    sha256, key = hashlib.sha256, parent
    keys = []
    for start in range(0, len(raw), width):
        hasher = sha256(key)
        hasher.update(raw[start : start + width])
        key = hasher.digest()[:KEY_BYTES]
        keys.append(key)
    return b"".join(keys)
