"""A folder of text."""

import pytest


def write_text(folder):
    """Twelve files, so that a quarter of them can be held out."""
    for number in range(12):
        file = folder / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number:02d}" * 12)


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path / "text")
    return tmp_path / "text"
