"""Models whose cost is estimated."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from lightning_lowbit.cli.lab.estimate.formulas import Batch
from lightning_lowbit.cli.lab.estimate.shapes import describe
from lightning_lowbit.recipes.models import CausalLM

SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH = Batch(sequences=2, length=48)
AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def shapes(precision="bf16-mixed", plugin=None, **arguments):
    """What is estimated of a small model, which is made without numbers."""
    with torch.device("meta"):
        module = CausalLM(**{"config": SMALL, **arguments})
    return describe(module, plugin, precision)[0]


def loss_of(module, enabled=True):
    tokens = torch.randint(0, module.model.config.vocab_size, (BATCH.sequences, BATCH.length + 1))
    with AUTOCAST(enabled=enabled):
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def saved(module, enabled):
    """Bytes that autograd keeps: of activations, and of copies of weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    matrices = {tuple(parameter.shape) for parameter in module.parameters() if parameter.dim() == 2}
    kept, copies = {}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            is_weight = tensor.dim() == 2 and bool(matrices & {tuple(tensor.shape), tuple(tensor.shape)[::-1]})
            (copies if is_weight else kept)[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(module, enabled)
    assert loss.isfinite()
    return sum(kept.values()), sum(copies.values())
