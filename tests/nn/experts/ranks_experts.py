"""One of two processes that train a small OLMoE: whole, sharded or wrapped, with experts that all or each of them have.

Where all have them, they get the same batches with the same random bits, so that means of gradients over ranks are
those of one process. Otherwise ``transformers`` spreads the experts, and brings them their tokens; each process trains
the whole model, too.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers.distributed import DistributedConfig

from lightning_lowbit import LowBitPrecision, StableSPAM, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.nn.layers.experts import RoutedExperts
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.nn.sharded.gather import WeightGathers
from tests.distributed.spreads import full
from tests.launch import refusal
from tests.lightning_imports import LightningModule, ModelParallelStrategy, quiet_trainer
from tests.nn.experts.models import TOKENS, logits, tiny
from tests.nn.experts.stacks import ENDS, EXPERTS, converted, inputs, run_stack
from tests.nn.layers import identical

RANKS, STEPS = 2, 3


def itself(x):
    return x


def learn(model, wrap=itself, tokens=TOKENS, before=lambda: None, after=lambda: None):
    keys, called, losses = LayerKeys(model), wrap(model), []
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    for step in range(STEPS):
        keys.fill_(step)
        before()
        losses.append(called(input_ids=tokens, use_cache=False).logits.square().mean())
        losses[-1].backward()
        after()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses).detach(), "weights": [full(p) for p in called.parameters()]}


# --- experts that all processes have ----------------------------------------------------------------------------------


def train(sharded, packed=False, **kwargs):
    """A model of which experts, blocks and the rest are sharded by themselves, or a whole one."""
    model, mesh = tiny("olmoe"), init_device_mesh("cpu", (RANKS,))
    for block in model.model.layers if sharded else ():
        fully_shard(block.mlp.experts, mesh=mesh)
        fully_shard(block, mesh=mesh)
    if sharded:
        fully_shard(model, mesh=mesh)
    convert(model, "nvfp4-nvidia" if packed else "nvfp4", **kwargs)
    if not (packed and sharded):
        return learn(model)
    gathers = WeightGathers(model)
    names = sorted({type(gather.layer).__name__ for gather in gathers._gathers})
    return learn(model, before=gathers.prepare) | {"gathered": names}


def fsdp1(model, use_orig_params):
    policy = ModuleWrapPolicy({type(model.model.layers[0].mlp.experts)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


def cut_otherwise():
    model = convert(tiny("olmoe"), "nvfp4")
    host = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    cut = distribute_tensor(host.gate_up_proj.detach(), init_device_mesh("cpu", (RANKS,)), [Shard(1)])
    host.gate_up_proj = nn.Parameter(cut)
    LayerKeys(model).fill_(0)
    logits(model)


@declared("cpu", {"int8"})  # what is gathered in codes is emulated: all else must be, to give the same bits
def shared():
    runs = {
        "inputs": [train(sharded) for sharded in (False, True)],
        "codes": [train(sharded, save="codes") for sharded in (False, True)],
        "packed": [train(sharded, packed=True) for sharded in (False, True)],
    }
    wraps = {
        "whole": itself,
        "DDP": DistributedDataParallel,
        "FSDP1": partial(fsdp1, use_orig_params=True),
        "FSDP1, flat": partial(fsdp1, use_orig_params=False),
    }
    wrapped = {name: learn(convert(tiny("olmoe"), "nvfp4"), wrap)["losses"] for name, wrap in wraps.items()}
    return {"runs": runs, "wrapped": wrapped, "refusal": refusal(cut_otherwise)}


# --- experts that each process has some of ----------------------------------------------------------------------------

ONLY = ["experts"]  # of other layers, the bits of tokens depend on their place among those of a process
ONE_BATCH, OWN_BATCHES = {"tp_size": RANKS, "ep_size": RANKS}, {"fsdp_size": RANKS, "ep_size": RANKS}
RUNS = {
    "tokens travel": {"plan": ONE_BATCH},
    "tokens travel, all layers": {"plan": ONE_BATCH, "only": None},
    "sums travel, converted first": {"plan": {**ONE_BATCH, "ep_implementation": "all_reduce"}, "early": True},
    "batches of their own": {"plan": OWN_BATCHES},
    "batches of their own, converted first, codes": {"plan": OWN_BATCHES, "early": True, "save": "codes"},
    "delayed scaling": {"plan": OWN_BATCHES, "casts": "fp8-delayed"},
}


def spread(model, plan):
    """What ``from_pretrained`` does with a ``distributed_config``."""
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(**plan))
    return type(model).maybe_distribute_model(model, config, mesh)


def tokens_of(plan):
    """Those of this process, and a function that makes its losses those of all processes."""
    if plan is None or "fsdp_size" not in plan:
        return TOKENS, itself

    def mean(losses):
        dist.all_reduce(losses)
        return losses / RANKS

    return TOKENS[dist.get_rank() :][:1], mean


def train_spread(plan, casts="nvfp4", early=False, only=ONLY, save="inputs"):
    """Losses and weights of a run, of one process without a plan."""
    model = tiny("olmoe", eos_token_id=None)
    for at in (True, False):
        if at == early:
            convert(model, casts, only=only, save=save)
        if at and plan is not None:
            model = spread(model, plan)
    histories, (tokens, mean) = AmaxHistories(model), tokens_of(plan)
    share = None if plan is None else partial(dist.all_reduce, op=dist.ReduceOp.MAX)
    run = learn(model, tokens=tokens, after=partial(histories.advance_, share))
    return {**run, "losses": mean(run["losses"])}


class Network(LightningModule):
    """An OLMoE that ``transformers`` spreads when the strategy has its processes."""

    def __init__(self, plan):
        super().__init__()
        self.model, self.plan, self.losses = tiny("olmoe", eos_token_id=None), plan, []

    def configure_model(self):
        if self.plan is not None:
            self.model, self.plan = spread(self.model, self.plan), None

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, use_cache=False).logits.square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return StableSPAM(self.parameters(), lr=1e-3, eps=1e-4)  # gradients that are rounding errors move no weight


def fit(plan, casts, steps, from_=None, to=""):
    """Losses and weights of a run with a Trainer, which begins at the checkpoint ``from_`` and saves one at ``to``."""
    network, (tokens, mean), kwargs = Network(plan), tokens_of(plan), {"devices": 1}
    if plan is not None:
        strategy = ModelParallelStrategy(*((RANKS, 1) if "fsdp_size" in plan else (1, RANKS)))
        kwargs = {"devices": RANKS, "strategy": strategy, "use_distributed_sampler": False}
    plugin = LowBitPrecision(casts, only=ONLY, compute_dtype="fp32")
    trainer = quiet_trainer(plugin, max_steps=steps, max_epochs=-1, gradient_clip_val=0.5, **kwargs)
    trainer.fit(network, DataLoader(tokens, batch_size=len(tokens)), ckpt_path=from_)
    if to:
        trainer.save_checkpoint(to)
    return {"losses": mean(torch.stack(network.losses)), "weights": [full(p) for p in network.parameters()]}


def fits():
    """Runs of one process and of two with a Trainer, and a resumed one. Ranks with batches of their own draw other bits
    than one process: there, the casts draw none."""
    one = {casts: fit(None, casts, STEPS) for casts in ("nvfp4", "mxfp8")}
    fit(OWN_BATCHES, "nvfp4", 1, to="one.ckpt")
    uninterrupted, resumed = fit(OWN_BATCHES, "nvfp4", STEPS), fit(OWN_BATCHES, "nvfp4", STEPS, from_="one.ckpt")
    return {
        "one batch": (one["nvfp4"], fit(ONE_BATCH, "nvfp4", STEPS)),
        "batches of their own": (one["mxfp8"], fit(OWN_BATCHES, "mxfp8", STEPS)),
        "resumed": ({**uninterrupted, "losses": uninterrupted["losses"][1:]}, resumed),
    }


def matrices_are_cut():
    model = convert(spread(tiny("olmoe", eos_token_id=None), {"tp_size": RANKS}), "nvfp4", only=ONLY)
    LayerKeys(model).fill_(0)
    logits(model)


def stack(grouped):
    """A stack of which each process holds some experts computes what these do of the whole one."""
    is_bf16, (x, g) = grouped == "native", inputs()
    layer, whole_layer = (converted("nvfp4")[0] for _ in range(2))
    layer.lowbit.grouped = whole_layer.lowbit.grouped = grouped
    expected = run_stack(whole_layer, x, g, autocast=is_bf16)
    mesh, step = init_device_mesh("cpu", (RANKS,)), -(-EXPERTS // RANKS)
    first, last = step * dist.get_rank(), min(step * (dist.get_rank() + 1), EXPERTS)
    for name in ("weight", "bias"):
        setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)])))
    start, *ends = [0, *ENDS][first : last + 1]
    rows = slice(start, ends[-1])
    results = run_stack(layer, x[rows], g[rows], [end - start for end in ends], autocast=is_bf16)
    own = {name: results[name].to_local() for name in ("weight", "bias")} | {name: results[name] for name in "yx"}
    identical(own, {name: expected[name][slice(first, last) if name in ("weight", "bias") else rows] for name in own})


def apart():
    os.environ["RANK"] = str(dist.get_rank())  # transformers asks for it
    for grouped in ("auto", "native"):
        stack(grouped)
    runs = {name: (train_spread(**{**how, "plan": None}), train_spread(**how)) for name, how in RUNS.items()}
    return {"runs": runs, "fits": fits(), "refusal": refusal(matrices_are_cut)}


def work():
    return {"shared": shared, "apart": apart}[sys.argv[3]]()
