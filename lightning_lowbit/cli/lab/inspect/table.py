"""The table and the picture of the errors that casts make in weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_lowbit.metrics import CastStatistics, levels
from lightning_lowbit.quant import Cast, Hadamard
from lightning_lowbit.quant.statistics import sqnr_db
from lightning_lowbit.report.blocks import Chart, HeatMap, Table
from lightning_lowbit.report.tables import plain


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

    def picture(self, title: str) -> list[HeatMap | Chart]:
        """Returns the SQNR of each finite weight, and for each cast how often elements take each level."""
        sqnr = [[numbers["sqnr"] for numbers in self.numbers[name]] for name in self.finite]
        low, high = _limits([value for row in sqnr for value in row])
        unit = "SQNR of the weight, dB (higher is better; inf: exact)"
        labels = [candidate.label for candidate in self.candidates]
        heat = HeatMap(self.finite, labels, sqnr, unit, low, high, caption=title)
        return [heat, *map(self._level_chart, range(len(labels)))]

    def _level_chart(self, i: int) -> Chart:
        candidate, total = self.candidates[i], self.totals[i]
        shares = (100 * self.codes[i] / self.codes[i].sum()).tolist()
        errors = ", ".join(f"{metric} {total[metric]:.2%}" for metric in ("underflow", "saturation", "bias"))
        return Chart(
            f"{candidate.label}: {candidate.cast.bits:.4g} bits, mean {total['sqnr']:.1f} dB, {errors}",
            {candidate.label: (levels(candidate.cast.grid), shares)},
            "% of elements",
            "level of the element, in units of its scale",
            bands={candidate.label: ([0.0] * len(shares), shares)},
        )


def _cells(numbers: Mapping[str, float]) -> list[str]:
    widths = {"underflow": "11.2f", "saturation": "12.2f", "bias": "+6.2f"}
    percent = [f"{100 * numbers[name]:{width}}" for name, width in widths.items()]
    return [f"{numbers['sqnr']:7.2f}", f"{numbers['relative_mse']:12.2e}", *percent]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of all finite values, at least 3 dB apart, so that small differences look small."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    room = max(3 - max(finite) + min(finite), 0.0) / 2
    return min(finite) - room, max(finite) + room
