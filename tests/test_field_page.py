"""docs/field.md names tests that exist, and every numbered test is on it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_row_of_the_field_page_has_its_test() -> None:
    """Names on the page and names in the files are the same, and a row's tests carry its number."""
    page = (ROOT / "docs" / "field.md").read_text(encoding="utf-8")
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_field_\d\w*)", path.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"`(test_field_\w+)`", page))
    assert named == written
    for line in page.splitlines():
        row = re.match(r"\| (\d+) \|", line)
        for name in re.findall(r"`(test_field_\w+)`", line):
            assert row is not None
            assert name.startswith(f"test_field_{int(row[1]):02d}_")
