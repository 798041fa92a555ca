"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_net.errors import PrfaasError
from prfaas_net.wire.frames import HEADER_BYTES, FrameType
from tests.test_ground import LEAVES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_diagrams_are_those_of_the_tables() -> None:
    """docs/protocol.md is regenerated whenever a table changes."""
    command = [sys.executable, str(ROOT / "tools" / "state_diagrams.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert result.returncode == 0, result.stdout


def test_every_frame_type_and_error_code_is_specified() -> None:
    """The tables of docs/protocol.md have each number beside its name."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    for kind in FrameType:
        assert re.search(rf"\| {kind.value} \| `{kind.name}` \|", page), kind
    for leaf in LEAVES:
        assert issubclass(leaf, PrfaasError)
        assert f"| {leaf.code} | `{leaf.__name__}` |" in page
    assert f"a header of {HEADER_BYTES} bytes" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file of the repository."""
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
