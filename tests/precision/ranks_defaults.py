"""One of two processes that train with default arguments, under the named strategies.

The second one has a CPU without instructions for bf16, and the first run another seed there, as where Lightning starts
it after a ``seed_everything`` that follows the plugin.
"""

import sys
from unittest.mock import patch

import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.precision import run_settings
from lightning_lowbit.units import cpu_without
from tests.lightning_imports import NAME
from tests.precision.checkpoints.ranks import STRATEGIES, Regression, _in_place
from tests.precision.regression_model import On
from tests.ranks import RANKS, trainer


def fit(name, plugin, *callbacks, ckpt_path=None):
    make, cut = STRATEGIES[name]
    model = Regression(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), cut)
    steps = 2 if ckpt_path else 1
    run = trainer(plugin, strategy=make(), devices=RANKS, callbacks=[*callbacks], limit_val_batches=0, max_steps=steps)
    with patch(f"{NAME}.strategies.fsdp._get_full_state_dict_context", _in_place):
        run.fit(model, ckpt_path=ckpt_path)
    return model.whole


def run(name):
    """A run of a plugin that quantizes everything, one with defaults alone, and two that resume the first."""
    path, fresh = f"{name}.ckpt", FP4Precision()
    first = FP4Precision(quantize_output=True, compute_dtype="fp32", seed=int(sys.argv[1]))
    fit(name, first, On(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(path)))
    run_settings.say_once = (told := list[str]()).append
    fit(name, fresh)
    resumed = [FP4Precision(), FP4Precision(quantize_output=True)]
    weights = [fit(name, plugin, ckpt_path=path) for plugin in resumed]
    return {
        "told": told,
        "seed": first.seed,
        "dtypes": [str(plugin.compute_dtype) for plugin in (fresh, *resumed)],
        "layers": [sorted(plugin.trained.layers) for plugin in (first, fresh, *resumed)],
        "weights": weights,
    }


def work():
    with cpu_without(*([torch.bfloat16] if torch.distributed.get_rank() == 1 else [])):
        return {name: run(name) for name in sys.argv[3:]}
