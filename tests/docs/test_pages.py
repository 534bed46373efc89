"""Pages stay short, their tables narrow, and those for newcomers in plain sentences; links and words are explained."""

import json
import re
from pathlib import Path

from tests.tables import each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.glob("**/*.md"))}
START = [page for page in PAGES if page.startswith("start/")]
PICTURED = ["start/your_model.md", "start/which_preset.md", "start/report.md", "guides/switches.md", "guides/scales.md"]
TOTAL = 40_300  # without the lines of tables
GLOSSARY = PAGES["concepts/glossary.md"]
ENTRIES = dict(re.findall(r"^## (.+)\n\n((?:.+\n)+)", GLOSSARY, re.MULTILINE))
# Words that newcomers met without an explanation.
ASKED = ["nats", "SQNR", "MFU", "4/6", "Two-level scales", "EDEN", "MS-EDEN", "Lambda", "QAF", "Coverage", "SubLN"]
ASKED += ["MoRet", "Stable-SPAM", "FQT", "QAT", "Operand", "Cast", "Phase", "Preset", "amax", "Block", "Group", "RHT"]
# By the link that explains them.
LINKS = {"nats": "nats", "SQNR": "sqnr", "MFU": "mfu", "4/6": "46", "[Tt]wo-level": "two-level-scales", "EDEN": "eden"}
LINKS |= {"λ": "lambda", "QAF": "qaf", "[Cc]overage": "coverage", "SubLN": "subln", "MoRet": "moret"}
LINKS |= {"Stable-SPAM": "stable-spam"}
NEWCOMERS = [ROOT / "README.md", *DOCS.glob("*.md"), *sorted((DOCS / "start").glob("*.md"))]


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
    words = sum(not re.fullmatch(r"[|:-]+", word) for page in PAGES.values() for word in page.split())
    assert words <= TOTAL, f"{words} words: cut elsewhere what you add"


def test_words_are_in_alphabetical_order_and_newcomers_find_theirs():
    words = re.findall(r"^## (.+)$", GLOSSARY, re.MULTILINE)
    assert words == sorted(words, key=lambda word: word.lower().replace("-", " "))
    assert set(map(str.lower, ASKED)) <= set(map(str.lower, ENTRIES))


@each("word", ENTRIES)
def test_a_word_has_one_to_three_sentences(word):
    assert 1 <= len(re.findall(r"[.](?=\s|\)|$)", ENTRIES[word])) <= 3


@each("page", [str(page.relative_to(ROOT)) for page in NEWCOMERS if page.name not in ("changelog.md", "limits.md")])
def test_a_page_for_newcomers_links_a_word_where_it_comes_first(page):
    text = re.sub(r"```.*?```|`[^`]*`|!\[[^]]*\]", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for word, name in LINKS.items():
        if first := re.search(rf"(?<![\w-]){word}(?![\w-])", text):
            link = rf"[^]\[]*\]\([^)]*(?:glossary\.md#{name}|{name}\.md)\)"
            assert re.match(link, text[first.end() :]), f"{word} at {text[first.start() - 40 : first.end() + 40]!r}"


def test_there_are_exactly_two_set_up_commands():
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text().split("\n## ")[1], re.DOTALL)
    assert len(commands) == 2
    assert all("-c .ci/constraints.txt" in command for command in commands), "install through the constraints"


def test_figures_of_a_gpu_are_those_of_its_record():
    record = [json.loads(line) for line in (DOCS / "results" / "gpu.jsonl").read_text().splitlines()]
    right, wrong = (sum(line["ok"] is value for line in record) for value in (True, False))
    readme = (ROOT / "README.md").read_text()
    assert f"{right} of {right + wrong} checks are right" in readme
    layer = next(line["value"] for line in record if line["name"] == "8192: fp8-blockwise")
    assert f"`fp8-blockwise` takes {1 / layer['its speed by nn.Linear']:.2f} times" in readme


@each("page, most", [("README.md", 8192), ("recipes/README.md", 10240)])
def test_it_is_short(page, most):
    assert (ROOT / page).stat().st_size <= most, f"{page} has more than {most} bytes: move something to docs/"


@each(
    "page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "recipes/README.md", *(f"docs/{page}" for page in PAGES)]
)
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
