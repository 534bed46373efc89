"""Times of training steps in CUDA graphs of ``torch.compile(mode="reduce-overhead")``, compiled by many processes and
measured by one after the other."""

from functools import partial

from tests.gpu.parts.steps import MODELS, PRESETS, training_step
from tests.gpu.table import Check

WIDE = {"2 layers of 4096": (4096, 2, 8, 1024)}
WHERE_WIDE = ("fp8-current", "fp8-blockwise")


def checks(setting):
    models = [] if setting.is_small else [*list(MODELS.items())[-1:], *WIDE.items()]  # on a CPU there are no graphs
    for what, sizes in models:
        for name in (None, *(WHERE_WIDE if what in WIDE else PRESETS)):
            step = partial(training_step, name, sizes, setting, way="compiled")
            yield Check(f"{what}, compiled to CUDA graphs: {name or 'bf16'}", step, judges=False)
