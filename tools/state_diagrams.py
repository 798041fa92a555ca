#!/usr/bin/env python3
"""Draw the protocol's state machines from the tables that the code runs on.

    python tools/state_diagrams.py            # rewrite the diagrams in docs/protocol.md
    python tools/state_diagrams.py --check    # exit 1 if they are out of date

The diagrams are Mermaid, which GitHub and most documentation tools render. What a table cannot show: a receiver
takes FINISH by itself, once it is sealed and every chunk has landed; FAIL stands for aborts of either side,
deadlines, stalls and lost links alike.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from prfaas_net.wire.states import TABLES

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
BEGIN, END = "<!-- diagrams: begin -->", "<!-- diagrams: end -->"


def diagram(name: str, table: dict[Any, dict[Any, Any]]) -> str:
    """One machine as a Mermaid state diagram; events that lead to the same state share an arrow."""
    ids = {state: state.value.replace("-", "_") for state in table}
    lines = [f"**{name}**", "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {ids[state]}: {state.value}" for state in table if "-" in state.value]
    targets = {target for row in table.values() for target in row.values()}
    starts = [state for state in table if state not in targets] or [next(iter(table))]
    lines += [f"    [*] --> {ids[start]}" for start in starts if table[start]]
    for state, row in table.items():
        arrows: dict[Any, list[str]] = {}
        for event, target in row.items():
            arrows.setdefault(target, []).append(event.value)
        lines += [f"    {ids[state]} --> {ids[target]}: {', '.join(events)}" for target, events in arrows.items()]
        if not row:
            lines.append(f"    {ids[state]} --> [*]")
    return "\n".join([*lines, "```"])


def render(page: str) -> str:
    """The page with its diagrams drawn anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    drawn = "\n\n".join(diagram(name, table) for name, table in TABLES.items())  # type: ignore[arg-type]
    return f"{head}{BEGIN}\n\n{drawn}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    drawn = render(page)
    if args.check:
        print("up to date" if drawn == page else "out of date: run tools/state_diagrams.py")
        return int(drawn != page)
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
