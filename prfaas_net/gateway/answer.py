"""From tokens to text: stop strings across token boundaries, one piece for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prfaas_net.errors import ProtocolError
from prfaas_net.gateway.logprobs import Scored
from prfaas_net.gateway.run import Finish, Run, Token
from prfaas_net.nodes.engine_api import TextStream, TokenLogprobs

__all__ = ["Answer", "Piece", "StopMatcher"]


# Tokens of one write; then a client that reads slowly is waited for.
MAX_TOGETHER = 64


class StopMatcher:
    """Passes text on until a stop string appears in it, holding back what might become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string was met (it and what follows are dropped)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """No text follows: what was held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


class Piece(NamedTuple):
    """What one token adds to the answer.

    Attributes:
        token: None for a piece that only ends the answer.
        text: may be empty: half a character, or text held back for a stop string.
        output_tokens: of the answer so far.
        finish_reason: set on the last piece.
        logprobs: of the token, where the request asked for them.
    """

    token: int | None
    text: str
    output_tokens: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def scored(self) -> list[Scored]:
        """The token with its log-probabilities, if there are any."""
        return [] if self.token is None or self.logprobs is None else [(self.token, self.logprobs)]


class Answer:
    """Iterates over the pieces of a run's answer, those together that have come together.

    Args:
        min_tokens: stop strings do not count in the first so many tokens.
    """

    def __init__(self, run: Run, text: TextStream, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._run = run
        self._text = text
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._over = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Piece]:
        """The next pieces: one, and those behind it that need not be waited for.

        Raises:
            PrfaasError: the request failed.
        """
        if self._over:
            raise StopAsyncIteration
        pieces = [await self._next()]
        while self._more_is_here and len(pieces) < MAX_TOGETHER:
            pieces.append(await self._next())
        return pieces

    @property
    def _more_is_here(self) -> bool:
        return not self._over and self._run.next_is_here

    async def _next(self) -> Piece:
        event = await self._run.next()
        if isinstance(event, Finish):
            return self._last(None, "", event.reason, event.output_tokens)
        text, stopped = self._show(self._text.push(event.token), event.index + 1)
        if stopped:
            self._over = True
            self._run.stop()
            self._run.record.finish_reason = "stop"
            return Piece(event.token, text, event.index + 1, "stop", event.logprobs)
        if event.finish is not None and event.index == 0:
            # Nothing will be decoded: neither the client nor we need wait for the KVCache to land.
            self._run.record.finish_reason = event.finish
            return self._last(event, text, event.finish, event.index + 1)
        # The finish event follows the last token at once. Joining the two keeps one chunk a token, which clients
        # count on; a finish that is still on its way gets a piece of its own instead of delaying the token.
        last = event.finish is not None or event.index + 1 >= self._run.request.sampling.max_tokens
        if not last and not self._run.finish_is_here:
            return Piece(event.token, text, event.index + 1, None, event.logprobs)
        finish = await self._run.next()
        if not isinstance(finish, Finish):
            raise ProtocolError("a node sent more tokens than it was asked for", found=finish.index + 1)
        return self._last(event, text, finish.reason, finish.output_tokens)

    def _show(self, text: str, output_tokens: int) -> tuple[str, bool]:
        return (text, False) if output_tokens <= self._min_tokens else self._matcher.push(text)

    def _last(self, token: Token | None, text: str, reason: str, output_tokens: int) -> Piece:
        self._over = True
        tail, stopped = self._matcher.push(self._text.flush())
        if stopped:
            reason = self._run.record.finish_reason = "stop"
        shown = text + tail + self._matcher.flush()
        if token is None:
            return Piece(None, shown, output_tokens, reason)
        return Piece(token.token, shown, output_tokens, reason, token.logprobs)
