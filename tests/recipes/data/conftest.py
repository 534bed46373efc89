"""A folder of text."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve files, so that a quarter of them can be held out."""
    for number in range(12):
        file = tmp_path / "text" / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number:02d}" * 12)
    return tmp_path / "text"
