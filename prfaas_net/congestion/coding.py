"""Whether encoding pays on a connection, decided by what the connection itself measures.

A chunk of L bytes takes L/r to send raw at r bytes a second, and L/E + L/(q r) encoded at E bytes a second with ratio
q. Encoding is sooner if E > r / (1 - 1/q). All three are measured on the connection that sends: r falls when the path
is slow, E falls when the cores are busy with something else, so a codec gives way as soon as it would slow a transfer.
"""

from __future__ import annotations

__all__ = ["CodingGovernor"]

# How clearly encoding must win: what it costs the receiver, and other threads, is not in the formula.
MARGIN = 1.3
# While not encoding, look again after so many chunks whether it would pay; while encoding, whether raw would.
PROBE_EVERY = 16
FORGET = 0.25
# A ratio this low saves too little to be worth anybody's time.
MIN_RATIO = 1.05


class CodingGovernor:
    """For one connection and one codec. Times are averaged by the byte: one send that waits says more of a path than
    ten that went into a buffer."""

    def __init__(self) -> None:
        self._send_s: float | None = None
        self._encode_s: float | None = None
        self.ratio: float | None = None
        self._since_probe = 0

    @property
    def send_rate(self) -> float | None:
        """Bytes a second onto the wire."""
        return None if self._send_s is None else 1 / self._send_s

    @property
    def encode_rate(self) -> float | None:
        """Bytes a second into the encoder."""
        return None if self._encode_s is None else 1 / self._encode_s

    def wants(self, *, backlog: bool) -> bool:
        """Whether the next chunk should be encoded.

        Args:
            backlog: chunks are waiting. Otherwise the chunk goes at once, and its latency is all that counts.
        """
        if self._send_s is None or not backlog:
            return False
        if self.pays or self._encode_s is None:
            return True
        self._since_probe += 1
        if self._since_probe < PROBE_EVERY:
            return False
        self._since_probe = 0
        # Not worth a look where even a send that does not wait is far faster than the codec.
        return self._send_s > self._encode_s / 4

    @property
    def pays(self) -> bool:
        """Whether encoding is sooner, by what was measured last."""
        if self._send_s is None or self._encode_s is None or self.ratio is None or self.ratio < MIN_RATIO:
            return False
        return self._send_s * (1 - 1 / self.ratio) > MARGIN * self._encode_s

    def sent(self, n_bytes: int, took_s: float) -> None:
        """So many bytes were written to the socket in so long."""
        self._send_s = _blend(self._send_s, max(took_s, 1e-7) / max(n_bytes, 1))

    def encoded(self, n_bytes: int, encoded_bytes: int, took_s: float) -> None:
        """So many bytes became so many in so long."""
        self._encode_s = _blend(self._encode_s, max(took_s, 1e-7) / max(n_bytes, 1))
        self.ratio = _blend(self.ratio, n_bytes / max(encoded_bytes, 1))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + FORGET * (new - old)
