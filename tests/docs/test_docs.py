"""The Python examples of the README and of each page of the documentation run, one after the other."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.tables import each

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("**/*.md"))]
EXAMPLES = {
    str(page.relative_to(DOCS.parent)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in PAGES
}
ALONE = {"docs/guides/lightnings.md"}  # in a process of its own: which Lightning is imported first matters
SLOW = {"docs/guides/pretrained_to_chat.md"}  # a run and two exports by their commands
SHARED = [page for page, examples in EXAMPLES.items() if examples and page not in (*ALONE, "README.md")]


def test_examples_of_the_readme_run_without_a_warning():
    assert EXAMPLES["README.md"]
    for number, example in enumerate(EXAMPLES["README.md"], 1):
        exec(compile(example, f"README.md, example {number}", "exec"), {"__name__": "readme"})


@each("page", sorted(ALONE))
def test_examples_of_a_page_are_python(page):
    assert EXAMPLES[page]
    for number, example in enumerate(EXAMPLES[page], 1):
        compile(example, f"{page}, example {number}", "exec")


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in SHARED])
# They may do what Lightning warns of.
@pytest.mark.filterwarnings("ignore", "error:lightning_lowbit:DeprecationWarning")
@pytest.mark.skipif("LOWBIT_TEST_LIGHTNING" in os.environ, reason="the pages import lightning")
def test_examples_of_a_page_run_one_after_the_other(page, monkeypatch):
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where classes of the examples say that they are
    for number, example in enumerate(EXAMPLES[page], 1):
        exec(compile(example, f"{page}, example {number}", "exec"), vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(ALONE))
def test_examples_of_a_page_run_in_a_new_process(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(EXAMPLES[page]))
    environment = {name: value for name, value in os.environ.items() if name != "LOWBIT_TEST_LIGHTNING"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@each("page", [page for page in PAGES if DOCS in page.parents])
def test_it_is_in_the_navigation(page):
    assert f" {page.relative_to(DOCS)}\n" in (DOCS.parent / "mkdocs.yml").read_text(), "add it to nav in mkdocs.yml"
