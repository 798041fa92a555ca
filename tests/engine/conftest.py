"""Engines that many tests share: they hold weights and no state."""

from __future__ import annotations

from pathlib import Path

import pytest

import prfaas_net
from engine import Engine
from tests.engine.checkpoints import RECIPES, write_checkpoint


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The demo model that the package carries."""
    return Path(prfaas_net.__file__).parent / "data" / "demo_model"


@pytest.fixture(scope="session")
def demo(demo_directory: Path) -> Engine:
    """The demo model's engine."""
    return Engine.load(demo_directory)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of every family's random checkpoint. Read only."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(root / family, family) for family in RECIPES}


@pytest.fixture(params=sorted(RECIPES))
def directory(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    """Each family's random checkpoint in turn."""
    return checkpoints[request.param]


@pytest.fixture
def engine(directory: Path) -> Engine:
    """Each family's engine in turn, with chunks of 32 tokens: short prompts take several."""
    return Engine.load(directory, prefill_chunk_tokens=32)
