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
    """For one connection and one codec."""

    def __init__(self) -> None:
        self.send_rate: float | None = None
        self.encode_rate: float | None = None
        self.ratio: float | None = None
        self._since_probe = 0

    def wants(self, *, backlog: bool) -> bool:
        """Whether the next chunk should be encoded.

        Args:
            backlog: chunks are waiting. Otherwise the chunk goes at once, and its latency is all that counts.
        """
        if self.send_rate is None or not backlog:
            return False
        self._since_probe += 1
        if self._since_probe >= PROBE_EVERY and not self.pays:
            self._since_probe = 0
            # Not even an infinitely fast codec would win against a send that does not wait.
            return self.encode_rate is None or self.send_rate < 4 * self.encode_rate
        return self.pays or self.encode_rate is None

    @property
    def pays(self) -> bool:
        """Whether encoding is sooner, by what was measured last."""
        if self.send_rate is None or self.encode_rate is None or self.ratio is None or self.ratio < MIN_RATIO:
            return False
        return self.encode_rate > MARGIN * self.send_rate / (1 - 1 / self.ratio)

    def sent(self, n_bytes: int, took_s: float) -> None:
        """So many bytes were written to the socket in so long."""
        self.send_rate = _blend(self.send_rate, n_bytes / max(took_s, 1e-6))

    def encoded(self, n_bytes: int, encoded_bytes: int, took_s: float) -> None:
        """So many bytes became so many in so long."""
        self.encode_rate = _blend(self.encode_rate, n_bytes / max(took_s, 1e-6))
        self.ratio = _blend(self.ratio, n_bytes / max(encoded_bytes, 1))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + FORGET * (new - old)
