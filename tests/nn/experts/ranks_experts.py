"""One of two processes that train a small OLMoE.

Both get the same batches with the same random bits, so that means of gradients over ranks are those of one process.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit import convert
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.nn.layers.experts import RoutedExperts
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.nn.sharded.gather import WeightGathers
from tests.nn.experts.models import logits, tiny

RANKS, STEPS = 2, 3


def shard(model):
    """Experts, blocks and the rest by themselves."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.model.layers:
        fully_shard(block.mlp.experts, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(sharded, packed=False, **kwargs):
    model = tiny("olmoe")
    if sharded:
        shard(model)
    convert(model, "nvfp4-nvidia" if packed else "nvfp4", **kwargs)
    keys, gathers = LayerKeys(model), WeightGathers(model) if packed and sharded else None
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        keys.fill_(step)
        if gathers is not None:
            gathers.prepare()
        loss = logits(model).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [whole(p) for p in model.parameters()]
    names = [] if gathers is None else sorted({type(g.layer).__name__ for g in gathers._gathers})
    return {"losses": torch.stack(losses), "weights": weights, "gathered": names}


def losses(wrap):
    """The losses of a model that is converted first, and wrapped then."""
    model = convert(tiny("olmoe"), "nvfp4")
    keys, wrapped, found = LayerKeys(model), wrap(model), []
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        keys.fill_(step)
        found.append(logits(wrapped).square().mean())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found).detach()


def fsdp1(model, use_orig_params):
    policy = ModuleWrapPolicy({type(model.model.layers[0].mlp.experts)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def refusal():
    """What experts say whose weights are cut in another way."""
    model = convert(tiny("olmoe"), "nvfp4")
    host = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    mesh = init_device_mesh("cpu", (RANKS,))
    cut = distribute_tensor(host.gate_up_proj.detach(), mesh, [Shard(1)])
    host.gate_up_proj = nn.Parameter(cut)
    LayerKeys(model).fill_(0)
    try:
        logits(model)
    except ValueError as error:
        return str(error)
    return ""


@declared("cpu", {"int8"})  # what is gathered in codes is emulated: all else must be, to give the same bits
def work():
    runs = {
        "inputs": [train(sharded) for sharded in (False, True)],
        "codes": [train(sharded, save="codes") for sharded in (False, True)],
        "packed": [train(sharded, packed=True) for sharded in (False, True)],
    }
    wrapped = {
        "whole": losses(lambda model: model),
        "DDP": losses(DistributedDataParallel),
        "FSDP1": losses(partial(fsdp1, use_orig_params=True)),
        "FSDP1, flat": losses(partial(fsdp1, use_orig_params=False)),
    }
    return {"runs": runs, "wrapped": wrapped, "refusal": refusal()}
