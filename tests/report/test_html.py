"""The page alone: what is in it, what must not be in it, and how a browser shows it."""

import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from lightning_lowbit.report.html import Chart, HeatMap, Section, Table, Text, render
from tests.tables import each

EVIL = "<script>alert('x')</script>&\"$^$"


class Page(HTMLParser):
    """Tags with attributes, ids, and the text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.text = [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


def check_self_contained(page):
    """Nothing that a browser would fetch or execute, and ids that do not clash."""
    parsed = Page(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "base", "image"}
    assert parsed.count("style") == 1
    for tag, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
    assert "://" not in re.sub(r"(?s)<(pre|p|td|dd)\b.*?</\1>", "", page)
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert len(set(parsed.ids)) == len(parsed.ids)
    used = re.findall(r'url\(#(.*?)\)|href="#(.*?)"', page)
    assert {a or b for a, b in used} <= set(parsed.ids), "a reference points nowhere"
    return parsed


def line(steps=100, f=lambda x: 1 / x):
    return list(range(1, steps + 1)), [f(x) for x in range(1, steps + 1)]


OPERANDS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")


def shown(*blocks):
    return render("x", [Section("s", blocks)])


def heat(values, rows=None, **kwargs):
    names = [f"model.layers.{i}.up" for i in range(len(values))] if rows is None else rows
    return HeatMap(names, OPERANDS[: len(values[0])], values, **{"unit": "dB", "low": 10.0, "high": 30.0, **kwargs})


def cells(block):
    """(class, text) of the cells of a heat map."""
    return re.findall(r'<td(?: class="(.*?)")?>(.*?)</td>', shown(block))


def everything():
    charts = [Chart("a", {"a": line()}, log=True, y_label="unit"), Chart("b", {"b": line(3)})]
    return [
        Section("Loss", [Chart("", {"loss": line(), "val": line(5)}, spans=[(0, 60, "fqt"), (60, 100, "qaf")])]),
        Section("Small", [*charts, Text("quiet")]),
        Section("Table", [Table(["layer", "casts", "FLOPs"], [["a", "nvfp4", 12345], ["b", "bf16", 0.5]], "caption")]),
        Section("Pre", [Text("a\n  b", preformatted=True)]),
        Section("Heat", [heat([[12.3, None]] * 200)]),
    ]


def test_everything_is_inside():
    facts = [("Steps", "100", "of 200")]
    page = check_self_contained(render("my run", everything(), status="finished", lead="lead", facts=facts))
    assert page.count("svg") == 1 + 2
    for text in ("my run", "finished", "lead", "Steps", "of 200", "fqt", "qaf 60–100", "unit", "12,345", "caption"):
        assert text in page.text
    assert "a\n  b" in page.text


def test_what_comes_from_outside_is_escaped():
    chart = Chart(EVIL, {EVIL: line(), "b": line()}, EVIL, EVIL, spans=[(0, 50, EVIL[:12]), (50, 100, EVIL[:12] + "b")])
    blocks = [chart, Text(EVIL), Text(EVIL, preformatted=True), Table([EVIL], [[EVIL]], EVIL)]
    blocks.append(HeatMap([EVIL, EVIL[1:]], [EVIL], [[1], [2]], EVIL, caption=EVIL))
    facts = [(EVIL, EVIL, EVIL)]
    page = render(EVIL, [Section(EVIL, blocks), Section("x", [chart, chart])], status=EVIL, lead=EVIL, facts=facts)
    parsed = check_self_contained(page)
    assert parsed.text.count(EVIL) >= 20, "nothing is lost either"
    assert "could not be shown" not in page


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_said(log, bad):
    xs, ys = line()
    ys[33] = ys[66] = bad
    page = shown(Chart("loss", {"loss": (xs, ys)}, log=log))
    assert "2 values not finite, first at step 34" in Page(page).text and page.count("<svg") == 1
    assert "nan" not in re.findall(r"(?s)<svg.*</svg>", page)[0].lower()
    none = shown(Chart("loss", {"loss": ([5], [bad])}, log=log), Chart("", {"empty": ([], [])}))
    assert "No value to show" in none and "1 value not finite, first at step 5" in none


@each("log", [False, True])
def test_any_values_are_drawn(log):
    for values in [1.0], [0.0, 0.0], [1e300, -1e300], [1e-300, 1e300], [5e-324, 1.0], [0.0, 1.0]:
        page = shown(Chart("a", {"a": (list(range(len(values))), values)}, log=log))
        assert "could not be shown" not in page and page.count("<svg") == 1, values
        assert ("The axis is linear" in page) == (log and min(values) <= 0), values


def test_bands_lie_behind_their_lines_and_those_of_one_x_are_bars():
    series = {"a": ([1, 2], [1.0, 2.0]), "b": ([1], [1.5]), "c": ([1, 2], [0.0, 0.0])}
    bands = {"a": ([0.5, math.nan], [1.5, math.nan]), "b": ([1.0], [9.0])}
    page = shown(Chart("", series, bands=bands))
    kinds = re.findall(r'<path (?:class="(\w+)")?', page)
    assert kinds == ["grid", "band", "bar", "", "dots", "", "dots", "", "dots"]
    assert ">8<" in page, "the bar is outside of the axis"


def test_what_is_beyond_the_limits_is_cut_off_and_said():
    chart = Chart("", {"a": ([1, 2], [1.0, 1e300]), "b": ([1, 2], [1.0, 2.0])}, limits=(-math.inf, 3.0))
    page = Page(shown(chart))
    assert "what is above 3 is cut off" in page.text and "1e+300" in page.text, "the legend has it"
    places = [re.findall(r"[ML]([-\d.]+) ([-\d.]+)", attributes["d"]) for tag, attributes in page.tags if tag == "path"]
    assert all(abs(float(y)) < 1e7 for path in places for _, y in path)


def test_a_logarithmic_x_axis_has_its_ticks():
    page = Page(shown(Chart("", {"a": ([1e-4, 1e-3, 1e-2], [1, 2, 3])}, x_log=True, note="not drawn: 5")))
    assert "not drawn: 5" in page.text
    ticks = [float(attributes["style"][5:-1]) for _, attributes in page.tags if attributes.get("class") == "x"]
    assert ticks[0] < 2 and ticks[-1] > 98 and "0.001" in page.text


def test_many_series_are_one_chart_whose_legend_names_the_ends():
    series = {f"layer.{i}": ([1, 2], [i, math.nan if i > 100 else i + 1]) for i in range(200)}
    text = Page(shown(Chart("many", series))).text
    assert "200 series" in text and "99 series: 99 values not finite, first at step 2" in text
    assert text.count("layer.") <= 2
    series = {f"model.layers.{i}": ([1, 2], [0, math.nan if i in (0, 11) else i]) for i in range(12)}
    page = shown(Chart("many", series))
    assert "12 series of model.layers; lowest and highest in the end:1 110 10" in Page(page).text
    colored = re.findall(r'<i style="background:(var\(.*?\))"', page)
    assert len(colored) == 2
    assert all(f"stroke:{color}" in page for color in colored), "its line has the color of its key"
    none = {name: (xs, [0, math.nan]) for name, (xs, _) in series.items()}
    assert "12 series" in Page(shown(Chart("many", none))).text


def test_many_long_series_stay_small_and_keep_their_spikes():
    def drawn(count, spike):
        series = {f"layer.{i}": line(2000, lambda x: math.sin(x * x)) for i in range(count)}
        series["layer.0"][1][777] = spike
        return shown(Chart("a", series), Chart("b", {}))

    page = drawn(40, 0.5)
    assert len(page) < 160_000, f"{len(page)} characters, though nobody sees 80,000 points"
    ticks = [re.findall('class="y"[^>]*>([^<]*)<', text) for text in (page, drawn(40, 50.0))]
    assert ["40" in texts for texts in ticks] == [False, True], "the spike of one step was thinned away"


def test_colors_of_a_heat_map_warn_of_the_bad_end():
    ramp = [[-1e9], [10.0], [12.8], [12.9], [20.0], [29.9], [30.0], [1e9]]
    steps = [int(css_class[1:]) for css_class, _ in cells(heat(ramp))]
    assert steps == [6, 6, 6, 5, 3, 0, 0, 0], "from bad to good"
    assert [6 - step for step in steps] == [int(found[1:]) for found, _ in cells(heat(ramp, small_is_good=True))]
    scales = [shown(heat(ramp, small_is_good=small)) for small in (False, True)]
    assert ["bad: ≤ 10 dB≥ 30 dB: good" in Page(page).text for page in scales] == [True, False]
    assert ["good: ≤ 10 dB≥ 30 dB: bad" in Page(page).text for page in scales] == [False, True]
    assert [re.findall(r'<i class="h(\d)"', page) for page in scales] == [list("6543210"), list("0123456")]


def test_numbers_of_a_heat_map_have_the_digits_that_its_scale_needs():
    values = [[23.456, -0.01, 1234567.0, 9]]
    assert [text for _, text in cells(heat(values))] == ["23.5", "0.0", "1,234,567", "9.0"]
    assert [text for _, text in cells(heat(values, low=0.0, high=1000.0))][:2] == ["23", "0"]
    assert [text for _, text in cells(heat([[0.01234, 1e-7]], low=0.0, high=0.1))] == ["0.012", "0.000"]
    assert [text for _, text in cells(heat([[1.5e-9]], low=0.0, high=1e-8))] == ["1.5e-09"]
    found = cells(heat([[math.nan, math.inf, -math.inf, None]]))
    assert found == [("words", "not a number"), ("words", "infinite"), ("words", "minus infinite"), ("", "")]


def test_what_layers_are_called_alike_is_said_once():
    for names, heads in (
        (["model.layers.1.up", "model.layers.10.up", "model.layers.2"], ["model.layers.…", "1.up", "10.up", "2"]),
        (["lm_head", "layers.0"], ["", "lm_head", "layers.0"]),
        (["model.lm_head"], ["", "model.lm_head"]),
    ):
        page = shown(heat([[1.0]] * len(names), names))
        assert re.findall("<th(?: title.*?)?>(.*?)</th>", page) == [heads[0], "fprop_x", *heads[1:]]
        assert re.findall('<th title="(.*?)"', page) == names


def test_two_hundred_layers_stay_compact():
    page = shown(heat([[12.3] * 6] * 200))
    assert page.count("<td") == 1200
    assert len(page) - len(render("x", [])) < 60_000


def luminance(color):
    """Relative, WCAG 2.1."""
    color = color * 2 if len(color) == 3 else color
    parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_numbers_are_readable_on_their_cells_and_colors_differ_in_lightness():
    page = render("x", [])
    light, dark = (dict(re.findall(r"--(\w+):#(\w+)", rule)) for rule in re.findall(r"(?s):root\{(.*?)\}", page))
    for scheme in (light, dark):
        cells = [(luminance(scheme[f"h{i}"]), luminance(scheme[f"t{i}"])) for i in range(7)]
        contrasts = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in cells]
        assert min(contrasts) >= 4.5, contrasts
        steps = [(a + 0.05) / (b + 0.05) for (a, _), (b, _) in zip(cells, cells[1:], strict=False)]
        assert min(steps) > 1.1 or max(steps) < 1 / 1.1, f"{steps}: told apart by hue alone"
    assert "h7" not in light
    for i in range(7):
        assert f".h{i}{{background:var(--h{i});color:var(--t{i})}}" in page


def test_a_broken_section_leaves_the_others():
    wrong = {"low": 30.0}, {"low": math.nan}, {"high": math.inf}, {"rows": ["one"]}
    blocks = [Chart("a", {"a": ([1, 2], [1])}), *(heat([[1.0], [2.0]], **scale) for scale in wrong)]
    broken = [*(Section("broken", [block]) for block in blocks), "no section", Section("none", None)]
    page = render("x", [*broken, Section("fine", [Text("still here")])])
    assert page.count("could not be shown") == 7 and "still here" in page
    assert page.count("ValueError:") == 5


def test_a_page_depends_on_what_it_shows_alone(monkeypatch):
    page = render("x", everything())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page == render("x", everything())
    assert "could not be shown" not in page


def test_columns_of_numbers_are_aligned_and_those_of_sentences_folded():
    page = shown(Table(["name", "share"], [["a", "12.5%"], ["b", "3 GFLOPs"], ["c", ""]]))
    assert page.count('class="number"') == 4
    assert '<td class="number">12.5%</td>' in page
    why = "its casts are those of high precision, by preset, skip, only or overrides"
    page = shown(Table(["layer", "class", "why"], [["a", "Linear", why], ["b", "Linear", ""]]))
    assert f'<td>Linear</td><td class="text">{why}</td>' in page
    assert page.count('class="text"') == 3, "the header and both rows"
    assert "table .text:not(th){white-space:normal" in page


def pointed(chart):
    """What the pointer finds in a chart alone, from left to right: lines of text, numbers of dots."""
    page = shown(chart)
    check_self_contained(page)
    found = re.findall(r'<div class="at".*?</div>', page)
    texts = [re.findall("<span.*?>(.*)</span>", one)[0].split("<br>") for one in found]
    return [(text, one.count("<b ")) for text, one in zip(texts, found, strict=True)]


def test_values_are_under_the_pointer():
    chart = Chart("", {"loss": ([1, 2, 3], [3.0, math.nan, 1.5]), "val": ([2], [2.25])})
    assert pointed(chart) == [(["step 1", "loss 3"], 1), (["step 2", "val 2.25"], 1), (["step 3", "loss 1.5"], 1)]
    assert pointed(Chart("a", {"a": ([7], [0.5])})) == [(["step 7", "0.5"], 1)], "the title has said what it is"
    assert pointed(Chart("a", {"a": ([7, 9], [1.0, math.inf])})) == [(["step 7", "1"], 1)]
    names = [f"layers.{i}.up" for i in range(30)]
    many = pointed(Chart("sqnr", {name: ([1, 2], [float(i), float(i)]) for i, name in enumerate(names)}))
    assert many[0] == (["step 1", "0.up 0", "29.up 29"], 2), "those that the legend names"


def test_under_the_pointer_no_spike_is_lost():
    xs, ys = line(5000, lambda x: 1000.0 if x == 4321 else 1.0)
    found = pointed(Chart("loss", {"loss": (xs, ys)}))
    assert 60 < len(found) <= 120
    ((text, dots),) = [(text, dots) for text, dots in found if "1,000" in text[1] or "1000" in text[1]]
    first, last = (int(step.replace(",", "")) for step in text[0].removeprefix("step ").split(" – "))
    assert first <= 4321 <= last
    assert dots == 2


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser `chromium`")
def test_a_browser_shows_it(tmp_path):
    measure = (
        "<script>document.title = [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect())"
        ".map(r => Math.round(r.width) + 'x' + Math.round(r.height)).join(' ') + ' page ' +"
        "document.documentElement.scrollWidth + ' pointer ' + [...document.querySelectorAll('.at')]"
        ".map(e => [e, e.getBoundingClientRect()]).filter(([e, r]) => r.top < innerHeight - 200)"
        ".every(([e, r]) => document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2) === e)"
        " + ' status ' + (document.body.style.width = '170px',"
        "document.querySelector('.status').getClientRects().length)</script>"
    )
    (tmp_path / "page.html").write_text(render("a_run", everything(), status="interrupted") + measure)
    quiet = ["gpu", "quic", "background-networking", "component-update", "sync"]
    command = ["chromium", "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--window-size=1200,900"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.findall("<title>(.*?)</title>", done.stdout)[0]
    sizes, width, pointer, status = re.split(" page | pointer | status ", title)
    for size in (tuple(map(int, size.split("x"))) for size in sizes.split()):
        assert min(size) > 100, title
    assert int(width) <= 1200, "the page scrolls sideways"
    assert pointer == "true", "something lies above what the pointer is to find"
    assert status == "1", "the word is broken where the page is narrow"
