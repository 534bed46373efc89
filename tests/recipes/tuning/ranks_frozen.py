"""Two ranks train with a frozen network beside the trained one, each on its half of a batch: what they log."""

import torch
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.recipes.tuning.distillation import DistillationLM
from lightning_lowbit.recipes.tuning.preferences import PreferenceLM
from tests.lightning_imports import ModelParallelStrategy, quiet_trainer

CASTS = {"preset": "mxfp4", "dgrad_g": None, "dgrad_w": "fprop", "wgrad_g": None, "wgrad_x": "fprop"}
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
CLASSES = {"preferences": PreferenceLM, "distillation": DistillationLM}
FROZEN = {"preferences": "reference", "distillation": "teacher"}


def plugin(name="distillation"):
    return LowBitPrecision(CASTS, compute_dtype="fp32", skip=[FROZEN[name], "lm_head"])


def tokens(size=4, length=17):
    return torch.randint(0, 256, (size, length), generator=torch.Generator().manual_seed(0))


def make(name, **kwargs):
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2)

    kwargs |= {"pretrained": False} if name == "distillation" else {}
    return CLASSES[name](network="llama-small", config=SIZE, seed=0, optimizer=optimizer, **kwargs)


def losses(name, batch, **kwargs):
    """The loss of three steps on a batch, and the parameters that are no shards after them."""
    module, seen = make(name), []
    module.on_train_batch_end = lambda outputs, *_: seen.append(outputs["loss"].detach().cpu())
    data = [DataLoader([batch] * 3, batch_size=None)] * 2
    quiet_trainer(plugin(name), max_steps=3, limit_val_batches=0, **kwargs).fit(module, *data)
    return torch.stack(seen), [name for name, p in module.named_parameters() if not hasattr(p, "placements")]


def work():
    rank = torch.distributed.get_rank()
    part = tokens()[2 * rank : 2 * rank + 2]
    return {name: losses(name, part, devices=2, strategy=ModelParallelStrategy(2, 1)) for name in CLASSES}
