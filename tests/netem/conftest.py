"""Links of the laboratory, scenarios played on them, and what a busy machine does to both.

A machine that stands still for 50 ms *is* a queue of 50 ms. So the laboratory runs ahead of what else this machine
does, and a test that failed while it stood still nevertheless is played once more, said aloud.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator

import pytest

from tests.netem.stalls import Stalls
from tools.netlab import Link
from tools.netlab.fixture import make_link, netlab_link, pytest_terminal_summary, waiting_links
from tools.netlab.play import Played, play
from tools.netlab.scenario import load_scenario, set_up

__all__ = ["PlayedOnce", "make_link", "netlab_link", "played", "pytest_terminal_summary", "waiting_links"]

PlayedOnce = Callable[[str], Played]
# Ahead of ordinary work. The tests' own process, and with it everything that they start.
_NICE = -10
_played: dict[str, Played] = {}


@pytest.fixture
def played(netlab_link: Link) -> PlayedOnce:
    """A scenario by its name, played with its own traffic; once for all tests that look at it."""

    def once(name: str) -> Played:
        if name not in _played:
            with set_up(load_scenario(name), on=netlab_link) as stage:
                _played[name] = play(stage)
        return _played[name]

    return once


def _go_ahead() -> None:
    with contextlib.suppress(OSError):  # without the right to it things go on as they are
        os.nice(_NICE - os.getpriority(os.PRIO_PROCESS, 0))


def _say(config: pytest.Config, line: str) -> None:
    plugins = config.pluginmanager
    reporter, capture = (plugins.get_plugin(name) for name in ("terminalreporter", "capturemanager"))
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        if reporter is not None:
            reporter.write_line(f"\nnetem: {line}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Once more, if the machine stood still and the test failed."""
    if pyfuncitem.get_closest_marker("netem") is None or getattr(pyfuncitem, "again", False):
        return (yield)
    _go_ahead()
    with Stalls() as stalls:
        try:
            return (yield)
        except Exception as error:
            if not stalls.serious:
                raise
            reason = str(error).split("\n")[0] or type(error).__name__
    _say(pyfuncitem.config, f"{pyfuncitem.name} once more: the machine stood still {stalls.line()} ({reason})")
    _played.clear()
    used = pyfuncitem.funcargs.get("netlab_link")
    if isinstance(used, Link):
        used.reset()
    pyfuncitem.again = True  # type: ignore[attr-defined]
    return pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem)
