"""A tiny text and recipe in the current folder of each test."""

import pytest

from tests.cli.run.commands import write_tiny


@pytest.fixture(autouse=True)
def _files(tmp_path):
    write_tiny(default_root_dir="runs/tiny")
