"""A hook of mkdocs: docstrings name classes as Sphinx does, :class:`Cast`, and the pages show `Cast`."""

import re


def on_page_content(html: str, **_: object) -> str:
    """Drops the roles in front of code."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html).replace("<code>~", "<code>")
