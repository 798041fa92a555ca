"""``python -m engine verify DIR``: does the engine compute what the checkpoint's oracle says?

Exit status: 0 if all agrees, 1 if something does not, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from engine.engine import Engine
from engine.oracle import load_oracle
from engine.verify import verify
from prfaas_net.errors import PrfaasError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    arguments = _parser().parse_args(argv)
    directory: Path = arguments.directory
    try:
        engine = Engine.load(directory, backend=arguments.backend)
        oracle = load_oracle(arguments.oracle or directory / "oracle.json", engine.vocab_size)
        report = verify(engine, oracle)
    except PrfaasError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return 2
    print(orjson.dumps(report.to_json()).decode() if arguments.json else report.to_text())
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description="Hybrid-attention models on NumPy or CuPy.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "verify", help="compare the engine with reference outputs", description="Compare the engine with an oracle."
    )
    command.add_argument("directory", type=Path, metavar="DIR", help="a Hugging Face checkpoint directory")
    command.add_argument("--oracle", type=Path, metavar="FILE", help="reference outputs (default: DIR/oracle.json)")
    command.add_argument("--backend", default="numpy", help="numpy (default) or cupy")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
