"""Which bytes of a paged KVCache cross, cut into chunks by a rule that both sides follow.

The decode side knows which blocks it needs, so it makes the plan: for each layer the runs of tokens, how they travel
and how large a unit is. The plan goes to the prefill side with the ticket; the chunk table follows from it on both
sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from prfaas_net.connectors.agreement import Form, Share
from prfaas_net.connectors.layout import EngineLayout, StateKind
from prfaas_net.errors import IncompatibleError, ProtocolError
from prfaas_net.kv import MAX_CHUNK_BYTES, ChunkTable

__all__ = ["NULL_BLOCK", "PageChunk", "PagePlan", "Section", "needed_runs", "sections_of", "state_block"]

# vLLM's block 0 holds nothing: it stands where a window has moved on.
NULL_BLOCK = 0
MAX_TOKENS = 1 << 24
MAX_SECTIONS = 1 << 16


@dataclass(frozen=True)
class Section:
    """Layers whose state travels alike.

    Attributes:
        unit_tokens: of a unit: a block (``PAGES``), a token (``ROWS``), 0 (``STATE``).
        unit_bytes: of a unit of one layer.
        runs: tokens that are needed, as [first, last-but-one); of ``STATE`` none.
        heads: of the prefill rank's page; (0, 0): all.
    """

    layers: tuple[str, ...]
    form: Form
    unit_tokens: int
    unit_bytes: int
    runs: tuple[tuple[int, int], ...] = ()
    heads: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PageChunk:
    """A piece of one layer.

    Attributes:
        start: first token; of state the first byte.
        stop: last-but-one token that must have passed the layer before the chunk is final.
    """

    index: int
    section: int
    layer: str
    start: int
    stop: int
    n_bytes: int


@dataclass(frozen=True)
class PagePlan:
    """Everything that one prefill rank sends one decode rank for one request.

    Attributes:
        stop_token: tokens whose state is wanted.
        chunk_tokens, chunk_bytes: the cutting rule.
    """

    stop_token: int
    sections: tuple[Section, ...]
    chunk_tokens: int
    chunk_bytes: int

    @cached_property
    def chunks(self) -> tuple[PageChunk, ...]:
        """In the order in which a chunked prefill completes them, layer after layer."""
        pieces: list[tuple[int, str, int, int, int]] = []
        for index, section in enumerate(self.sections):
            for start, stop, n_bytes in self._cut(section):
                pieces += ((index, layer, start, stop, n_bytes) for layer in section.layers)
        return tuple(PageChunk(index, *piece) for index, piece in enumerate(pieces))

    def _cut(self, section: Section) -> Iterable[tuple[int, int, int]]:
        if section.form is Form.STATE:
            for start in range(0, section.unit_bytes, self.chunk_bytes):
                yield start, self.stop_token, min(self.chunk_bytes, section.unit_bytes - start)
            return
        units = max(1, min(self.chunk_tokens // section.unit_tokens, self.chunk_bytes // section.unit_bytes))
        step = units * section.unit_tokens
        for first, last in section.runs:
            for start in range(first, last, step):
                stop = min(start + step, last)
                yield start, stop, -(-(stop - start) // section.unit_tokens) * section.unit_bytes

    @cached_property
    def table(self) -> ChunkTable:
        return ChunkTable([chunk.n_bytes for chunk in self.chunks])

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> PagePlan:
        """
        Raises:
            ProtocolError: it is not what :meth:`to_json` wrote, or its numbers are out of bounds.
        """
        try:
            sections = tuple(
                Section(
                    layers=tuple(str(name) for name in one["layers"]),
                    form=Form(one["form"]),
                    unit_tokens=int(one["unit_tokens"]),
                    unit_bytes=int(one["unit_bytes"]),
                    runs=tuple((int(a), int(b)) for a, b in one["runs"]),
                    heads=(int(one["heads"][0]), int(one["heads"][1])),
                )
                for one in body["sections"]
            )
            plan = cls(int(body["stop_token"]), sections, int(body["chunk_tokens"]), int(body["chunk_bytes"]))
            sound = 0 < plan.stop_token <= MAX_TOKENS and 0 < len(sections) <= MAX_SECTIONS
            sound = sound and plan.chunk_tokens > 0 and 0 < plan.chunk_bytes <= MAX_CHUNK_BYTES
            for one in sections:
                sound = sound and one.unit_bytes > 0 and (one.unit_tokens > 0 or one.form is Form.STATE)
                sound = sound and all(0 <= a < b <= MAX_TOKENS for a, b in one.runs)
            if not sound:
                raise ValueError("a number is out of bounds")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError("bad plan of a transfer", found=f"{type(error).__name__}: {error}"[:200]) from error
        return plan

    def check(self, ours: EngineLayout) -> None:
        """For the prefill side: the plan reads what our pages have.

        Raises:
            IncompatibleError: it was made for other pages.
        """
        for section in self.sections:
            for layer in section.layers:
                if layer not in ours.by_layer:
                    raise IncompatibleError("the plan names a layer that is not here", found=layer[:80])
                _, group, page = ours.by_layer[layer]
                lo, hi = section.heads
                if section.form is Form.ROWS:
                    size = sum((hi - lo if hi else part.heads) * part.dim * part.item_bytes for part in page.parts)
                    fits = section.unit_tokens == 1 and all(0 <= lo <= hi <= part.heads for part in page.parts)
                else:
                    size, fits = page.n_bytes, (lo, hi) == (0, 0)
                    fits = fits and (section.form is Form.STATE) is (group.kind is StateKind.STATE)
                    fits = fits and (section.form is Form.STATE or section.unit_tokens == group.block_tokens)
                if size != section.unit_bytes or not fits:
                    raise IncompatibleError(
                        f"the plan was made for other pages of {layer}", expected=f"{size} bytes a unit",
                        found=f"{section.unit_bytes}", do="restart the decode server: it holds an old layout of ours",
                    )  # fmt: skip


def needed_runs(blocks: Sequence[int], block_tokens: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Runs of tokens from ``start`` to ``stop`` whose blocks are really there: null blocks are left out.

    Args:
        blocks: a request's block table.
    """
    runs: list[tuple[int, int]] = []
    for position in range(start // block_tokens, -(-stop // block_tokens)):
        if position >= len(blocks) or blocks[position] == NULL_BLOCK:
            continue
        first, last = max(start, position * block_tokens), min(stop, (position + 1) * block_tokens)
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return tuple(runs)


def state_block(blocks: Sequence[int], spare_blocks: int) -> int:
    """The block of a ``STATE`` group that holds the running state; ``NULL_BLOCK`` if there is none."""
    kept = list(blocks[: max(1, len(blocks) - spare_blocks)])
    return kept[-1] if kept else NULL_BLOCK


def sections_of(
    layout: EngineLayout, shares: dict[str, Share], blocks: Sequence[Sequence[int]], start: int, stop: int
) -> tuple[Section, ...]:
    """For the decode side: what it needs of one prefill rank, given its own block table.

    Args:
        layout: the decode rank's own.
        shares: layer name to what the prefill rank gives of it.
        blocks: block table of each group.
        start: tokens whose state is here already; a multiple of every block size.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for layer, share in shares.items():
        index, group, page = layout.by_layer[layer]
        if share.form is Form.STATE:
            key: tuple[Any, ...] = (share.form, 0, page.n_bytes, (), (0, 0))
        else:
            first = start
            if share.form is Form.ROWS and group.window_tokens:
                # Blocks of another size: theirs may hold no more than what the token at ``stop`` still sees.
                first = max(start, stop - group.window_tokens + 1)
            runs = needed_runs(blocks[index], group.block_tokens, first, stop)
            if not runs:
                continue
            lo, hi = share.target_heads
            heads = hi - lo
            row = sum((heads if hi else part.heads) * part.dim * part.item_bytes for part in page.parts)
            pages = share.form is Form.PAGES
            key = (
                share.form, group.block_tokens if pages else 1, page.n_bytes if pages else row, runs, share.source_heads
            )  # fmt: skip
        found.setdefault(key, []).append(layer)
    return tuple(Section(tuple(layers), *key) for key, layers in found.items())
