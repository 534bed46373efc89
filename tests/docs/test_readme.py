"""The READMEs are short, the README's example runs, its set-up commands are two, and links between pages exist."""

import re
from pathlib import Path

from tests.tables import each

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_its_examples_run():
    assert EXAMPLES
    for number, example in enumerate(EXAMPLES, 1):
        exec(compile(example, f"README.md, example {number}", "exec"), {"__name__": "readme"})


def test_there_are_exactly_two_set_up_commands():
    commands = re.findall(r"```bash\n(.*?)```", README.split("\n## ")[1], re.DOTALL)
    assert len(commands) == 2
    assert all("-c .ci/constraints.txt" in command for command in commands), "install through the constraints"


@each("page, most", [("README.md", 8192), ("recipes/README.md", 10240)])
def test_it_is_short(page, most):
    assert (ROOT / page).stat().st_size <= most, f"{page} has more than {most} bytes: move something to docs/"


@each("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "recipes/README.md", *PAGES])
def test_relative_links_exist(page):
    path = ROOT / page
    for link in re.findall(r"\]\((?!http|#)([^)]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{page} links to {link}, and {file} has no such heading"


def headings(page):
    """The anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}
