"""Charts and heat maps as pictures: what matplotlib is told to draw."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from lightning_lowbit.report.blocks import Chart, HeatMap
from lightning_lowbit.report.pictures import write_picture


@pytest.fixture
def draw(monkeypatch):
    """Draws blocks and returns the axes of their panels."""

    def draw(*blocks):
        figures = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
            write_picture(Path("a.png"), *blocks)
        return figures[0].axes

    return draw


def test_lines_bands_and_spans(draw):
    lines = {"a": ([1, 2, 3], [1.0, math.nan, 3.0]), "b": ([1], [2.0])}
    bands = {"a": ([0.0, math.nan, 2.0], [2.0, math.nan, 4.0])}
    (axes,) = draw(Chart("title", lines, "loss", "step", spans=[(1, 2, "fqt")], note="a note", bands=bands))
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3], [1]]
    assert axes.get_ylabel() == "loss" and axes.get_title() == "title"
    assert axes.get_xlabel() == "step\na: 1 value not finite, first at step 2; a note"
    assert len(axes.collections) == 1 and [patch.get_label() for patch in axes.patches] == ["fqt"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "fqt"]
    low, high = axes.get_ylim()
    assert low < 0 and high > 4, "a band is outside"


def test_many_series_cuts_and_logarithmic_axes(draw):
    (axes,) = draw(Chart("", {str(i): ([1, 2], [0.0, float(i)]) for i in range(30)}))
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 30
    (axes,) = draw(Chart("", {"a": ([1, 2], [1.0, 1e6]), "b": ([1, 2], [1.0, 2.0])}, limits=(0.5, 3.0)))
    low, high = axes.get_ylim()
    assert 0 < low < 1 and 2 < high < 3 and "what is above 3 is cut off" in axes.get_xlabel()
    (axes,) = draw(Chart("", {"a": ([1e-4, 1e-3], [1.0, 100.0])}, log=True, x_log=True))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.0001", "0.001"]


def test_named_rows_lie_below_each_other(draw):
    series = {"0": ([0.5, 2.5], [0.0, 0.0]), "1 a": ([1.0, 1.0], [0.1, 0.2]), "2 b": ([], [])}
    (axes,) = draw(Chart("", series, "gap", bands={"1 a": ([0.0, 0.0], [0.3, 0.3])}, rows=["a", "b"]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"] and axes.get_xlabel() == "gap"
    bottom, top = axes.get_ylim()
    assert bottom > 2 and top < 1, "a row is outside"
    assert [list(line.get_xdata()) for line in axes.lines] == [[0.0, 0.0], [0.1, 0.2], [0.0, 0.3], []]


def test_names_are_drawn_as_they_are(draw):
    """matplotlib leaves names that begin with _ out of a legend, and reads what is between $ as a formula."""
    names = ["_a", r"$\frac$"]
    heat = HeatMap(names, names, [[1.0, 2.0]] * 2, names[1], 0, 3, caption=names[1])
    lines = Chart(names[1], {name: ([1, 2], [1.0, 2.0]) for name in names}, names[1], names[1])
    _, axes, _ = draw(heat, lines, replace(lines, rows=names))
    axes.figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names


def test_long_names_are_cut_in_their_middle(draw):
    name = "n" * 200
    heat, lines = HeatMap([name], [name], [[1.0]], "", 0, 3), Chart("", {name: ([1], [1.0]), "b": ([1], [1.0])}, name)
    first, second, third = draw(heat, lines, replace(lines, rows=[name, f"{name}   +0.1"]))
    labels = [*first.get_xticklabels(), *first.get_yticklabels(), *second.get_legend().get_texts()[:1]]
    cut = "n" * 30 + "…" + "n" * 29
    assert [label.get_text() for label in labels] == [cut] * 3
    assert [label.get_text() for label in third.get_yticklabels()] == [cut, f"{'n' * 30}…{'n' * 22}   +0.1"]
    assert max(map(len, second.get_ylabel().splitlines())) == 60


@pytest.mark.parametrize("columns", [2, 12])
def test_numbers_and_names_of_heat_maps_do_not_lie_on_top_of_each_other(columns, draw):
    values = [[10.0 * i + j for j in range(columns)] for i in range(3)]
    values[0][0], values[1][1] = math.inf, None
    names = [f"long_name_{j}" for j in range(columns)]
    chart = Chart("how often", {"a": ([1, 2], [1.0, 2.0])})
    axes, _ = draw(HeatMap([f"layers.{i}" for i in range(3)], names, values, "dB", 0, 30), chart)
    assert [label.get_text() for label in axes.get_xticklabels()] == names
    texts = [text.get_text() for text in axes.texts]
    assert texts[0] == "inf" and texts[columns + 1] == "nan" and texts[-1] == f"{values[-1][-1]:.1f}"
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()  # gives everything its place
    shown = [text for text in axes.findobj(Text) if text.get_visible() and text.get_text() and not text.get_rotation()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.overlaps(another), f"{one!r} and {other!r}"


def test_the_file_is_a_picture_in_a_folder_that_is_made():
    write_picture(Path("new/a.png"), Chart("", {"a": ([1, 2], [1.0, 2.0])}))
    assert Path("new/a.png").read_bytes().startswith(b"\x89PNG")
