"""The pictures of the documentation are what their script draws, fit a phone, and have both color schemes."""

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from PIL import ImageFont

from docs.pictures.canvas import PAD, WIDTH
from docs.pictures.draw import PICTURES
from docs.pictures.hardware import HARDWARE, native_gemms
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from tests.tables import each

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def test_every_file_is_drawn():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)


@each("name", PICTURES)
def test_the_file_is_what_the_script_draws_with_a_title_and_colors_for_dark_pages(name):
    text = (FOLDER / f"{name}.svg").read_text()
    assert PICTURES[name]() == text, "run python -m docs.pictures.draw"
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    assert "@media (prefers-color-scheme:dark)" in root.find(f"{SVG}style").text


@each("name", PICTURES)
def test_its_texts_fit_and_are_large_enough_for_a_phone(name):
    """In DejaVu, which is wider than the fonts that browsers take before it."""
    for line in ElementTree.parse(FOLDER / f"{name}.svg").iter(f"{SVG}text"):
        size, x = float(line.get("font-size")), float(line.get("x"))
        assert size * (390 - 32) / WIDTH >= 10.5
        width = 0 if "transform" in line.attrib else _font(line.get("class", "")).getlength(line.text) * size / 100
        start = x - {"middle": width / 2, "end": width}.get(line.get("text-anchor"), 0)
        assert start >= PAD - 2 and start + width <= WIDTH - PAD + 2, line.text


@cache
def _font(kind):
    mono, bold = "Mono" * ("code" in kind), "-Bold" * ("bold" in kind)
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans{mono}{bold}.ttf", 100)


NATIVE = [("nvfp4", "B200, B300", (3, 3)), ("quartet2", "B200, B300", (1, 3)), ("nvfp4-row", "B200, B300", (0, 3))]
NATIVE += [("mxfp4", "RTX 50", (0, 3)), ("fp8-row", "Ada", (3, 3)), ("fp8-blockwise", "Hopper", (3, 3))]
NATIVE += [("nvfp4", "CPU ¹", (3, 3)), ("nvfp4", "CPU with AMX", (0, 3)), ("ternary", "Turing, Ampere", (1, 1))]


@each("preset, hardware, expected", NATIVE)
def test_the_dots_are_those_of_the_guide_on_hardware(preset, hardware, expected):
    assert native_gemms(preset, HARDWARE[hardware]) == expected


def test_every_preset_that_quantizes_has_a_row():
    text = (FOLDER / "hardware.svg").read_text()
    rows = re.findall(r'class="code">([^<]+)<', text)
    assert set(rows) == set(PRESETS) - {"bf16"}
