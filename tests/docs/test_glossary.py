"""The glossary: words in alphabetical order, each in one to three sentences."""

import re
from pathlib import Path

from tests.tables import each

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+)\n\n((?:.+\n)+)", GLOSSARY, re.MULTILINE))
# Words that newcomers met without an explanation.
ASKED = ["nats", "SQNR", "MFU", "4/6", "Two-level scales", "EDEN", "MS-EDEN", "Lambda", "QAF", "Coverage", "SubLN"]
ASKED += ["MoRet", "Stable-SPAM", "FQT", "QAT", "Operand", "Cast", "Phase", "Preset", "amax", "Block", "Group", "RHT"]
# By the link that explains them.
LINKS = {"nats": "nats", "SQNR": "sqnr", "MFU": "mfu", "4/6": "46", "[Tt]wo-level": "two-level-scales", "EDEN": "eden"}
LINKS |= {"λ": "lambda", "QAF": "qaf", "[Cc]overage": "coverage", "SubLN": "subln", "MoRet": "moret"}
LINKS |= {"Stable-SPAM": "stable-spam"}
NEWCOMERS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *sorted((ROOT / "docs" / "start").glob("*.md"))]


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
