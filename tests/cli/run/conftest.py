"""A tiny text and recipe in the current folder of each test."""

import pytest

from tests.cli.run.commands import write_tiny


@pytest.fixture(autouse=True)
def tiny_text_and_recipe(tmp_path):
    write_tiny()
