"""The rows of one pass through the layers, and where in their sequences they stand.

A pass takes consecutive tokens of one sequence (prefill), or one token of each of several sequences (a decode
step of a batch). Everything that treats tokens alone - projections, norms, MLPs - runs over all rows at once;
what mixes tokens goes span by span.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.backend import Array, Backend

__all__ = ["Rows", "Span", "Tables"]


class Tables(Protocol):
    """Something that depends on positions alone, and so is the same for every layer of its kind."""

    @property
    def key(self) -> Hashable: ...

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Two arrays with one entry a row, from positions [rows] (float32)."""
        ...


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence.

    Attributes:
        first_row: of the pass.
        n_rows: how many tokens.
        start: the first one's place in its sequence.
    """

    first_row: int
    n_rows: int
    start: int

    @property
    def stop(self) -> int:
        """Place after the last token."""
        return self.start + self.n_rows

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.n_rows)


class Rows:
    """Which tokens of which sequences a pass takes.

    Args:
        spans: (start, number of tokens) of each sequence, in the order of the rows.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], backend: Backend) -> None:
        self.spans: list[Span] = []
        first = 0
        for start, n_rows in spans:
            self.spans.append(Span(first, n_rows, start))
            first += n_rows
        self.n_rows = first
        # One token each: what is per sequence can be stacked.
        self.is_step = first == len(self.spans)
        places = [np.arange(span.start, span.stop, dtype=np.float32) for span in self.spans]
        self._positions = backend.from_host(places[0] if len(places) == 1 else np.concatenate(places))
        self._tables: dict[Hashable, tuple[Array, Array]] = {}

    def tables(self, source: Tables) -> tuple[Array, Array]:
        """The tables of all rows, made once a pass."""
        found = self._tables.get(source.key)
        if found is None:
            found = self._tables[source.key] = source.tables(self._positions)
        return found
