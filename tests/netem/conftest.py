"""Links of the laboratory, and scenarios played on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.netlab import Link
from tools.netlab.fixture import make_link, netlab_link, pytest_terminal_summary, waiting_links
from tools.netlab.play import Played, play
from tools.netlab.scenario import load_scenario, set_up

__all__ = ["PlayedOnce", "make_link", "netlab_link", "played", "pytest_terminal_summary", "waiting_links"]

PlayedOnce = Callable[[str], Played]


@pytest.fixture(scope="session")
def _played() -> dict[str, Played]:
    return {}


@pytest.fixture
def played(netlab_link: Link, _played: dict[str, Played]) -> PlayedOnce:
    """A scenario by its name, played with its own traffic; once for all tests that look at it."""

    def once(name: str) -> Played:
        if name not in _played:
            with set_up(load_scenario(name), on=netlab_link) as stage:
                _played[name] = play(stage)
        return _played[name]

    return once
