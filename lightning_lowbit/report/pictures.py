"""Charts and heat maps, which pages show, as a picture in PNG."""

import textwrap
from pathlib import Path
from typing import Any

from lightning_lowbit.packages import install
from lightning_lowbit.report.blocks import Chart, HeatMap
from lightning_lowbit.report.charts import FEW_POINTS, remarks, y_axis

_WIDTH, _CHART, _ROW = 9.0, 4.5, 0.22  # inches; the last two are heights
_FEW_CHARTS = 2  # more are drawn lower
_FEW_COLUMNS = 4  # of a heat map; names of more are turned
_MOST_PIXELS = 30_000  # of the height
_LONGEST = 60  # letters of a name
_LINES = ("-", "--", ":", "-.")  # for each, ten colors


def write_picture(path: Path, *blocks: Chart | HeatMap) -> None:
    """Draws charts and heat maps below each other; a ``ValueError`` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"The picture takes matplotlib: {install('matplotlib')}.") from None
    charts = sum(isinstance(block, Chart) for block in blocks)
    heights = [_height(block, charts <= _FEW_CHARTS) for block in blocks]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(blocks), squeeze=False, height_ratios=heights)[:, 0]
    for block, axes in zip(blocks, panels, strict=True):
        _draw_chart(block, axes) if isinstance(block, Chart) else _draw_heat_map(block, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=min(150, _MOST_PIXELS / sum(heights)), bbox_inches="tight")


def _short(name: str) -> str:
    """Leaves out the middle of a long name, which would leave no room for what is drawn."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[1 - _LONGEST // 2 :]}"


def _height(block: Chart | HeatMap, is_high: bool) -> float:
    if isinstance(block, HeatMap) or block.rows:
        return 1.2 + _ROW * len(block.rows) * (1 if isinstance(block, HeatMap) else 2)
    return _CHART if is_high else _CHART / 2


def _draw_chart(chart: Chart, axes: Any) -> None:
    for number, (name, (xs, ys)) in enumerate(chart.series.items()):
        color, line = f"C{number % 10}", _LINES[number // 10 % 4]
        style = {"color": color, "linestyle": line, "marker": "o" if len(xs) <= FEW_POINTS else "", "markersize": 4}
        axes.plot(*((ys, xs) if chart.rows else (xs, ys)), label=name, **style)
        if name in chart.bands and chart.rows:
            low, high = (side[0] for side in chart.bands[name])
            axes.plot([low, high], [xs[0]] * 2, color=color, alpha=0.3, linewidth=8, solid_capstyle="butt")
        elif name in chart.bands:
            axes.fill_between(xs, *chart.bands[name], color=color, alpha=0.2, linewidth=0)
    for number, (start, end, name) in enumerate(chart.spans):
        axes.axvspan(start, end, color=f"C{number % 10}", alpha=0.08, label=name)
    axes.set_title(chart.title, fontsize=10, parse_math=False)
    up, notes = y_axis(chart), textwrap.wrap("; ".join(remarks(chart)), 100)
    ends = (10**up.low, 10**up.high) if up.log else (up.low, up.high)
    if chart.rows:
        axes.set(xlim=ends, ylim=(len(chart.rows) + 0.5, 0.5))
        axes.set_xlabel("\n".join([*textwrap.wrap(chart.y_label, 100), *notes]), parse_math=False)
        axes.set_yticks(range(1, len(chart.rows) + 1), [*map(_short, chart.rows)], parse_math=False)
        axes.grid(axis="x", alpha=0.3)
        return
    axes.set(yscale="log" if up.log else "linear", ylim=ends)
    axes.set_xlabel("\n".join([chart.x_label, *notes]), parse_math=False)
    axes.set_ylabel("\n".join(textwrap.wrap(chart.y_label, 60)), parse_math=False)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1:
        drawn = [*axes.lines, *axes.patches]  # named, as names that begin with _ would be left out
        legend = axes.legend(
            drawn, [_short(one.get_label()) for one in drawn], loc="upper left", bbox_to_anchor=(1, 1), frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    if chart.x_log:
        ticks = sorted({x for xs, _ in chart.series.values() for x in xs})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()


def _draw_heat_map(heat: HeatMap, axes: Any) -> None:
    values = [[float("nan") if value is None else value for value in row] for row in heat.values]
    colors = "YlOrBr" if heat.small_is_good else "YlOrBr_r"
    axes.imshow(values, cmap=colors, vmin=heat.low, vmax=heat.high, aspect="auto")
    for row, cells in enumerate(values):
        for column, value in enumerate(cells):
            is_dark = (value > (heat.low + heat.high) / 2) == heat.small_is_good
            style = {"color": "white" if is_dark else "black", "ha": "center", "va": "center", "fontsize": 8}
            axes.text(column, row, f"{value:.1f}", **style)
    turned = {"rotation": 45, "ha": "right"} if len(heat.columns) > _FEW_COLUMNS else {}
    axes.set_xticks(range(len(heat.columns)), [*map(_short, heat.columns)], parse_math=False, **turned)
    axes.set_yticks(range(len(heat.rows)), [*map(_short, heat.rows)], parse_math=False)
    axes.set_title(heat.caption, parse_math=False)
    axes.set_xlabel(heat.unit, parse_math=False)
