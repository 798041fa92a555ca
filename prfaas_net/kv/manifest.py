"""A manifest: exactly which state of which tokens a transfer carries, known before prefill starts.

Since layout, token range and chunk rule determine every chunk, a receiver can reserve all of it (or refuse)
before a byte is computed, and both sides number the chunks alike without sending a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prfaas_net.errors import ConfigError, IncompatibleError, UsageError
from prfaas_net.kv.chunks import MAX_CHUNK_BYTES, ChunkTable
from prfaas_net.kv.layout import CacheLayout, KvKind
from prfaas_net.kv.regions import RegionMap
from prfaas_net.units import MiB

__all__ = ["KvChunk", "Manifest"]


@dataclass(frozen=True)
class KvChunk:
    """A contiguous piece of one tensor of one layer.

    Attributes:
        stop_token: every token before it must have passed this layer before the chunk is final.
        offset: of the first byte inside the tensor's region.
    """

    index: int
    layer_index: int
    kind: KvKind
    tensor: str
    stop_token: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a transfer carries: tokens ``start_token`` to ``stop_token`` of one sequence.

    The destination already holds the first ``start_token`` tokens (0 without a prefix cache). Full-attention
    rows of the range are carried in pieces of ``chunk_tokens``; window and linear state, whose value is that
    at ``stop_token``, is carried whole.
    """

    layout: CacheLayout
    start_token: int
    stop_token: int
    chunk_tokens: int
    max_chunk_bytes: int = 4 * MiB

    def __post_init__(self) -> None:
        if not 0 <= self.start_token < self.stop_token:
            raise UsageError("bad token range", found=f"{self.start_token} to {self.stop_token}")
        if self.chunk_tokens < 1 or not 0 < self.max_chunk_bytes <= MAX_CHUNK_BYTES:
            raise UsageError("bad chunk rule", found=f"{self.chunk_tokens} tokens, {self.max_chunk_bytes} bytes")

    @cached_property
    def chunks(self) -> tuple[KvChunk, ...]:
        """All chunks, in the order in which a chunked prefill completes them."""
        return tuple(
            KvChunk(index, *piece) for index, piece in enumerate([*self._full_pieces(), *self._final_pieces()])
        )

    def _full_pieces(self) -> Iterator[tuple[int, KvKind, str, int, int, int]]:
        for start in range(self.start_token, self.stop_token, self.chunk_tokens):
            stop = min(start + self.chunk_tokens, self.stop_token)
            for layer in self.layout.layers:
                if layer.kind is not KvKind.FULL:
                    continue
                for tensor in layer.tensors:
                    rows = max(1, self.max_chunk_bytes // tensor.row_bytes)
                    for row in range(start, stop, rows):
                        end = min(row + rows, stop)
                        yield (
                            layer.index, layer.kind, tensor.name, end,
                            row * tensor.row_bytes, (end - row) * tensor.row_bytes,
                        )  # fmt: skip

    def _final_pieces(self) -> Iterator[tuple[int, KvKind, str, int, int, int]]:
        for layer in self.layout.layers:
            if layer.kind is KvKind.FULL:
                continue
            for tensor in layer.tensors:
                n_bytes = layer.rows(self.stop_token) * tensor.row_bytes
                for offset in range(0, n_bytes, self.max_chunk_bytes):
                    length = min(self.max_chunk_bytes, n_bytes - offset)
                    yield layer.index, layer.kind, tensor.name, self.stop_token, offset, length

    @cached_property
    def table(self) -> ChunkTable:
        """What the wire needs to know of it."""
        return ChunkTable([chunk.n_bytes for chunk in self.chunks])

    @cached_property
    def kv_bytes(self) -> dict[KvKind, int]:
        """Bytes carried, by kind of state."""
        total = dict.fromkeys(KvKind, 0)
        for chunk in self.chunks:
            total[chunk.kind] += chunk.n_bytes
        return total

    def whole_rows(self, is_here: Callable[[int], bool]) -> int:
        """How many tokens' full-attention rows are all there, from the first token on; ``is_here`` tells of a chunk."""
        if not self.kv_bytes[KvKind.FULL]:
            return self.start_token
        row_bytes = {(layer.index, t.name): t.row_bytes for layer in self.layout.layers for t in layer.tensors}
        missing = (c for c in self.chunks if c.kind is KvKind.FULL and not is_here(c.index))
        firsts = (c.stop_token - c.n_bytes // row_bytes[c.layer_index, c.tensor] for c in missing)
        return min(firsts, default=self.stop_token)

    def views(self, regions: RegionMap, buffer: memoryview) -> list[memoryview]:
        """Each chunk's bytes inside a buffer laid out by ``regions``.

        Raises:
            UsageError: the map has another layout or too little room.
        """
        if regions.layout.fingerprint != self.layout.fingerprint or regions.capacity_tokens < self.stop_token:
            raise UsageError("the buffer does not fit the manifest", expected=f"{self.stop_token} tokens")
        flat = buffer.cast("B")
        starts = (regions.region(c.layer_index, c.tensor).offset + c.offset for c in self.chunks)
        return [flat[start : start + c.n_bytes] for start, c in zip(starts, self.chunks, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a peer that holds an equal layout; see :meth:`from_json`."""
        return {
            "layout": self.layout.fingerprint,
            "start_token": self.start_token,
            "stop_token": self.stop_token,
            "chunk_tokens": self.chunk_tokens,
            "max_chunk_bytes": self.max_chunk_bytes,
            "total_bytes": self.table.total_bytes,
            "table": self.table.fingerprint,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any], layout: CacheLayout) -> Manifest:
        """Rebuild a peer's manifest on our own layout.

        Raises:
            IncompatibleError: the peer's layout is not ours, or its chunks come out differently.
            ConfigError: a field is missing or not a number.
        """
        if body.get("layout") != layout.fingerprint:
            raise IncompatibleError(
                "the two sides do not run the same model with the same cache layout",
                expected=f"layout {layout.fingerprint} ({layout.model})",
                found=body.get("layout"),
                do="start both with the same checkpoint and the same KV dtype",
            )
        fields = ("start_token", "stop_token", "chunk_tokens", "max_chunk_bytes")
        values = [body.get(field) for field in fields]
        if not all(isinstance(value, int) for value in values):
            raise ConfigError("bad manifest", expected=f"integers for {', '.join(fields)}", found=values)
        manifest = cls(layout, *values)  # type: ignore[arg-type]
        if manifest.table.fingerprint != body.get("table"):
            raise IncompatibleError(
                "the two sides cut the KVCache into different chunks",
                expected=manifest.table.fingerprint,
                found=body.get("table"),
                do="run the same version of prfaas-net on both sides",
            )
        return manifest
