"""One of two processes that train with default arguments: ``python -m tests.precision.ranks_defaults 0 FOLDER``.

The second one has a CPU without instructions for bf16. What came out lies in ``FOLDER/0.pt`` and ``FOLDER/1.pt``.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_lowbit import FP4Precision, LowBitPrecision
from lightning_lowbit.precision import run_settings
from tests.launch import take_part
from tests.lightning_imports import Trainer
from tests.precision.strategies.models import RANKS, Small
from tests.precision.strategies.ranks import KINDS, STRATEGIES, trainer


def fit(name: str, plugin: LowBitPrecision, steps: int = 1, ckpt_path: str | None = None) -> tuple[Trainer, Tensor]:
    make, of_model = STRATEGIES[name]
    model = Small("AdamW", **of_model)
    made = trainer(plugin, strategy=make(), devices=RANKS, max_steps=steps)
    made.fit(model, ckpt_path=ckpt_path)
    return made, torch.stack(model.losses)


def run(name: str) -> dict[str, Any]:
    """A first run, of a plugin that quantizes everything, and two that resume it."""
    first = FP4Precision(quantize_output=True, compute_dtype="fp32")
    made, _ = fit(name, first)
    made.save_checkpoint(path := f"{name}.ckpt")
    told: list[str] = []
    run_settings.say_once = told.append
    fresh = FP4Precision()
    fit(name, fresh)
    resumed = [FP4Precision(), FP4Precision(quantize_output=True)]
    losses = [fit(name, plugin, 2, path)[1] for plugin in resumed]
    return {
        "told": told,
        "dtypes": [str(plugin.compute_dtype) for plugin in (fresh, *resumed)],
        "layers": [sorted(plugin.trained.layers) for plugin in (first, fresh, *resumed)],
        "losses": losses,
    }


def work() -> dict[str, Any]:
    lacking = {torch.bfloat16} if torch.distributed.get_rank() == 1 else set[torch.dtype]()
    run_settings.SLOW_ON_CPU = frozenset(lacking)
    return {name: run(name) for name in KINDS}


if __name__ == "__main__":
    take_part(RANKS, work)
