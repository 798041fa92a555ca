"""What an engine's scheduler tells its workers each step: plain data that can be pickled by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Blocks", "HoldOrder", "LoadOrder", "PrefillOrder", "ReleaseOrder", "StepOrders"]

# Block table of a request: one list of block numbers for each group.
Blocks = tuple[list[int], ...]


@dataclass(frozen=True)
class LoadOrder:
    """Take a prompt's KVCache from a prefill server.

    Attributes:
        request_id: the engine's own; never leaves it.
        start: tokens whose state is here already.
        stop: tokens whose state is wanted.
        digest: of those tokens.
        refusal: why it cannot be done at all, known before it was tried.
    """

    request_id: str
    transfer_id: str
    host: str
    port: int
    blocks: Blocks
    start: int
    stop: int
    digest: str
    deadline_s: float
    refusal: str = ""


@dataclass(frozen=True)
class ReleaseOrder:
    """Nothing of this prompt is needed from the prefill server: it may let go."""

    transfer_id: str
    host: str
    port: int
    deadline_s: float


@dataclass(frozen=True)
class PrefillOrder:
    """A prompt that is run in this step and whose KVCache will be asked for.

    Attributes:
        before: tokens that had passed every layer when the step began.
        after: when it will have ended.
        stop: tokens whose state will be asked for.
    """

    request_id: str
    transfer_id: str
    blocks: Blocks
    before: int
    after: int
    stop: int
    digest: str


@dataclass(frozen=True)
class HoldOrder:
    """The prompt has finished; its blocks stay until the KVCache has been taken or the deadline passes."""

    request_id: str
    deadline_s: float


@dataclass
class StepOrders:
    """One step's.

    Attributes:
        preempted: prompts whose blocks are no longer theirs, and which will begin again.
        dropped: prompts that were given up.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    releases: list[ReleaseOrder] = field(default_factory=list)
    prefills: list[PrefillOrder] = field(default_factory=list)
    holds: list[HoldOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
