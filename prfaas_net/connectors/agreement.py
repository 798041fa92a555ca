"""Whether a decode rank can use a prefill engine's KVCache, and from which of its ranks which heads come.

Equal pages are copied as they are. Where only the block size, the order inside a page or the split of heads over ranks
differs, rows are read out and written anew. Everything else is refused, with what differs and what to change.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from prfaas_net.connectors.layout import EngineLayout, GroupLayout, PageLayout, StateKind
from prfaas_net.errors import IncompatibleError

__all__ = ["Agreement", "Form", "Share", "agree", "heads_of"]


class Form(StrEnum):
    """How a layer's state travels."""

    PAGES = "pages"
    ROWS = "rows"
    STATE = "state"


@dataclass(frozen=True)
class Share:
    """What one prefill rank gives one decode rank of one layer.

    Attributes:
        source_heads: first and last-but-one head, counted in the prefill rank's page; (0, 0): all.
        target_heads: the same in the decode rank's page.
    """

    form: Form
    source_heads: tuple[int, int] = (0, 0)
    target_heads: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Agreement:
    """Who sends what.

    Attributes:
        shares: prefill rank to layer name to share.
        claims: how many decode ranks each prefill rank has to serve before it may let go; 0 where nobody needs it.
    """

    shares: dict[int, dict[str, Share]]
    claims: tuple[int, ...]


def heads_of(total_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """Which KV heads a rank holds: an even split, or one head on several ranks when there are more ranks than heads."""
    if tp_size <= total_heads:
        each = total_heads // tp_size
        return rank * each, (rank + 1) * each
    head = rank * total_heads // tp_size
    return head, head + 1


def _sources(group: GroupLayout, tp: tuple[int, int], rank: int) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Prefill ranks that a decode rank needs for a group, with heads in their page and in its own.

    Args:
        tp: ranks of the prefill side and of the decode side.
    """
    theirs, ours = tp
    total = group.total_heads
    if total == 0 or theirs == ours:
        return {rank * theirs // ours: ((0, 0), (0, 0))}
    first, last = heads_of(total, ours, rank)
    found: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
    for head in range(first, last):
        # Of several ranks that hold the same head, decode ranks take different ones.
        copies = max(1, theirs // total)
        source = (head * copies + rank % copies) if theirs > total else head // (total // theirs)
        begins = heads_of(total, theirs, source)[0]
        (source_first, _), (target_first, _) = found.get(source, ((head - begins, 0), (head - first, 0)))
        found[source] = ((source_first, head - begins + 1), (target_first, head - first + 1))
    return found


def agree(ours: EngineLayout, theirs: EngineLayout) -> Agreement:
    """What a decode rank takes from the ranks of a prefill engine.

    Args:
        ours: the decode rank's own.
        theirs: that of any one rank of the prefill engine; all its ranks are alike.

    Raises:
        IncompatibleError: it cannot be done; names what differs, both values, and what to change.
    """
    _check_engines(ours, theirs)
    tp = (theirs.tp_size, ours.tp_size)
    shares: dict[int, dict[str, Share]] = defaultdict(dict)
    claims = [set[int]() for _ in range(theirs.tp_size)]
    for name, (_, group, page) in ours.by_layer.items():
        _, their_group, their_page = theirs.by_layer[name]
        form = _form(name, (group, page), (their_group, their_page), tp)
        for source, (source_heads, target_heads) in _sources(group, tp, ours.tp_rank).items():
            shares[source][name] = Share(form, source_heads, target_heads)
        for rank in range(ours.tp_size):
            for source in _sources(group, tp, rank):
                claims[source].add(rank)
    return Agreement(dict(shares), tuple(len(ranks) for ranks in claims))


def _check_engines(ours: EngineLayout, theirs: EngineLayout) -> None:
    if ours.protocol != theirs.protocol:
        raise IncompatibleError(
            "the two connectors speak different versions", expected=ours.protocol, found=theirs.protocol,
            do="run the same version of prfaas-net on both sides",
        )  # fmt: skip
    if ours.weights != theirs.weights:
        raise IncompatibleError(
            "the prefill server runs another model", expected=f"{ours.model} (weights {ours.weights})",
            found=f"{theirs.model} (weights {theirs.weights})",
            do="serve the same checkpoint with the same dtype on both sides",
        )  # fmt: skip
    if ours.engine != theirs.engine:
        raise IncompatibleError(
            "the two servers run different engines", expected=ours.engine, found=theirs.engine,
            do="install the same version on both sides: its cache may mean something else in another one",
        )  # fmt: skip
    if set(ours.by_layer) != set(theirs.by_layer):
        differing = sorted(set(ours.by_layer) ^ set(theirs.by_layer))
        raise IncompatibleError(
            "the two servers cache different layers", expected=f"{len(ours.by_layer)} layers",
            found=f"{len(theirs.by_layer)}; {differing[0]} is on one side only",
            do="start both with the same model settings (speculative decoding included)",
        )  # fmt: skip


def _form(
    name: str, ours: tuple[GroupLayout, PageLayout], theirs: tuple[GroupLayout, PageLayout], tp: tuple[int, int]
) -> Form:
    (group, page), (their_group, their_page) = ours, theirs
    kinds = [(one.kind, one.window_tokens, one.total_heads) for one in (group, their_group)]
    if kinds[0] != kinds[1]:
        raise IncompatibleError(
            f"layer {name} is of another kind there", expected=kinds[0], found=kinds[1], do="serve the same model"
        )
    if page.dtype != their_page.dtype:
        raise IncompatibleError(
            f"layer {name} is kept in another type", expected=page.dtype, found=their_page.dtype,
            do="give both servers the same --dtype and --kv-cache-dtype",
        )  # fmt: skip
    if group.kind is StateKind.STATE:
        if tp[0] != tp[1]:
            raise IncompatibleError(
                "recurrent state cannot be split or merged over ranks", expected=f"tensor parallel {tp[1]}",
                found=f"{tp[0]} on the prefill side", do="give both servers the same --tensor-parallel-size",
            )  # fmt: skip
        if page != their_page:
            raise IncompatibleError(
                f"the recurrent state of {name} lies differently there", expected=_describe(page),
                found=_describe(their_page), do="set VLLM_SSM_CONV_STATE_LAYOUT alike on both sides",
            )  # fmt: skip
        return Form.STATE
    if page == their_page and group.block_tokens == their_group.block_tokens and (tp[0] == tp[1] or not kinds[0][2]):
        return Form.PAGES
    if not page.same_rows(their_page):
        raise IncompatibleError(
            f"the pages of {name} cannot be converted",
            expected=f"blocks of {group.block_tokens} tokens, {_describe(page)}",
            found=f"blocks of {their_group.block_tokens} tokens, {_describe(their_page)}",
            do="give both servers the same --block-size, attention backend and --tensor-parallel-size",
        )
    if kinds[0][2] and any(kinds[0][2] % size and size % kinds[0][2] for size in tp):
        raise IncompatibleError(
            f"the heads of {name} cannot be shared out evenly", expected=f"a divisor or multiple of {kinds[0][2]}",
            found=f"{tp[0]} and {tp[1]} ranks", do="change --tensor-parallel-size",
        )  # fmt: skip
    return Form.ROWS


def _describe(page: PageLayout) -> str:
    parts = ", ".join(f"{p.name} {p.heads}x{p.dim}" for p in page.parts) or "opaque"
    return f"{page.n_bytes} bytes {page.tag} ({parts})"
