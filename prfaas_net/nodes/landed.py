"""What had landed of a transfer that will not complete, and what of it can stay.

Rows of full attention are a function of the tokens before them, whoever computes them: whole blocks of them that have
landed and were verified are cached like those of any prompt, and the next attempt, from whichever sender, begins behind
them. Window and linear state is that at the end of the prompt; of those, half is worth nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client import Counter

from prfaas_net.errors import CorruptionError, ProtocolError
from prfaas_net.kv import KvKind, Manifest
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.reuse import PromptMemory
from prfaas_net.transport import Incoming

__all__ = ["Landed", "LandedMetrics", "Predecessors"]

# Copied in about half a second: whoever leaves frees everything within one.
MAX_KEPT_BYTES = 1 << 30
# An attempt that was given up for another one gives its memory back in less.
PREDECESSOR_WITHIN_S = 1.0


class LandedMetrics:
    """Bytes that had landed of transfers that did not complete."""

    def __init__(self, metrics: Metrics) -> None:
        self._bytes: Counter = metrics.counter(
            "kv_unfinished_bytes",
            "Landed of transfers that did not complete: kept for whoever asks next, or to be sent again",
            ("fate",),
        )
        for fate in ("kept", "lost"):
            self._bytes.labels(fate)

    def ended(self, landed_bytes: int, kept_bytes: int) -> None:
        self._bytes.labels("kept").inc(min(kept_bytes, landed_bytes))
        self._bytes.labels("lost").inc(max(0, landed_bytes - kept_bytes))


@dataclass(frozen=True)
class Landed:
    """A transfer that has ended before it was whole. Nobody writes into its memory any more."""

    incoming: Incoming
    manifest: Manifest
    prompt: PromptMemory

    async def keep(self, metrics: LandedMetrics) -> None:
        """Cache whole blocks of rows; count what that saves, and what it does not."""
        transfer, manifest = self.incoming.transfer, self.manifest
        if not transfer.landed_bytes:
            return
        kept_bytes = 0
        # Whoever sent something that was not what it said is not believed in the rest.
        if not isinstance(transfer.error, (CorruptionError, ProtocolError)):
            row_bytes = manifest.kv_bytes[KvKind.FULL] // (manifest.stop_token - manifest.start_token)
            most = manifest.start_token + MAX_KEPT_BYTES // max(1, row_bytes)
            n_tokens = min(manifest.whole_rows(transfer.landed.__contains__), most)
            if n_tokens > manifest.start_token:
                await asyncio.to_thread(self.prompt.keep, n_tokens, with_state=False)
                kept_bytes = row_bytes * max(0, self.prompt.held_tokens(n_tokens) - manifest.start_token)
        metrics.ended(transfer.landed_bytes, kept_bytes)


class Predecessors:
    """Earlier calls of requests: whoever takes one up waits until what it held has been given back."""

    def __init__(self) -> None:
        self._running: dict[str, set[asyncio.Event]] = {}

    def enter(self, request_id: str) -> asyncio.Event:
        """A call of this request begins."""
        ended = asyncio.Event()
        self._running.setdefault(request_id, set()).add(ended)
        return ended

    def leave(self, request_id: str, ended: asyncio.Event) -> None:
        """It has given everything back."""
        ended.set()
        left = self._running[request_id]
        left.discard(ended)
        if not left:
            del self._running[request_id]

    async def wait(self, request_id: str) -> None:
        """Until the calls of this request that run now have ended, but never long."""
        try:
            async with asyncio.timeout(PREDECESSOR_WITHIN_S):
                for ended in tuple(self._running.get(request_id, ())):
                    await ended.wait()
        except TimeoutError:
            pass  # whoever holds it goes on; then everything is sent
