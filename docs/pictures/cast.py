"""What a cast does to a row of 32 numbers: the levels of two blocks, and six numbers in a table."""

import torch

from docs.pictures.canvas import PAD, WIDTH, Canvas
from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.quant import Quantized

# A row as a layer has it: sizes of about 1, and one outlier in the second block.
ROW = [0.31, -0.87, 1.24, 0.05, -0.42, 0.66, -1.55, 0.93, 0.18, -0.29, 2.1, -0.71, 0.48, 1.02, -1.16, -0.09]
ROW += [0.62, -0.35, 0.88, -1.21, 0.14, 0.47, 6.4, -0.93, 1.31, -0.22, 0.39, -0.58, 0.75, -1.08, 0.27, 0.11]
CAST = Cast("e2m1", Scale("e4m3", 16))
SHOWN = [1, 3, 10, 19, 20, 22]
TOP, HEIGHT, STEP = 62, 230, 12.6


def draw() -> str:
    """Draws numbers, levels and errors, then the table."""
    canvas = Canvas(
        "A cast rounds each number to a level of its block",
        "32 numbers in two blocks of 16. Each block has its own scale, which moves its levels. An outlier in the "
        "second block makes its levels coarse, and small numbers there become 0.",
    )
    row = torch.tensor(ROW)
    quantized = quantize(row, CAST)
    values, scales = quantized.dequantize(), quantized.multipliers()
    canvas.text(PAD, 24, "32 numbers, 2 blocks, a scale for each", "bold", 15)
    canvas.text(PAD, 44, "FP4 has 15 levels: 0, ±0.5, 1, 1.5, 2, 3, 4, 6, times the scale.", "soft")
    low, high = -3.2, 6.8

    def place(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    for block, scale in enumerate(scales.tolist()):
        left = PAD + 208 * block
        canvas.box(left, TOP, 200, HEIGHT + 2)
        for level in sorted({sign * level for level in _levels() for sign in (-1, 1)}):
            if low < level * scale < high:
                canvas.line([(left + 1, place(level * scale)), (left + 199, place(level * scale))], "line", 0.8)
        canvas.text(left + 100, TOP + HEIGHT + 20, f"scale {scale:g}", "code", anchor="middle")
        for i in range(16):
            before, after = ROW[16 * block + i], float(values[16 * block + i])
            x = left + 5.5 + STEP * i
            canvas.line([(x, place(before)), (x, place(after))], "error", 2)
            canvas.dot(x, place(after), 3.6, "x")
            canvas.dot(x, place(before), 3.6, "ink", 0)
    _legend(canvas, TOP + HEIGHT + 44)
    bottom = _table(canvas, TOP + HEIGHT + 74, row, quantized)
    snr = 10 * torch.log10(row.square().sum() / (values - row).square().sum())
    canvas.text(PAD, bottom + 6, f"Signal to error (SQNR) of the whole row: {snr:.1f} dB.")
    lost = [f"{number:g}".replace("-", "−") for number, value in zip(ROW[16:], values[16:], strict=True) if value == 0]
    canvas.text(PAD, bottom + 26, f"Next to the outlier {', '.join(lost)} become 0.", "soft")
    return canvas.svg(bottom + 42)


def _levels() -> list[float]:
    return ELEMENT_FORMATS["e2m1"].decode(torch.arange(8, dtype=torch.uint8)).tolist()


def _legend(canvas: Canvas, y: float) -> None:
    canvas.dot(PAD + 6, y - 4, 3.6, "ink", 0)
    canvas.text(PAD + 16, y, "number")
    canvas.dot(PAD + 86, y - 4, 3.6, "x")
    canvas.text(PAD + 96, y, "what the cast makes of it")
    canvas.line([(PAD + 272, y - 10), (PAD + 272, y + 1)], "error", 2)
    canvas.text(PAD + 280, y, "error")
    canvas.line([(PAD + 330, y - 4), (PAD + 352, y - 4)], "line", 1.5)
    canvas.text(PAD + 358, y, "level")


def _table(canvas: Canvas, y: float, row: torch.Tensor, quantized: Quantized) -> float:
    columns = {"block": 50, "number": 122, "÷ scale": 196, "level": 250, "code": 312, "back": 366, "error": 424}
    for name, x in columns.items():
        canvas.text(x, y, name, "soft", anchor="end")
    canvas.line([(PAD, y + 7), (WIDTH - PAD, y + 7)])
    scales = quantized.multipliers().tolist()
    for i in SHOWN:
        y += 22
        value, scale, code = float(row[i]), scales[i // 16], int(quantized.codes[i])
        level, back = float(quantized.elements()[i]), float(quantized.dequantize()[i])
        cells = [f"{i // 16 + 1}", f"{value:.2f}", f"{value / scale:.2f}", f"{level:g}", f"{code:04b}", f"{back:.3g}"]
        kinds = ["code", "code", "code", "code", "code", "code x", "code error"]
        for x, cell, kind in zip(columns.values(), [*cells, f"{back - value:+.2f}"], kinds, strict=True):
            canvas.text(x, y + 4, cell.replace("-", "−"), kind, anchor="end")
    return y + 30
