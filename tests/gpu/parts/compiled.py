"""Times of training steps in CUDA graphs of ``torch.compile(mode="reduce-overhead")``, compiled by many processes and
measured by one after the other."""

from functools import partial

from tests.gpu.parts.steps import MODELS, SMALL, training_step
from tests.gpu.table import Check

WIDE = {"2 layers of 4096": (4096, 2, 8, 1024)}
PRESETS = ("nvfp4", "fp8-current", "fp8-row", "fp8-blockwise")


def checks(setting):
    """Without a GPU the compiler makes no graphs, but the same code."""
    models = SMALL if setting.is_small else dict([*list(MODELS.items())[-1:], *WIDE.items()])
    for what, sizes in models.items():
        names = PRESETS[:1] if setting.is_small else (None, *PRESETS[what in WIDE :])
        for name in names:
            step = partial(training_step, name, sizes, setting, way="compiled")
            yield Check(f"{what}, compiled to CUDA graphs: {name or 'bf16'}", step, judges=False)
