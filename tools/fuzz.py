#!/usr/bin/env python3
"""Fuzz everything that reads bytes of a peer, for as long as one likes.

    python tools/fuzz.py --minutes 10 [--target receiving] [--seed 1]

The targets are those of tests/wire/fuzzing.py, the inputs mutations of honest streams, of the corpus and of whatever
reached new lines of the wire package before. A finding is printed with its traceback, written to tests/wire/corpus/
(where the tests run it from then on), and makes the exit code 1. Where atheris is installed, ``--atheris TARGET`` runs
its engine on one target instead.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType as CodeFrame
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.wire.fuzzing import TARGETS, honest_streams, mutate  # noqa: E402

CORPUS = ROOT / "tests" / "wire" / "corpus"
WIRE = str(ROOT / "prfaas_net" / "wire")
# Of each target's inputs that reached something new, so many are kept for mutation.
MAX_POOL = 400
MAX_INPUT_BYTES = 8_000
# One input in so many is watched for the lines it reaches; watching makes it ten times slower.
WATCH_EVERY = 12


class Coverage:
    """Lines of the wire package that any input has reached."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._now: set[tuple[str, int]] = set()

    def _trace(self, frame: CodeFrame, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WIRE):
            return None
        if event == "line":
            self._now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace

    def run(self, target: Callable[[bytes], None], data: bytes) -> bool:
        """Run, and say whether something new was reached."""
        self._now = set()
        sys.settrace(self._trace)
        try:
            target(data)
        finally:
            sys.settrace(None)
            new = self._now - self.lines
            self.lines |= self._now
        return bool(new)


def blur(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, and put in; no notion of frames."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << draw.randrange(8)
            case 1:
                del out[at : at + draw.randrange(1, 80)]
            case 2:
                out[at:at] = draw.randbytes(draw.randrange(1, 80))
            case 3:
                out[at:at] = out[at : at + draw.randrange(1, 200)]
            case _:
                out[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x80", b'"}]:[{,"'))
    return bytes(out[:MAX_INPUT_BYTES])


def next_input(pool: list[bytes], stream: str | None, draw: random.Random) -> bytes:
    chosen = draw.random()
    if chosen < 0.05:
        return draw.randbytes(draw.randrange(300))
    if stream is not None and chosen < 0.7:
        return mutate(draw.choice([honest_streams()[stream], honest_streams()[stream], draw.choice(pool)]), draw)
    return blur(draw.choice(pool), draw)


def seeds(name: str, stream: str | None) -> list[bytes]:
    honest = list(honest_streams().values())
    bodies = [frame[frame.index(b"{") :] for frame in honest if b"{" in frame]
    known = [path.read_bytes() for path in sorted(CORPUS.glob(f"{name}-*.bin"))]
    return [honest_streams()[stream] if stream else b"{}", b"", *known, *(bodies if name == "bodies" else [])]


def report(name: str, data: bytes) -> None:
    """A finding, kept for the tests."""
    traceback.print_exc()
    CORPUS.mkdir(exist_ok=True)
    path = CORPUS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    print(f"FOUND: {name}, {len(data)} bytes, written to {path.relative_to(ROOT)}", flush=True)


def fuzz(names: list[str], *, seconds: float, seed: int) -> int:
    """Round robin over the targets; returns the number of findings."""
    draw = random.Random(seed)
    coverage = Coverage()
    pools = {name: seeds(name, TARGETS[name][1]) for name in names}
    runs = dict.fromkeys(names, 0)
    found = 0
    started = told = time.monotonic()
    while time.monotonic() - started < seconds:
        for name in names:
            target, stream = TARGETS[name]
            data = next_input(pools[name], stream, draw)
            runs[name] += 1
            try:
                if runs[name] % WATCH_EVERY:
                    target(data)
                elif coverage.run(target, data):
                    pools[name].append(data)
                    del pools[name][3 : 3 + max(0, len(pools[name]) - MAX_POOL)]
            except Exception:
                found += 1
                report(name, data)
        if time.monotonic() - told >= 30:
            told = time.monotonic()
            print(
                f"{told - started:5.0f} s, {sum(runs.values())} runs, {len(coverage.lines)} lines, {found} found",
                flush=True,
            )
    print(f"{sum(runs.values())} runs in {seconds:.0f} s: {runs}; {len(coverage.lines)} lines reached; {found} found")
    return found


def with_atheris(name: str) -> None:
    """Hand one target over to libFuzzer; does not return."""
    atheris = importlib.import_module("atheris")
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], str(CORPUS)], TARGETS[name][0])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--atheris", choices=TARGETS, metavar="TARGET", help="run this target under atheris")
    args = parser.parse_args()
    if args.atheris:
        with_atheris(args.atheris)
    print(f"seed {args.seed}", flush=True)
    return int(fuzz(args.target or list(TARGETS), seconds=args.minutes * 60, seed=args.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
