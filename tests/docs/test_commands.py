"""What pages say to type exists: recipes, studies, formats, and the calls that stand beside other tools'."""

import re
from pathlib import Path

from torch import nn

import lightning_lowbit
from lightning_lowbit.export.formats.table import FORMATS
from tests.tables import each

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]}
RECIPES = {path.stem for folder in ("", "overlays") for path in (ROOT / "recipes" / folder).glob("*.yaml")}
STUDIES = {path.stem for path in (ROOT / "recipes" / "studies").glob("*.yaml")}


def names(option, text):
    """What follows an option in commands of a page; files and places of names are left out."""
    values = re.findall(rf"--{option}[ =]([\w.-]+)", text)
    return {value for value in values if not value.isupper() and not Path(value).suffix}


@each("page", PAGES)
def test_recipes_studies_and_formats_of_commands_exist(page):
    text = PAGES[page]
    assert names("config", text) <= RECIPES
    assert names("study", text) <= STUDIES
    assert names("format", text) <= set(FORMATS)


def calls():
    """The calls of this package in the right columns of the page for those who come from elsewhere."""
    lines = PAGES["docs/start/coming_from.md"].splitlines()
    cells = [line.split(" | ", 1)[1] for line in lines if line.startswith("| ")]
    codes = re.findall(r"`(?:plugins=\[)?([^`]+?)\]?`", " ".join(cells))
    return [code for code in codes if re.match(r"\w+", code)[0] in lightning_lowbit.__all__ and code.endswith(")")]


CALLS = calls()
assert len(CALLS) > 12


@each("call", CALLS)
def test_a_call_beside_another_tools_works(call):
    network = nn.Sequential(nn.Linear(64, 64)).requires_grad_("pack_frozen" not in call)
    space = {name: getattr(lightning_lowbit, name) for name in lightning_lowbit.__all__}
    eval(call, space | {"network": network, "model": network, "parameters": network.parameters()})
