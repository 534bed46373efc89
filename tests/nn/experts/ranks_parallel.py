"""One of two processes that share the experts of an OLMoE.

``transformers`` spreads the experts, and brings them their tokens. Each process trains the whole model, too.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader
from transformers.distributed import DistributedConfig

from lightning_lowbit import LowBitPrecision, StableSPAM, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from tests.lightning_imports import LightningModule, ModelParallelStrategy, quiet_trainer
from tests.nn.experts.models import TOKENS, tiny
from tests.nn.experts.ranks_experts import RANKS, whole
from tests.nn.experts.stacks import ENDS, EXPERTS, converted, inputs, run_stack
from tests.nn.layers import identical

STEPS = 3
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


def train(plan, casts="nvfp4", early=False, only=ONLY, save="inputs"):
    """Losses and weights of a run, of one process without a plan."""
    model = tiny("olmoe", eos_token_id=None)
    for at in (True, False):
        if at == early:
            convert(model, casts, only=only, save=save)
        if at and plan is not None:
            model = spread(model, plan)
    keys, histories, losses = LayerKeys(model), AmaxHistories(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = slice(dist.get_rank(), dist.get_rank() + 1) if plan is not None and "fsdp_size" in plan else slice(None)
    for step in range(STEPS):
        keys.fill_(step)
        loss = model(input_ids=TOKENS[own], use_cache=False).logits.square().mean()
        loss.backward()
        histories.advance_(None if plan is None else partial(dist.all_reduce, op=dist.ReduceOp.MAX))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = torch.stack(losses)
    if own != slice(None):
        dist.all_reduce(found)
        found /= RANKS
    return {"losses": found, "weights": [whole(p) for p in model.parameters()]}


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
    network, has_own = Network(plan), plan is not None and "fsdp_size" in plan
    kwargs = {"devices": 1}
    if plan is not None:
        strategy = ModelParallelStrategy(*((RANKS, 1) if has_own else (1, RANKS)))
        kwargs = {"devices": RANKS, "strategy": strategy, "use_distributed_sampler": False}
    own = TOKENS[dist.get_rank() :][:1] if has_own else TOKENS
    plugin = LowBitPrecision(casts, only=ONLY, compute_dtype="fp32")
    trainer = quiet_trainer(plugin, max_steps=steps, max_epochs=-1, gradient_clip_val=0.5, **kwargs)
    trainer.fit(network, DataLoader(own, batch_size=len(own)), ckpt_path=from_)
    if to:
        trainer.save_checkpoint(to)
    found = torch.stack(network.losses)
    if has_own:
        dist.all_reduce(found)
        found /= RANKS
    return {"losses": found, "weights": [whole(p) for p in network.parameters()]}


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


def refusal():
    """What experts say whose matrices are cut."""
    model = convert(spread(tiny("olmoe", eos_token_id=None), {"tp_size": RANKS}), "nvfp4", only=ONLY)
    LayerKeys(model).fill_(0)
    try:
        model(input_ids=TOKENS, use_cache=False)
    except ValueError as error:
        return str(error)
    return ""


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
    found = run_stack(layer, x[rows], g[rows], [end - start for end in ends], autocast=is_bf16)
    own = {name: found[name].to_local() for name in ("weight", "bias")} | {name: found[name] for name in "yx"}
    identical(own, {name: expected[name][slice(first, last) if name in ("weight", "bias") else rows] for name in own})


def work():
    os.environ["RANK"] = str(dist.get_rank())  # transformers asks for it
    for grouped in ("auto", "native"):
        stack(grouped)
    runs = {}
    for name, kwargs in RUNS.items():
        runs[name] = train(**{**kwargs, "plan": None}), train(**kwargs)
    return {"runs": runs, "fits": fits(), "refusal": refusal()}
