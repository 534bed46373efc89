"""The life of a checkpoint: what is in it, and the four ways on."""

from docs.pictures.canvas import PAD, WIDTH, Canvas

# Title, what it does, the line of code.
WAYS = [
    ("Go on", "bit for bit as if uninterrupted", 'trainer.fit(model, ckpt_path="last")'),
    ("Evaluate", "with the casts of the training", "LowBitPrecision.from_checkpoint(path)"),
    ("Reuse", "weights load anywhere, also in bf16", 'load_state_dict(checkpoint["state_dict"])'),
    ("Ship it", "codes and scales of the training", "lowbit export last.ckpt --format gguf"),
]
CONTENTS = [
    ("weights in high precision, under their usual names", "x"),
    ("the casts of each layer, the phase, λ, amaxes", "w"),
    ("optimizer, step, random states, place in the data", "g"),
]
TRUNK, LEFT = PAD + 10, PAD + 34


def draw() -> str:
    """Draws training, the file, and the ways on, from top to bottom."""
    canvas = Canvas(
        "The life of a checkpoint",
        "Training writes a checkpoint: weights in high precision under their usual names, the casts of each layer with "
        "phase and amaxes, and the optimizer. From it a run goes on, is evaluated, is loaded as a plain model, or is "
        "exported to engines.",
    )
    canvas.box(PAD, 14, WIDTH - 2 * PAD, 48, "line", 0.15)
    canvas.text(WIDTH / 2, 34, "Training", "bold", 15, "middle")
    canvas.text(WIDTH / 2, 53, "the optimizer moves weights in high precision", "soft", anchor="middle")
    canvas.arrow(WIDTH / 2, 65, 87)
    canvas.box(PAD, 90, WIDTH - 2 * PAD, 102, "soft", 0.08)
    canvas.text(WIDTH / 2, 111, "last.ckpt", "bold code", 15, "middle")
    for i, (line, color) in enumerate(CONTENTS):
        canvas.bar(PAD + 14, 124 + 22 * i, 11, 11, color)
        canvas.text(PAD + 34, 134 + 22 * i, line)
    y = 208.0
    for title, purpose, code in WAYS:
        canvas.line([(TRUNK, 192), (TRUNK, y + 28), (LEFT - 3, y + 28)], "soft", 1.5)
        canvas.line([(LEFT - 9, y + 23), (LEFT - 3, y + 28), (LEFT - 9, y + 33)], "soft", 1.5)
        canvas.box(LEFT, y, WIDTH - PAD - LEFT, 56, "line", 0.15)
        canvas.text(LEFT + 12, y + 22, title, "bold", 15)
        canvas.text(LEFT + 104, y + 22, purpose, "soft")
        canvas.text(LEFT + 12, y + 44, code, "code")
        y += 68
    middle = LEFT + (WIDTH - PAD - LEFT) / 2
    canvas.arrow(middle, y - 9, y + 12)
    y += 15
    canvas.box(LEFT, y, WIDTH - PAD - LEFT, 66, "line", 0.15)
    canvas.text(middle, y + 22, "vLLM · transformers · llama.cpp · onnxruntime", "bold", anchor="middle")
    canvas.text(middle, y + 41, "a report compares what the engine computes", "soft", anchor="middle")
    canvas.text(middle, y + 57, "with what the training computed", "soft", anchor="middle")
    return canvas.svg(y + 80)
