"""The three GEMMs of a linear layer with their six operands."""

from docs.pictures.canvas import PAD, WIDTH, Canvas
from lightning_lowbit.nn.casts.traits import OPERANDS_OF

# Sizes of the axes in the picture, and their names in PyTorch.
AXES = {"tokens": 78, "in": 104, "out": 58}
# By GEMM: what it computes, its result, its operands as the product has them (letters, rows, columns), the summed axis.
GEMMS = {
    "fprop": ("forward pass", ("Y", "tokens", "out"), [("X", "tokens", "in"), ("Wᵀ", "in", "out")], "in"),
    "dgrad": ("gradient of the input", ("dX", "tokens", "in"), [("dY", "tokens", "out"), ("W", "out", "in")], "out"),
    "wgrad": (
        "gradient of the weight",
        ("dW", "out", "in"),
        [("dYᵀ", "out", "tokens"), ("X", "tokens", "in")],
        "tokens",
    ),
}
SUMMED = {"in": "in_features", "out": "out_features", "tokens": "tokens"}
BLOCKS, ROWS = 3, 5


def draw() -> str:
    """Draws each GEMM as result = left · right, with the blocks of both operands along the axis that it sums over."""
    canvas = Canvas(
        "Three matrix products with six operands",
        "fprop: Y = X Wᵀ with fprop_x and fprop_w. dgrad: dX = dY W with dgrad_g and dgrad_w. wgrad: dW = dYᵀ X with "
        "wgrad_g and wgrad_x. Blocks lie along the axis that a product sums over.",
    )
    top = 8.0
    for gemm, (purpose, result, operands, summed) in GEMMS.items():
        top += 24
        canvas.text(PAD, top, gemm, "bold code", 16)
        canvas.text(PAD + 58, top, purpose, size=14)
        canvas.text(WIDTH - PAD, top, f"sums over {SUMMED[summed]}", "soft", anchor="end")
        tallest = max(AXES[rows] for _, rows, _ in (result, *operands))
        middle = top + 30 + tallest / 2
        widths = [AXES[columns] for _, _, columns in (result, *operands)]
        x = (WIDTH - sum(widths) - 60) / 2
        _matrix(canvas, x, middle, result)
        x += AXES[result[2]]
        for sign, name, operand in zip("=·", OPERANDS_OF[gemm], operands, strict=True):
            canvas.text(x + 15, middle + 7, sign, size=22, anchor="middle")
            x += 30
            _matrix(canvas, x, middle, operand, name, is_upright=operand[1] == summed)
            x += AXES[operand[2]]
        top += tallest + 62
    canvas.line([(PAD, top), (WIDTH - PAD, top)])
    canvas.bar(PAD, top + 15, 40, 11, "soft")
    canvas.text(PAD + 50, top + 25, "a block: numbers that share a scale. Each operand")
    canvas.text(PAD, top + 45, "has a cast of its own. Results are in high precision.")
    return canvas.svg(top + 60)


def _matrix(
    canvas: Canvas, x: float, middle: float, axes: tuple[str, str, str], name: str = "", is_upright: bool = False
) -> None:
    letters, height, width = axes[0], AXES[axes[1]], AXES[axes[2]]
    color, y = name[-1:] or "soft", middle - height / 2
    canvas.box(x, y, width, height, color, 0.08, 4)
    if name:
        lengths = (height, width) if is_upright else (width, height)
        for i in range(BLOCKS):
            for j in range(ROWS):
                along, across = lengths[0] / BLOCKS, lengths[1] / ROWS
                corner = (across * j, along * i) if is_upright else (along * i, across * j)
                size = (across, along) if is_upright else (along, across)
                canvas.bar(x + corner[0] + 2, y + corner[1] + 2, size[0] - 4, size[1] - 4, color, 0.38)
    canvas.text(x + width / 2, y - 5, letters, "bold", 14, "middle")
    canvas.text(x + width / 2, y + height + 16, name or f"{axes[1]} × {axes[2]}", f"code {color}", anchor="middle")
