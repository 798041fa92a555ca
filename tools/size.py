#!/usr/bin/env python3
"""Lines of code by package against the budget: median file under 200 lines, none over 800, functions under 70."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
MAX_FILE, MAX_FUNCTION, MAX_MEDIAN = 800, 70, 200


def functions(tree: ast.AST) -> list[tuple[str, int]]:
    """(name, lines) of every function."""
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in found]


def main() -> None:
    table = Table("package", "files", "lines", "median", "largest file", "longest function")
    for top in ("prfaas_net", "engine", "tests", "tools"):
        rooms: dict[str, list[Path]] = {}
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            rooms.setdefault("/".join(parts[:2]) if len(parts) > 2 else top, []).append(path)
        for room, paths in rooms.items():
            lines = {path: path.read_text(encoding="utf-8").count("\n") for path in paths}
            found = [f for p in paths for f in functions(ast.parse(p.read_text(encoding="utf-8")))]
            found = [f for p in paths for f in functions(ast.parse(p.read_text(encoding="utf-8")))]
            longest = max(found, key=lambda f: f[1], default=("", 0))
            largest = max(paths, key=lambda p: lines[p])
            median = statistics.median(lines.values())
            bad = lines[largest] > MAX_FILE or longest[1] > MAX_FUNCTION or median > MAX_MEDIAN
            table.add_row(
                room, str(len(paths)), str(sum(lines.values())), f"{median:.0f}", f"{largest.name} {lines[largest]}",
                f"{longest[0]} {longest[1]}", style="red" if bad else "",
            )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
