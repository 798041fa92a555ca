"""``python -m engine``: verify a checkpoint against an oracle, profile it, or run the benchmark.

Exit status: 0 if all is well, 1 if something does not agree, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from engine.bench.models import BENCH_MODELS
from engine.bench.run import BenchPlan, Row, run_bench
from engine.checkpoint import KV_DTYPES
from engine.engine import Engine
from engine.oracle import load_oracle
from engine.profiling import profile_lengths, profile_model
from engine.verify import verify
from prfaas_net.errors import ConfigError, PrfaasError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except PrfaasError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return 2
    return status


def _verify(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    engine = Engine.load(directory, backend=arguments.backend)
    oracle = load_oracle(arguments.oracle or directory / "oracle.json", engine.vocab_size)
    report = verify(engine, oracle)
    print(orjson.dumps(report.to_json()).decode() if arguments.json else report.to_text())
    return 0 if report.ok else 1


def _profile(arguments: argparse.Namespace) -> int:
    engine = Engine.load(arguments.directory, backend=arguments.backend, kv_dtype=arguments.kv_dtype)
    longest = min(arguments.max_tokens, engine.max_model_tokens - 1)
    profile = profile_model(engine, profile_lengths(longest), arguments.batches, arguments.rounds)
    output: Path = arguments.output or Path(f"{engine.model_name}.profile.json")
    try:
        output.write_bytes(orjson.dumps(profile, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise ConfigError("the profile cannot be written", found=error.strerror, file=output) from error
    if arguments.json:
        print(orjson.dumps(profile).decode())
        return 0
    for point in profile["prefill"]:
        print(f"prefill {point['tokens']:>8} tokens  {1000 * point['seconds']:10.1f} ms")
    for point in profile["decode"]:
        print(f"decode  batch {point['batch']:>3}        {1000 * point['step_seconds']:10.2f} ms a step")
    print(f"written to {output}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    unknown = set(arguments.models) - set(BENCH_MODELS)
    if unknown:
        raise ConfigError("no such model", expected=", ".join(BENCH_MODELS), found=", ".join(sorted(unknown)))
    plan = BenchPlan(
        models=arguments.models or tuple(BENCH_MODELS),
        prefill_tokens=(512, 2048) if arguments.quick else (1024, 4096, 16384),
        decode_batches=(1, 4) if arguments.quick else (1, 4, 16),
        threads=arguments.threads,
        reference_python=arguments.reference_python,
    )

    def told(row: Row) -> None:
        size = f"{row.tokens} tokens" if row.tokens else f"batch {row.batch}"
        ratio = "" if row.over_transformers is None else f"  {row.over_transformers:6.2f}x transformers"
        print(f"{row.model:14} {row.phase:8} {size:>13} {row.tokens_per_s:10.1f} tokens/s{ratio}", file=sys.stderr)

    report = run_bench(plan, told)
    if arguments.json:
        print(orjson.dumps(report).decode())
    else:
        for name, value in (report["prefill_exponent"] | report["mixer_exponent"]).items():
            print(f"time grows with length to the power of {value:.2f}: {name}")
    return 0


def _batches(text: str) -> list[int]:
    """Batch sizes, with commas between them."""
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description="Hybrid-attention models on NumPy or CuPy.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("verify", help="compare the engine with reference outputs")
    command.set_defaults(run=_verify)
    command.add_argument("directory", type=Path, metavar="DIR", help="a Hugging Face checkpoint directory")
    command.add_argument("--oracle", type=Path, metavar="FILE", help="reference outputs (default: DIR/oracle.json)")
    command.add_argument("--backend", default="numpy", help="numpy (default) or cupy")
    command.add_argument("--json", action="store_true", help="print the result as JSON")

    command = commands.add_parser("profile", help="measure prefill, decode and KVCache size for the scheduler")
    command.set_defaults(run=_profile)
    command.add_argument("directory", type=Path, metavar="DIR", help="a Hugging Face checkpoint directory")
    command.add_argument("--output", type=Path, metavar="FILE", help="default: MODEL.profile.json here")
    command.add_argument("--max-tokens", type=int, default=16384, metavar="N", help="longest prompt to measure")
    command.add_argument("--batches", type=_batches, default=[1, 2, 4, 8, 16], metavar="N,N", help="decode batches")
    command.add_argument("--rounds", type=int, default=3, metavar="N", help="each time is the median of so many")
    command.add_argument("--backend", default="numpy", help="numpy (default) or cupy")
    command.add_argument("--kv-dtype", default="float32", help=" or ".join(KV_DTYPES))
    command.add_argument("--json", action="store_true", help="print the profile too")

    command = commands.add_parser("bench", help="speed on random models, beside transformers where it is installed")
    command.set_defaults(run=_bench)
    command.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(BENCH_MODELS)}")
    command.add_argument("--quick", action="store_true", help="shorter prompts and smaller batches")
    command.add_argument("--threads", type=int, default=1, metavar="N", help="of both sides (default 1)")
    command.add_argument("--reference-python", metavar="FILE", help="a Python that has torch and transformers")
    command.add_argument("--json", action="store_true", help="print the report as JSON; progress goes to stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
