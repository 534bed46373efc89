"""The Python examples of each page of the documentation run, in a new process: what is imported first may matter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in ROOT.glob("docs/**/*.md")}
PAGES = sorted(page for page, examples in EXAMPLES.items() if examples)


def test_there_are_examples():
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page_run_one_after_the_other(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(EXAMPLES[page]))
    environment = {name: value for name, value in os.environ.items() if name != "LOWBIT_TEST_LIGHTNING"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
