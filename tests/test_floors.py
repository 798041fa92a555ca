"""The house's one rule: imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Floors of docs/architecture.md; a package may import what is on a lower floor, and itself.
FLOORS = {
    "errors": 0, "units": 0, "clock": 0, "config": 0, "metrics": 0, "aio": 0, "logs": 0,
    "tracing": 0,
    "kv": 1, "wire": 2, "congestion": 3, "transport": 4, "cache": 5, "scheduling": 6,
    "nodes": 7, "sim": 8, "connectors": 8, "gateway": 8, "localfleet": 9, "fleetfile": 9, "bench": 9, "doctor": 9,
    "cli": 10,
}  # fmt: skip
# The two pillars: what decides and what moves bytes never import each other.
PILLARS = ({"scheduling", "cache"}, {"transport", "wire"})
# On one floor, but an order among them: a unit's error is an error, a configuration has units.
GROUND = ["errors", "units", "clock", "aio", "metrics", "config", "logs", "tracing"]
# Cores read no clock, socket, thread or random source, and do no I/O.
PURE = ("kv", "wire", "congestion", "scheduling", "cache")
IMPURE = {"asyncio", "socket", "threading", "time", "random", "secrets", "ssl", "subprocess", "aiohttp", "uvloop"}
FILES = [p for package in ("prfaas_net", "engine") for p in sorted((ROOT / package).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, also inside functions; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "prfaas_net" and len(parts) > 1 and parts[1] in FLOORS else None


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_point_down_only(path: Path) -> None:
    """Nothing on a floor knows of the floors above; the pillars do not know each other."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "engine":
        allowed = {"kv", "errors"}
        used = {room_of(name) for name in imports_of(path) if name.startswith("prfaas_net")}
        assert used <= allowed, f"the engine knows {used - allowed}"
        return
    if len(parts) == 2 and parts[1] == "__init__":
        assert not list(imports_of(path))
        return
    here = parts[1]
    assert here in FLOORS, f"{here} has no floor: give it one here and in docs/architecture.md"
    for name in imports_of(path):
        assert not name.startswith("engine") or here == "cli", f"{here} knows the engine: {name}"
        there = room_of(name)
        if there is None or there == here:
            continue
        if FLOORS[here] == FLOORS[there] == 0:
            assert GROUND.index(there) < GROUND.index(here), f"{here} imports {there}"
        else:
            assert FLOORS[there] < FLOORS[here], f"{here} (floor {FLOORS[here]}) imports {there}"
        for ours, theirs in (PILLARS, PILLARS[::-1]):
            assert not (here in ours and there in theirs), f"{here} and {there} are different pillars"


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[len(ROOT.parts) + 1] in PURE], ids=names)
def test_cores_are_pure(path: Path) -> None:
    """No clock, socket, thread, randomness or loop inside a core."""
    # ``Random`` alone is the type of a source that was passed in; what would make one is not allowed.
    roots = {name.split(".")[0] for name in imports_of(path) if name != "random.Random"}
    assert not roots & IMPURE


@pytest.mark.parametrize("path", FILES, ids=names)
def test_files_and_functions_stay_small(path: Path) -> None:
    """No file over 800 lines, no function over 70."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 800
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            assert node.end_lineno - node.lineno < 70, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_nothing_is_unpickled(path: Path) -> None:
    """Bytes from a peer never become code."""
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
