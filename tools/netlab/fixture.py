"""The laboratory as pytest fixtures. In the top ``conftest.py``: ``pytest_plugins = ["tools.netlab.fixture"]``; in one
further down, import them.

Where there can be no laboratory, tests that ask for one are skipped, and the summary counts them with the reason. With
``NETLAB_REQUIRED=1`` in the environment they fail instead: for CI, which must not pass because nothing was tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from prfaas_net.errors import PrfaasError
from tools.netlab.choosing import choose, why_not
from tools.netlab.link import Link, link

__all__ = ["REQUIRED", "LinkFactory", "make_link", "need_laboratory", "netlab_link", "waiting_links"]

REQUIRED = "NETLAB_REQUIRED"
_SKIPPED = "no laboratory: "
# Backends that tests of this run have asked for.
_used: set[str] = set()

LinkFactory = Callable[..., Link]


def need_laboratory() -> None:
    """Skip the test, or fail it if the environment says that it must run."""
    reason = why_not()
    if reason is None:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"{_SKIPPED}{reason}; {REQUIRED} is set", pytrace=False)
    pytest.skip(_SKIPPED + reason)


@pytest.fixture(scope="session")
def waiting_links() -> Iterator[dict[str, Link]]:
    """Links that wait to be used again: User Mode Linux takes seconds to boot."""
    with ExitStack() as stack:
        yield _Links(stack)


class _Links(dict[str, Link]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, backend: str) -> Link:
        made: AbstractContextManager[Link] = link(backend=backend)
        self[backend] = self._stack.enter_context(made)
        return self[backend]


@pytest.fixture
def netlab_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """A link without any impairment, on the backend of this machine's choice; or on the one that the test is
    parametrized with (``@pytest.mark.parametrize("netlab_link", ["tun"], indirect=True)``)."""
    need_laboratory()
    links: dict[str, Link] = request.getfixturevalue("waiting_links")
    name = choose(getattr(request, "param", None)).name
    _used.add(name)
    try:
        links[name].reset()
    except PrfaasError:
        # An earlier test has broken it: that is no reason to fail this one.
        links.pop(name).close()
    yield links[name]
    links[name].end_processes()


@pytest.fixture
def make_link() -> Iterator[LinkFactory]:
    """Makes links as :func:`tools.netlab.link` does; all are gone when the test ends."""
    need_laboratory()
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(link(**settings))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which backend was used, and how many tests were skipped for want of one."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _SKIPPED in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"netlab: {len(skipped)} tests skipped: {_SKIPPED}{why_not()}")
    if _used:
        terminalreporter.write_line(f"{choose().line()}; used: {', '.join(sorted(_used))}")
