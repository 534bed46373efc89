"""Models that are inspected."""

import re
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from lightning_lowbit import cli
from lightning_lowbit.nn.casts.linear_casts import PRESETS

WITH_WEIGHTS = [name for name, preset in PRESETS.items() if preset().fprop_w is not None]


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


def table(capsys):
    """The cells of what was printed by (weight, cast)."""
    lines = capsys.readouterr().out.splitlines()
    header, ruler, *rows = [cells for line in lines if len(cells := re.split(r"\s{2,}", line.strip())) == 9]
    rows.remove(header)  # above the means
    assert header[:4] == ["weight", "shape", "cast", "bits"]
    assert set("".join(ruler)) == {"-"}
    return {(row[0], row[2]): dict(zip(header, row, strict=True)) for row in rows}


def is_png(path):
    pixels = imread(path)  # decodes it, whatever the name says
    assert min(pixels.shape[:2]) > 200
    assert np.ptp(pixels[..., :3]) > 0.5, "nothing is drawn"
    return Path(path).read_bytes().startswith(b"\x89PNG\r\n")
