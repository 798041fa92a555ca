"""What a request and its tokens are, to everything between the HTTP boundary and the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.messages import LogprobsModel

__all__ = ["Finish", "ServingRequest", "Token"]


@dataclass(frozen=True)
class ServingRequest:
    """A request that was understood and tokenized.

    Attributes:
        arrived_s: when it came, on the clock of the gateway.
        deadline_at: when it must have ended, on the event loop's clock.
        seeded: whether the client chose the seed.
        extra: what else it asked of an engine that is not ours, by that engine's names.
        cache_salt: only requests with the same one may share cached state with it.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    arrived_s: float
    deadline_at: float
    cache_salt: str = ""
    seeded: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def must_repeat(self) -> bool:
        """Whether an answer cannot be gone on with from its tokens alone: sampling counts them, or a grammar is at some
        place in them. Elsewhere it is then made once more."""
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty or self.extra)

    @property
    def needs_seed(self) -> bool:
        """Whether an engine must be told the seed: the client chose it, or the answer may have to be made once more.

        Engines draw faster without one, and draw anyhow.
        """
        return self.sampling.temperature > 0 and (self.seeded or self.must_repeat)

    def with_seed_after(self, n_tokens: int) -> ServingRequest:
        """The same, for an engine whose draws depend on the seed and on how many there were before: what goes on there
        after ``n_tokens`` of the answer must not repeat the first ones."""
        if not n_tokens:
            return self
        return replace(self, sampling=replace(self.sampling, seed=(self.sampling.seed + n_tokens) % (1 << 64)))


@dataclass(slots=True)
class Token:
    """One token of the answer.

    Attributes:
        index: counts from 0.
        finish: why it is the last one, where the node said so along with it.
        logprobs: where the request asked for them.
    """

    token: int
    index: int
    finish: str | None = None
    logprobs: LogprobsModel | None = None


@dataclass(frozen=True)
class Finish:
    """The answer is complete."""

    reason: str
    output_tokens: int
