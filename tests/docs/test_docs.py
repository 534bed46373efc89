"""The Python examples of each page of the documentation run, one after the other in a namespace of their own."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.tables import each

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {
    str(page.relative_to(DOCS)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in sorted(DOCS.glob("**/*.md"))
}
ALONE = {"guides/lightnings.md"}  # in a process of its own: which Lightning is imported first matters
SLOW = {"guides/pretrained_to_chat.md"}  # a run and two exports by their commands
SHARED = [page for page, examples in EXAMPLES.items() if examples and page not in ALONE]


@each("page", sorted(ALONE))
def test_examples_of_a_page_are_python(page):
    assert EXAMPLES[page] and SHARED
    for number, example in enumerate(EXAMPLES[page], 1):
        compile(example, f"docs/{page}, example {number}", "exec")


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in SHARED])
# They may do what Lightning warns of.
@pytest.mark.filterwarnings("ignore", "error:lightning_lowbit:DeprecationWarning")
@pytest.mark.skipif("LOWBIT_TEST_LIGHTNING" in os.environ, reason="the pages import lightning")
def test_examples_of_a_page_run_one_after_the_other(page, monkeypatch):
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where classes of the examples say that they are
    for number, example in enumerate(EXAMPLES[page], 1):
        exec(compile(example, f"docs/{page}, example {number}", "exec"), vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(ALONE))
def test_examples_of_a_page_run_in_a_new_process(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(EXAMPLES[page]))
    environment = {name: value for name, value in os.environ.items() if name != "LOWBIT_TEST_LIGHTNING"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@each("page", EXAMPLES)
def test_it_is_in_the_navigation(page):
    assert f" {page}\n" in (DOCS.parent / "mkdocs.yml").read_text(), f"add {page} to nav in mkdocs.yml"
