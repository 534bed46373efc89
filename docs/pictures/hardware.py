"""Which preset runs natively on which hardware, from the table of native GEMMs."""

from collections.abc import Callable

from docs.pictures.canvas import PAD, WIDTH, Canvas
from lightning_lowbit import LinearCasts
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.nn.native.table import NATIVE

Rule = Callable[[str], bool]


def _nvidia(*capability: int) -> Rule:
    """Returns the rule by which GPUs of a compute capability have GEMMs of a kind."""

    def has(kind: str) -> bool:
        versions = NATIVE[kind].nvidia
        return versions is not None and versions[0] <= capability and (versions[1] is None or capability < versions[1])

    return has


# By column: its head, and its rule.
HARDWARE: dict[str, Rule] = {
    "CPU ¹": lambda kind: kind in ("cpu", "int8"),
    "CPU with AMX": lambda kind: kind == "int8",
    "Turing, Ampere": _nvidia(7, 5),
    "Ada": _nvidia(8, 9),
    "Hopper": _nvidia(9, 0),
    "B200, B300": _nvidia(10, 0),
    "RTX 50": _nvidia(12, 0),
    "MI350": lambda kind: "gfx950" in NATIVE[kind].amd,
}
FIRST_GPU = 2
LEFT, STEP, ROW = 128, 37, 21


def native_gemms(preset: str, has: Rule) -> tuple[int, int]:
    """Returns how many GEMMs of two quantized operands a preset has natively, and how many it has.

    Results are in float32 on CPUs and in bfloat16 on GPUs.
    """
    casts = LinearCasts.preset(preset)
    kinds = casts.traits.native_kinds
    quantized = [gemm for gemm in GEMMS if gemm in casts.quantized_gemms]
    return sum(any(has(kind) for kind in kinds.get(gemm, ())) for gemm in quantized), len(quantized)


def draw() -> str:
    """Draws a dot for each preset and hardware."""
    canvas = Canvas(
        "Which preset runs natively on which hardware",
        "A row for each preset and a column for each kind of hardware. A full dot: all products of two quantized "
        "operands are native. Half a dot: some. A ring: all are emulated. Dots of CPUs are run by the tests, those "
        "of GPUs have not run on one.",
    )
    y = 98.0
    for i, head in enumerate(HARDWARE):
        canvas.text(LEFT + STEP * (i + 0.5) + 3, y - 7, head, "bold", turn=-50)
    canvas.line([(PAD, y), (WIDTH - PAD, y)])
    for preset in sorted(name for name in PRESETS if LinearCasts.preset(name).quantized_gemms):
        y += ROW
        canvas.text(PAD, y, preset, "code")
        for i, has in enumerate(HARDWARE.values()):
            _dot(canvas, LEFT + STEP * i + STEP / 2, y - 4.5, native_gemms(preset, has), i >= FIRST_GPU)
    canvas.line([(PAD, y + 10), (WIDTH - PAD, y + 10)])
    return canvas.svg(_legend(canvas, y + 32) + 16)


def _dot(canvas: Canvas, x: float, y: float, native: tuple[int, int], is_gpu: bool) -> None:
    count, total = native
    color = "w" if is_gpu else "g"
    if count == 0:
        canvas.dot(x, y, 5, "line", 0)
    elif count < total:
        canvas.half(x, y, 5.5, color)
    else:
        canvas.dot(x, y, 5.5, color)


def _legend(canvas: Canvas, y: float) -> float:
    rows = [
        ((1, 1), False, "all quantized products native; run by the tests"),
        ((1, 1), True, "all native; written, not run on a GPU yet"),
        ((1, 2), True, "some native, the others emulated"),
        ((0, 1), True, "emulated: the same results, no gain in speed"),
    ]
    for native, is_gpu, line in rows:
        _dot(canvas, PAD + 6, y - 4.5, native, is_gpu)
        canvas.text(PAD + 20, y, line)
        y += 20
    notes = [
        "Products with an operand in high precision, such as the",
        "backward pass of integers, are not counted.",
        "¹ x86 with AVX2 or more, in float32; ARM with dot products",
        "   has the same dots, not run.",
        "MXFP4 on B200 needs a torch that was built with MSLK.",
    ]
    for line in notes:
        canvas.text(PAD, y + 4, line, "soft")
        y += 19
    return y - 8
