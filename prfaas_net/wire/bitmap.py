"""Which chunks have landed, as bits: chunk ``i`` is bit ``i % 8`` (from the lowest) of byte ``i // 8``."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas_net.errors import ProtocolError

__all__ = ["ChunkBitmap"]


class ChunkBitmap:
    """A growing set of chunk numbers below ``n_chunks``; nothing is ever taken out."""

    __slots__ = ("_bits", "_dirty", "count", "n_chunks")

    def __init__(self, n_chunks: int) -> None:
        self.n_chunks = n_chunks
        self.count = 0
        self._bits = bytearray(-(-n_chunks // 8))
        # Bytes changed since the last report: first and one past the last.
        self._dirty: tuple[int, int] | None = None

    def __contains__(self, chunk: int) -> bool:
        return bool(self._bits[chunk >> 3] >> (chunk & 7) & 1)

    @property
    def full(self) -> bool:
        return self.count == self.n_chunks

    def add(self, chunk: int) -> bool:
        """Add one chunk; False if it was there already."""
        if chunk in self:
            return False
        place = chunk >> 3
        self._bits[place] |= 1 << (chunk & 7)
        self.count += 1
        low, high = self._dirty or (place, place + 1)
        self._dirty = min(low, place), max(high, place + 1)
        return True

    def take_report(self, *, whole: bool = False) -> tuple[int, bytes] | None:
        """(first chunk, bits) that covers everything since the last report, or None if nothing changed."""
        low, high = (0, len(self._bits)) if whole else self._dirty or (0, 0)
        self._dirty = None
        return (low * 8, bytes(self._bits[low:high])) if high > low else None

    def merge(self, first_chunk: int, bits: bytes) -> Iterator[int]:
        """Add the chunks of a report; yield those that are new.

        Raises:
            ProtocolError: the report names chunks that do not exist.
        """
        if first_chunk % 8 or first_chunk + 8 * len(bits) > 8 * len(self._bits):
            raise ProtocolError(
                "an acknowledgement for chunks that do not exist",
                expected=f"chunks 0 to {self.n_chunks - 1}",
                found=f"{len(bits)} bytes of bits from chunk {first_chunk}",
            )
        for place, byte in enumerate(bits, first_chunk >> 3):
            new = byte & ~self._bits[place]
            while new:
                chunk = place * 8 + (new & -new).bit_length() - 1
                new &= new - 1
                if chunk >= self.n_chunks:
                    raise ProtocolError(
                        "an acknowledgement for a chunk that does not exist",
                        expected=f"at most {self.n_chunks - 1}",
                        found=chunk,
                    )
                self.add(chunk)
                yield chunk
