"""Hooks of mkdocs: docstrings name classes as Sphinx does, :class:`Cast`, and the pages show `Cast`; notebooks are
pages, with the outputs that they hold."""

import json
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Notebook(File):
    """A notebook, which mkdocs takes for a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Makes pages of notebooks."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Returns a notebook as Markdown."""
    if not isinstance(page.file, Notebook):
        return None
    notebook = json.loads(page.file.content_string)
    source = f"{config.repo_url}/blob/main/docs/{page.file.src_uri}"
    first, *rest = [text for cell in notebook["cells"] for text in _markdown(cell)]
    return "\n\n".join([first, f"This page is a notebook: [open or download it]({source}).", *rest])


def _markdown(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            yield f'<img alt="The figure that the code above draws" src="data:image/png;base64,{picture}">'
        else:
            yield f"```text\n{''.join(data['text/plain']).strip()}\n```"


def on_page_content(html: str, **_: object) -> str:
    """Drops the roles in front of code."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html).replace("<code>~", "<code>")
