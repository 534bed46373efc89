"""A tiny text and recipe in the current folder of each test."""

from pathlib import Path

import pytest

from tests.cli.run.commands import TINY


@pytest.fixture(autouse=True)
def tiny_text_and_recipe(tmp_path):
    Path("text").mkdir()
    Path("text/a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)
