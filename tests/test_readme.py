"""The README's Python examples run, its links exist, and its set-up commands are two."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), {"__name__": "readme"})


def test_there_are_exactly_two_set_up_commands():
    commands = re.findall(r"```bash\n(.*?)```", README.split("\n## ")[1], re.DOTALL)
    assert len(commands) == 2
    assert all("-c .ci/constraints.txt" in command for command in commands), "install through the constraints"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "recipes/README.md", *PAGES])
def test_relative_links_exist(page):
    path = ROOT / page
    for link in re.findall(r"\]\((?!http|#)([^)]+)\)", path.read_text()):
        assert (path.parent / link.partition("#")[0]).exists(), f"{page} links to {link}, which does not exist"
