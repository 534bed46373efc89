"""The glossary: words in alphabetical order, each in one to three sentences."""

import re
from pathlib import Path

from tests.tables import each

GLOSSARY = (Path(__file__).parents[2] / "docs" / "concepts" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+)\n\n((?:.+\n)+)", GLOSSARY, re.MULTILINE))
# Words that newcomers met without an explanation.
ASKED = ["nats", "SQNR", "MFU", "4/6", "Two-level scales", "EDEN", "MS-EDEN", "Lambda", "QAF", "Coverage", "SubLN"]
ASKED += ["MoRet", "Stable-SPAM", "FQT", "QAT", "Operand", "Cast", "Phase", "Preset", "amax", "Block", "Group", "RHT"]


def test_words_are_in_alphabetical_order():
    words = re.findall(r"^## (.+)$", GLOSSARY, re.MULTILINE)
    assert words == sorted(words, key=lambda word: word.lower().replace("-", " "))


@each("word", ENTRIES)
def test_a_word_has_one_to_three_sentences(word):
    assert 1 <= len(re.findall(r"[.](?=\s|\)|$)", ENTRIES[word])) <= 3


@each("word", ASKED)
def test_a_word_that_newcomers_ask_for_is_explained(word):
    assert word.lower() in map(str.lower, ENTRIES)
