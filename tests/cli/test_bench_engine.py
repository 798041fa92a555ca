"""``prfaas bench engine``: the engine's own benchmark, under the product's command."""

from __future__ import annotations

from tests.cli.test_cli import prfaas


def test_a_model_that_is_not_there_is_one_line() -> None:
    """Named, with those there are; status 2."""
    done = prfaas("bench", "engine", "gpt-9")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no such model; expected kda-mla, ")
    assert done.stderr.count("\n") == 1
