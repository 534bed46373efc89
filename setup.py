"""The description on PyPI: README.md with absolute links, since relative ones lead nowhere there."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/lightning-lowbit/lightning_lowbit"


def description() -> str:
    """Pictures come from the raw files, everything else from the pages of the repository."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!(\[[^\]]*\])\((?!http)", rf"!\1({REPOSITORY}/raw/main/", text)
    return re.sub(r"\]\((?!http|#)", f"]({REPOSITORY}/blob/main/", text)


setup(long_description=description(), long_description_content_type="text/markdown")
