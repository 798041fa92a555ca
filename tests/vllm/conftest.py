"""Two servers of each model, shared by all tests of it; what was measured is shown at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.vllm.checkpoints import MODELS, make
from tests.vllm.servers import PYTHON, Client, Pair

# vLLM runs Gated DeltaNet on the CPU in bfloat16 only; its fused rotary kernel is wrong for latent attention there.
ARGUMENTS = {
    "gptoss-swa-sink": ["--dtype", "float32"],
    "qwen3next-gdn-gqa": ["--dtype", "bfloat16"],
    "deepseekv3-mla576": ["--dtype", "float32", "--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'],
}
# Blocks of another size than the decode server's (128): rows are converted on the way.
PREFILL_ARGUMENTS = {"gptoss-swa-sink": ["--block-size", "64"]}
_shown: list[str] = []


@pytest.fixture(scope="session", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode server of one model."""
    assert PYTHON.exists(), "there is no vLLM here: run make test-vllm"
    name, place = str(request.param), tmp_path_factory.mktemp("vllm")
    directory = make(place / name, name)
    servers = Pair.start(name, directory, place, ARGUMENTS[name], PREFILL_ARGUMENTS.get(name, []))
    try:
        servers.wait_ready()
        yield servers
    finally:
        servers.stop()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client.open() as opened:
        yield opened


@pytest.fixture(scope="session")
def show() -> list[str]:
    """Lines for the end of the run."""
    return _shown


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _shown:
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(150))
