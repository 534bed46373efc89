"""Sizes of the pages of the documentation; ``python -m tests.docs.pages`` prints them."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Size:
    """What a page asks of its readers."""

    words: int  # all that stands between spaces, code and tables too
    sentence: float  # mean words of a sentence, without code, tables and headings
    columns: int  # of the widest table
    pictures: int


def sizes() -> dict[str, Size]:
    """The size of each page, by its path in ``docs``."""
    return {str(page.relative_to(DOCS)): size(page.read_text()) for page in sorted(DOCS.glob("**/*.md"))}


def size(page: str) -> Size:
    tables = re.findall(r"^\|[\s:|-]+\|$", page, re.MULTILINE)  # the line below the head of each
    lengths = [len(sentence.split()) for sentence in sentences(page)]
    return Size(
        words=len(page.split()),
        sentence=sum(lengths) / len(lengths) if lengths else 0.0,
        columns=max((line.count("|") - 1 for line in tables), default=0),
        pictures=len(re.findall(r"!\[", page)),
    )


def sentences(page: str) -> list[str]:
    """The sentences of the running text; a paragraph or an item of a list ends one, too."""
    text = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    text = re.sub(r"^(\||#|!!!|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[0-9])", block)]
    return [part for part in parts if re.search(r"\w", part)]


def main() -> None:
    pages = sizes()
    print(f"{'page':42}{'words':>7}{'sentence':>10}{'columns':>9}{'pictures':>10}")
    for name, page in pages.items():
        print(f"{name:42}{page.words:7}{page.sentence:10.1f}{page.columns:9}{page.pictures:10}")
    print(f"{len(pages):2} pages{'':34}{sum(page.words for page in pages.values()):7}")


if __name__ == "__main__":
    main()
