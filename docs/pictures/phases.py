"""Phases of a run on a time line: which pass is quantized when, under four schedules."""

from collections.abc import Callable

from docs.pictures.canvas import PAD, WIDTH, Canvas
from lightning_lowbit import LinearCasts
from lightning_lowbit.callbacks.switches.precision import SCHEDULES

LEFT, LANE = PAD + 70, 22
RUN = WIDTH - PAD - LEFT

# By title: the line of code, what it is for, and the phases with the share of the run at which each begins.
RUNS: dict[str, tuple[str, str, list[tuple[str, float]]]] = {
    "No switch": ("FP4Precision()", "for a model that will run in FP4", [("fqt", 0)]),
    "A forward pass in high precision at the end": (
        'PrecisionSwitch("hp-forward", at=0.8)',
        "for a model that will run in bf16",
        [("fqt", 0), ("hp-forward", 0.8)],
    ),
    "A backward pass in high precision at the end (QAF)": (
        "QAFSwitch(at=0.9)",
        "as in the paper; it gained nothing here",
        [("fqt", 0), ("qaf", 0.9)],
    ),
    "A gradual start": (
        'PrecisionSwitch("fqt", at=0, over=0.4)',
        "for a pretrained model: quantization grows (λ)",
        [("fqt", 0)],
    ),
}
GRADUAL = 0.4  # of the run, in the last of RUNS


def draw() -> str:
    """Draws two lanes, forward and backward, for each schedule."""
    canvas = Canvas(
        "Phases of a run",
        "Four schedules of a run, each with a lane for the forward and one for the backward pass. No switch: both "
        "quantized to the end. hp-forward: the forward pass in high precision in the last fifth. QAF: the backward "
        "pass in high precision in the last tenth. A gradual start: quantization grows over the first two fifths.",
    )
    _legend(canvas, 24)
    top = 40.0
    for title, (code, purpose, phases) in RUNS.items():
        top += 26
        canvas.text(PAD, top, title, "bold", 14)
        canvas.text(PAD, top + 19, code, "code")
        canvas.text(PAD, top + 37, purpose, "soft")
        share = SCHEDULES["linear"] if title == "A gradual start" else None
        _lanes(canvas, top + 48, phases, share)
        top += 48 + 2 * LANE + 22
    canvas.text(LEFT, top + 6, "first step", "soft")
    canvas.text(LEFT + RUN, top + 6, "last step", "soft", anchor="end")
    canvas.line([(LEFT + 70, top + 2), (LEFT + RUN - 66, top + 2)], "soft")
    return canvas.svg(top + 22)


def _legend(canvas: Canvas, y: float) -> None:
    canvas.bar(PAD, y - 11, 26, 14, "x", 0.75)
    canvas.text(PAD + 34, y, "quantized")
    canvas.bar(PAD + 120, y - 11, 26, 14, "soft", 0.25)
    canvas.text(PAD + 154, y, "high precision (bf16)")


def _lanes(
    canvas: Canvas, top: float, phases: list[tuple[str, float]], schedule: Callable[[float], float] | None
) -> None:
    casts = LinearCasts.preset("nvfp4")
    for lane, (name, operand) in enumerate({"forward": "fprop_x", "backward": "dgrad_g"}.items()):
        y = top + lane * (LANE + 3)
        canvas.text(PAD, y + 15, name)
        ends = [start for _, start in phases[1:]] + [1.0]
        for (phase, start), end in zip(phases, ends, strict=True):
            is_quantized = getattr(casts.phase(phase), operand) is not None
            x, width = LEFT + RUN * start, RUN * (end - start) - 1
            canvas.bar(x, y, width, LANE - 2, "soft", 0.25)
            if is_quantized and schedule is None:
                canvas.bar(x, y, width, LANE - 2, "x", 0.75)
            elif is_quantized:
                _ramp(canvas, y, schedule)


def _ramp(canvas: Canvas, y: float, schedule: Callable[[float], float]) -> None:
    """Fills a lane up to the share λ of quantization."""
    steps, bottom = 20, y + LANE - 2
    shares = [(LEFT + RUN * GRADUAL * i / steps, bottom - (LANE - 2) * schedule(i / steps)) for i in range(steps + 1)]
    end = LEFT + RUN - 1
    canvas.area([*shares, (end, y), (end, bottom), (LEFT, bottom)], "x", 0.75)
