"""Talking to the process that runs transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from prfaas_net.errors import ConfigError

__all__ = ["Transformers", "start_transformers"]


class Transformers:
    """A process that runs transformers; use as a context manager.

    Attributes:
        versions: of torch and transformers.
    """

    def __init__(self, python: str, threads: int) -> None:
        worker = str(Path(__file__).with_name("transformers_worker.py"))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict.fromkeys(names, str(threads))
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [python, worker, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self.versions = self._read()

    def __enter__(self) -> Transformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def load(self, directory: Path) -> None:
        """Take up a checkpoint.

        Raises:
            ConfigError: it cannot.
        """
        self._ask({"do": "load", "directory": str(directory)})

    def prefill(self, tokens: int) -> float:
        """Seconds of one prompt."""
        return float(self._ask({"do": "prefill", "tokens": tokens})["seconds"])

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds of some steps of a batch of sequences of equal length."""
        command = {"do": "decode", "batch": batch, "context": context, "steps": steps, "cache": self._cache_name}
        return float(self._ask(command)["seconds"])

    @property
    def _cache_name(self) -> str:
        major, minor = (int(part) for part in self.versions["transformers"].split(".")[:2])
        return "cache" if (major, minor) >= (5, 20) else "past_key_values"

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(command) + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = orjson.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise ConfigError("transformers could not do it", found=answer["error"])
        return answer


def start_transformers(python: str | None, threads: int) -> Transformers | None:
    """The process, in the given Python or this one; None if it has no transformers and none was asked for.

    Raises:
        ConfigError: the Python that was asked for cannot run it.
    """
    try:
        return Transformers(python or sys.executable, threads)
    except (OSError, ConfigError) as error:
        if python is None:
            return None
        raise ConfigError(
            "this Python cannot run transformers", found=error, do="install torch and transformers in it", file=python
        ) from error
