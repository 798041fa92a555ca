"""Plots: drawn where matplotlib is, refused with a hint where it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.sim.compare import cells, compare
from prfaas_net.sim.plots import draw


def test_plots_are_drawn_or_what_is_missing_is_said(tmp_path: Path) -> None:
    """Four files, none empty."""
    todo = cells(["paper"], ["drop"], [0.5], ["threshold"], requests=60)
    report = compare(todo)
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match=r"prfaas-net\[plots\]"):
            draw(todo, tmp_path, report)
    else:
        paths = draw(todo, tmp_path, report)
        assert len(paths) == 4 and all(path.stat().st_size > 1000 for path in paths)
