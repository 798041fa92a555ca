"""What a serving engine's paged KVCache looks like, said so that another engine can decide whether it can use it.

An engine keeps a layer's state in *pages*, one for each block of its block table. A page is a run of bytes; where its
layout is known it has *parts* (keys, values, latents), each a tensor of (heads, tokens, dim) with strides, so that rows
can be read out of it and written into pages of another shape. A page without parts is opaque: it can be copied whole,
into a page of the very same kind, and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import orjson
import xxhash

from prfaas_net.errors import ProtocolError

__all__ = ["PROTOCOL", "EngineLayout", "GroupLayout", "PageLayout", "PagePart", "StateKind", "digest_of"]

# Version of what two connectors say to each other (the KV stream below has its own). Only equal versions talk.
PROTOCOL = 1


class StateKind(StrEnum):
    """What a group of layers keeps."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class PagePart:
    """One tensor inside a page; strides and offset in bytes.

    Attributes:
        item_bytes: of one element.
    """

    name: str
    offset: int
    heads: int
    dim: int
    item_bytes: int
    head_stride: int
    token_stride: int
    dim_stride: int


@dataclass(frozen=True)
class PageLayout:
    """One block's page of one layer.

    Attributes:
        dtype: name of the elements' type; of an opaque page whatever tells its kind.
        tag: what besides parts and sizes decides how the bytes are to be read, such as the attention backend's name.
    """

    n_bytes: int
    dtype: str
    tag: str
    parts: tuple[PagePart, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Of one token with all heads, in the canonical form: parts one after the other."""
        return sum(part.heads * part.dim * part.item_bytes for part in self.parts)

    def same_rows(self, other: PageLayout) -> bool:
        """Whether both keep the same values for a token and a head, however they lay them out."""

        def rows(page: PageLayout) -> list[tuple[str, int, int]]:
            return [(part.name, part.dim, part.item_bytes) for part in page.parts]

        return bool(self.parts) and self.dtype == other.dtype and rows(self) == rows(other)


@dataclass(frozen=True)
class GroupLayout:
    """Layers that share one block table.

    Attributes:
        block_tokens: tokens of a block; of a ``STATE`` group it means nothing to a transfer.
        window_tokens: of a ``WINDOW`` group; else 0.
        total_heads: KV heads of the whole model, split over the ranks; 0 where every rank holds all of it.
        layers: names, each with the index of its page layout in :attr:`EngineLayout.pages`.
        spare_blocks: of a ``STATE`` group, blocks at the end of a request's table that hold no state.
    """

    kind: StateKind
    block_tokens: int
    window_tokens: int
    total_heads: int
    layers: tuple[tuple[str, int], ...]
    spare_blocks: int = 0


@dataclass(frozen=True)
class EngineLayout:
    """All of one rank's cache.

    Attributes:
        engine: name and version of the serving engine, such as ``vllm 0.32.0``.
        model: a name for people.
        weights: digest of the checkpoint; equal shapes with other weights must not mix.
    """

    engine: str
    model: str
    weights: str
    tp_size: int
    tp_rank: int
    pages: tuple[PageLayout, ...]
    groups: tuple[GroupLayout, ...]
    protocol: int = PROTOCOL

    @cached_property
    def fingerprint(self) -> str:
        """128 bits over everything but the model's name and the rank, as hex."""
        body = asdict(self)
        del body["model"], body["tp_rank"]
        return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))

    @cached_property
    def by_layer(self) -> dict[str, tuple[int, GroupLayout, PageLayout]]:
        """Layer name to (index of its group, group, page)."""
        return {
            name: (index, group, self.pages[page])
            for index, group in enumerate(self.groups)
            for name, page in group.layers
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> EngineLayout:
        """
        Raises:
            ProtocolError: it is not what :meth:`to_json` wrote. A layout of another protocol version keeps its number,
                so that the versions can be compared whatever else has changed.
        """
        try:
            if int(body["protocol"]) != PROTOCOL:
                return cls(str(body.get("engine")), "", "", 1, 0, (), (), int(body["protocol"]))
            pages = tuple(
                PageLayout(**{**page, "parts": tuple(PagePart(**part) for part in page["parts"])})
                for page in body["pages"]
            )
            groups = tuple(
                GroupLayout(
                    **{**group, "kind": StateKind(group["kind"]), "layers": tuple((n, p) for n, p in group["layers"])}
                )
                for group in body["groups"]
            )
            layout = cls(**{**body, "pages": pages, "groups": groups})
            if not 0 <= layout.tp_rank < layout.tp_size or not layout.by_layer:
                raise ValueError("no layers, or a rank that there is not")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError("bad layout of a KVCache", found=f"{type(error).__name__}: {error}"[:200]) from error
        return layout


def digest_of(token_ids: list[int], stop: int, adapter: str = "") -> str:
    """128 bits over the first ``stop`` tokens of a prompt and the adapter it runs under: what a KVCache belongs to."""
    state = xxhash.xxh3_128(adapter.encode())
    state.update(b"".join(token.to_bytes(4, "little") for token in token_ids[:stop]))
    return state.hexdigest()
