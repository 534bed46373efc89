"""The table and the picture of the errors that casts make in weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_lowbit.metrics import CastStatistics, levels
from lightning_lowbit.packages import install
from lightning_lowbit.quant import Cast, Hadamard
from lightning_lowbit.quant.statistics import sqnr_db
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import plain

_MANY = 40  # weights with a row of the picture each; if there are more, all layers of a kind share one
_MARKERS = "osD^vPXph*"  # without ">", which stands for exact


@dataclass(frozen=True)
class Candidate:
    """A cast, and the Hadamard transform of its preset in fprop."""

    label: str
    cast: Cast
    hadamard: Hadamard | None = None


class Inspection:
    """The errors of some casts in the weights of a checkpoint; raises a ``ValueError`` if no weight is finite.

    ``shapes`` and ``errors`` are by name of the weight: its stored shape, and one error for each candidate. ``totals``
    has for each candidate means of the finite weights' relative errors, weighted by their sizes: the error of all
    elements together would depend mostly on the largest weights. ``codes`` are their histograms.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        shapes: Mapping[str, tuple[int, ...]],
        errors: Mapping[str, Sequence[CastStatistics]],
    ) -> None:
        self.candidates, self.shapes = candidates, shapes
        self.numbers = {name: [error.floats() for error in row] for name, row in errors.items()}
        self.finite = [name for name, row in self.numbers.items() if not row[0]["not_finite"]]
        if not self.finite:
            raise ValueError("Every weight holds a NaN or an infinity. Take another checkpoint.")
        self.elements = sum(math.prod(shapes[name]) for name in self.finite)
        self.totals = [self._total(i) for i in range(len(candidates))]
        codes = [[errors[name][i].codes for name in self.finite] for i in range(len(candidates))]
        self.codes = [torch.stack(histograms).sum(0) for histograms in codes]

    def _total(self, candidate: int) -> dict[str, float]:
        def mean(metric: str) -> float:
            rows = ((math.prod(self.shapes[name]), self.numbers[name][candidate]) for name in self.finite)
            return sum(size * row[metric] for size, row in rows) / self.elements

        total = {metric: mean(metric) for metric in ("relative_mse", "underflow", "saturation", "bias")}
        return {**total, "sqnr": sqnr_db(1.0, total["relative_mse"])}

    def table(self) -> str:
        """Tabulates each weight and candidate, then, below a second header, each candidate over all weights."""
        header = ["weight", "shape", "cast", "bits", "SQNR dB", "relative MSE", "underflow %", "saturation %", "bias %"]
        shapes = {name: " x ".join(map(str, shape)) for name, shape in self.shapes.items()}

        def lines(name: str, shape: str, row: Sequence[Mapping[str, float]]) -> list[list[str]]:
            return [
                [name, shape, candidate.label, f"{candidate.cast.bits:.4g}", *_cells(numbers)]
                for candidate, numbers in zip(self.candidates, row, strict=True)
            ]

        weights = [line for name, row in self.numbers.items() for line in lines(name, shapes[name], row)]
        means = lines(f"mean of {len(self.finite)}", f"{self.elements:,} elements", self.totals)
        bad = [name for name in self.numbers if name not in self.finite]
        caption = f"With a NaN or an infinity, and left out of the last lines: {', '.join(bad)}" if bad else ""
        return plain(Table(header, [*weights, [""] * len(header), header, *means], caption))

    def draw(self, title: str, output: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ValueError(f"The picture takes matplotlib: {install('matplotlib')}.") from None
        rows, casts = self._rows(), len(self.candidates)
        # In inches, from the top left corner of the left axes; savefig crops the rest.
        width, height = 12.0, max(sum(_row_height(names, casts) for names in rows.values()), 2.1 * casts - 0.8)
        figure = Figure(figsize=(width, height))
        left = figure.add_axes((0, 0, 6.8 / width, 1))
        self._draw_sqnr(left, rows)
        left.set_title(title, loc="left", pad=16 + 14 * ((casts + 1) // 2))  # points: above the legend
        for i in range(casts):
            bottom = height - 2.1 * i - 1.3
            self._draw_codes(figure.add_axes((7.6 / width, bottom / height, 4.4 / width, 1.3 / height)), i)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=min(120, 30_000 / height), bbox_inches="tight", pad_inches=0.15)

    def _rows(self) -> dict[str, list[str]]:
        rows: dict[str, list[str]] = {}
        for name in self.finite:
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            rows.setdefault(kind if len(self.finite) > _MANY else name, []).append(name)
        many = {label: f"{label}\n{len(names)}, first on top" for label, names in rows.items() if names[1:]}
        return {many.get(label, label): names for label, names in rows.items()}

    def _draw_sqnr(self, axes: Any, rows: Mapping[str, Sequence[str]]) -> None:
        casts = len(self.candidates)
        heights = [_row_height(names, casts) for names in rows.values()]
        tops = [sum(heights[:row]) for row in range(len(rows))]
        drawn = list[float]()
        for i, (candidate, total) in enumerate(zip(self.candidates, self.totals, strict=True)):
            xs, ys = list[float](), list[float]()
            for names, top, height in zip(rows.values(), tops, heights, strict=True):
                # A single weight has its casts below each other; several weights lie from the top down.
                places, of = (range(len(names)), len(names)) if len(names) > 1 else ([i], casts)
                xs += [self.numbers[name][i]["sqnr"] for name in names]
                ys += [top + height * (0.1 + 0.8 * (place + 0.5) / of) for place in places]
            style: Any = {"color": f"C{i % 10}", "linestyle": "", "markersize": 5 if len(rows) == len(xs) else 3}
            label = f"{candidate.label}: {candidate.cast.bits:.4g} bits, mean {total['sqnr']:.1f} dB"
            axes.plot(xs, ys, _MARKERS[i % len(_MARKERS)], label=label, **style)
            exact = [y for x, y in zip(xs, ys, strict=True) if x == math.inf]
            axes.plot([1] * len(exact), exact, ">", transform=axes.get_yaxis_transform(), clip_on=False, **style)
            drawn += xs
        axes.set(xlim=_limits(drawn), ylim=(sum(heights), 0))
        edge = "; at the right edge: exact" if math.inf in drawn else ""
        axes.set_xlabel(f"SQNR of the weight, dB (higher is better{edge})")
        axes.set_yticks([top + height / 2 for top, height in zip(tops, heights, strict=True)], list(rows), fontsize=9)
        axes.grid(axis="x", alpha=0.3)
        for top in tops[1:]:
            axes.axhline(top, color="0.9", linewidth=0.8, zorder=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)

    def _draw_codes(self, axes: Any, i: int) -> None:
        candidate, total, values = self.candidates[i], self.totals[i], levels(self.candidates[i].cast.grid)
        shares = (100 * self.codes[i] / self.codes[i].sum()).tolist()
        axes.bar(range(len(values)), shares, width=0.8 if len(values) < 40 else 1, color=f"C{i % 10}")
        zero, step = len(values) // 2, max(len(values) // 14, 1)
        places = [place for place in range(len(values)) if (place - zero) % step == 0]
        axes.set_xticks(places, [f"{values[place]:.3g}" for place in places], fontsize=7, rotation=45 * (step > 1))
        axes.tick_params(axis="y", labelsize=8)
        axes.set_ylabel("% of elements", fontsize=9)
        errors = ", ".join(f"{metric} {total[metric]:.2%}" for metric in ("underflow", "saturation", "bias"))
        axes.set_title(f"{candidate.label}: {errors}", fontsize=9, loc="left")
        if i == len(self.candidates) - 1:
            axes.set_xlabel("level of the element, in units of its scale", fontsize=9)


def _cells(numbers: Mapping[str, float]) -> list[str]:
    widths = {"underflow": "11.2f", "saturation": "12.2f", "bias": "+6.2f"}
    percent = [f"{100 * numbers[name]:{width}}" for name, width in widths.items()]
    return [f"{numbers['sqnr']:7.2f}", f"{numbers['relative_mse']:12.2e}", *percent]


def _row_height(names: Sequence[str], casts: int) -> float:
    return 0.8 if len(names) > 1 else 0.24 * max(1, casts / 4)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns an axis around all finite values, at least 3 dB long, so that small differences look small."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = max(0.05 * (high - low), (3 - high + low) / 2)
    return low - room, high + room
