"""Pages stay short, their tables narrow, and those for newcomers in plain sentences."""

import re
from pathlib import Path

from tests.tables import each

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.glob("**/*.md"))}
START = [page for page in PAGES if page.startswith("start/")]
PICTURED = ["start/your_model.md", "start/which_preset.md", "start/report.md", "guides/switches.md", "guides/scales.md"]
TOTAL = 45_000


def sentences(page):
    """The sentences of the running text; a paragraph or an item of a list ends one, too."""
    text = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    text = re.sub(r"^(\||#|!!!|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[0-9])", block)]
    return [part for part in parts if re.search(r"\w", part)]


@each("page", START)
def test_a_page_of_the_start_has_at_most_600_words_in_sentences_of_16_on_average(page):
    assert len(PAGES[page].split()) <= 600
    lengths = [len(sentence.split()) for sentence in sentences(PAGES[page])]
    assert sum(lengths) <= 16 * len(lengths)


@each("page", [page for page in PAGES if not page.startswith("results/")])
def test_a_page_has_at_most_1200_words_and_its_tables_four_columns(page):
    assert len(PAGES[page].split()) <= 1200
    heads = re.findall(r"^\|[\s:|-]+\|$", PAGES[page], re.MULTILINE)  # the lines below the heads of tables
    assert all(line.count("|") - 1 <= 4 for line in heads)


@each("page", PICTURED)
def test_an_idea_has_a_picture(page):
    assert "![" in PAGES[page]


def test_the_whole_documentation_stays_small():
    words = sum(len(page.split()) for page in PAGES.values())
    assert words <= TOTAL, f"{words} words: cut elsewhere what you add"
