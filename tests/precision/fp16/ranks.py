"""One of two processes that train in fp16, with all kinds of scalers."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from lightning_lowbit import (
    ConservativeGradScaler,
    FP8Precision,
    GradientNormGradScaler,
    LossScaleMonitor,
    LowBitPrecision,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    ShardedStaticGradScaler,
)
from lightning_lowbit.distributed import local
from lightning_lowbit.optim import connect
from tests import ranks
from tests.lightning_imports import Callback
from tests.precision import ranks_ddp
from tests.ranks import RANKS, FSDPOnCPU, Regression, trainer

STEPS = 5
BAD, OUTLIERS = 1, (1, 3)  # steps that overflow
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}  # it grows, too
# Powers of two: a fused multiply-add then rounds as a product and a sum do, wherever a part ends.
RATE, MOMENTUM = 2.0**-4, 2.0**-1
THRESHOLD, CLIP = 4.0, 0.125  # norms of gradients, above and below those of this model


class Collectives(ranks_ddp.Collectives):
    """Counts those of DTensors too, which they start once they have been taken apart."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if function.namespace == "_c10d_functional" and "wait" not in function.overloadpacket.__name__:
            self.counts[function.overloadpacket.__name__] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


class Counted(GradScaler):
    """Counts the collectives of torch's own unscaling."""

    own = 0

    def unscale_(self, optimizer):
        with Collectives() as seen:
            super().unscale_(optimizer)
        self.own += seen.counts.total()


SCALERS = {
    "conservative": lambda: ConservativeGradScaler(device="cpu", cooldown=1, **SETTINGS),
    "patient": lambda: ConservativeGradScaler(device="cpu", hysteresis=2, **SETTINGS),
    "torch": lambda: GradScaler("cpu", **SETTINGS),
    "sharded conservative": lambda: ShardedConservativeGradScaler(device="cpu", cooldown=1, **SETTINGS),
    "sharded torch": lambda: ShardedGradScaler("cpu", **SETTINGS),
    "norm": lambda: GradientNormGradScaler(THRESHOLD, device="cpu", **SETTINGS),
}
PLUGINS = {
    "bf16": lambda scaler: LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaler),
    "fp8": lambda scaler: FP8Precision("delayed", compute_dtype="fp16", scaler=scaler),
}


class FSDPInFP16(FSDPOnCPU):
    """As Lightning's own does: gathers parameters, and sums gradients, in the dtype of the plugin."""

    def _setup_model(self, model):
        self.kwargs["mixed_precision"] = self.mixed_precision_config
        return super()._setup_model(model)


STRATEGIES = {name: ranks.STRATEGIES[name] for name in ("ddp", "fsdp2", "fsdp2, whole checkpoints", "fsdp1")}
STRATEGIES |= {"fsdp1, sums in fp16": lambda: FSDPInFP16(state_dict_type="sharded")}
SHARDED, PARTS = ("fsdp1", "fsdp2"), ("all", "head")
# Of strategy, scaler, and what is trained: of the head alone, one rank has nothing.
PLANTED = [
    (strategy, scaler, part) for strategy in SHARDED for scaler in SCALERS if scaler != "patient" for part in PARTS
]
ORGANIC = [*((strategy, "bf16") for strategy in STRATEGIES), ("ddp", "fp8")]  # strategy, plugin
NORMS = [(strategy, part) for strategy in ("ddp", *SHARDED) for part in PARTS]
CLIPPED = COUNTED = ("ddp", *SHARDED)
PLAIN = {
    "conservative": partial(ShardedConservativeGradScaler, **SETTINGS),
    "static": ShardedStaticGradScaler,
    "norm": partial(ShardedGradientNormGradScaler, THRESHOLD, **SETTINGS),
}


def flat(module):
    """All weights that are on this rank."""
    return torch.cat([local(p.detach()).flatten() for p in module.parameters()])


class Learner(Regression):
    """Its batches come in halves: one for each rank, or, in one process, one for each micro-batch.

    Args:
        part: what is trained, ``"all"`` or ``"head"``.
        outlier: whether in `OUTLIERS` the second half has targets of which fp16 makes infinite gradients.
        culprit: the rank on which in step `BAD` an infinity is planted into one element of a gradient; None for none.
        shard: cuts the parameters for FSDP2.
    """

    def __init__(self, part="all", outlier=False, culprit=None, shard=False):
        super().__init__(shard)
        self.part, self.outlier, self.culprit = part, outlier, culprit

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step
        half = batch_idx % RANKS if self.trainer.world_size == 1 else self.global_rank
        x, y = (tensor.chunk(RANKS)[half] for tensor in self.inputs(step, batch_idx))
        if self.outlier and step in OUTLIERS and half == 1:
            y = y * 2.0**20
        return F.mse_loss(self(x).float(), y)

    def on_after_backward(self):
        if self.global_rank == self.culprit and self.trainer.global_step == BAD:
            self.gradients()[0].view(-1)[0] = torch.inf

    def configure_optimizers(self):
        return SGD(self.trained(), RATE, MOMENTUM)

    def trained(self):
        return list((self if self.part == "all" else self.body[2]).parameters())

    def gradients(self):
        here = [local(p.grad) for p in self.trained() if p.grad is not None]
        return [gradient for gradient in here if gradient.numel()]


class Diary(Callback):
    """Notes, after each optimizer step, the scale, how many steps were skipped so far, and the weights that are here.

    Attributes:
        notes: ``scales``, ``skipped`` and ``weights``, of which the first are from before the first step; and
            ``factors``: what gradients are multiplied with besides being unscaled, if there are any on this rank.
    """

    def __init__(self):
        self.notes = {"scales": [], "skipped": [], "weights": [], "factors": []}

    def on_train_start(self, trainer, pl_module):
        self._note_weights(trainer)

    def on_after_backward(self, trainer, pl_module):
        self._scaled = [gradient.clone() for gradient in pl_module.gradients()]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        plugin = trainer.precision_plugin
        scale = plugin.scaler.get_scale()
        for before, after in zip(self._scaled[:1], pl_module.gradients()[:1], strict=True):
            place = before.abs().argmax()
            self.notes["factors"].append((after.view(-1)[place] * scale / before.view(-1)[place]).item())

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == len(self.notes["scales"]):  # in the middle of an accumulation
            return
        plugin = trainer.precision_plugin
        self.notes["scales"].append(plugin.scaler.get_scale())
        self.notes["skipped"].append(int(plugin.skipped_steps))
        self._note_weights(trainer)

    def _note_weights(self, trainer):
        root = trainer.model
        self.notes["weights"].append(flat(root))


def train(plugin, strategy=None, end=STEPS, *, clip=None, **kwargs):
    """A run of all ranks, or, without a strategy, of one process that accumulates what they sum; ``kwargs`` are the
    model's."""
    model = Learner(shard=strategy is not None and strategy.startswith("fsdp2"), **kwargs)
    diary, monitor = Diary(), LossScaleMonitor()
    several = {} if strategy is None else {"strategy": STRATEGIES[strategy]()}
    run = trainer(
        plugin,
        max_steps=end,
        devices=RANKS if several else 1,
        accumulate_grad_batches=1 if several else RANKS,
        gradient_clip_val=clip,
        callbacks=[diary, monitor],
        log_every_n_steps=1,
        **several,
    )
    run.fit(model)
    return {
        **diary.notes,
        "whole": model.whole,
        "monitor": monitor.state_dict(),
        "metrics": {name: value.item() for name, value in run.callback_metrics.items()},
    }


def plugin(scaler, name="bf16"):
    return PLUGINS[name](SCALERS[scaler]())


def culprit(strategy, part):
    """A rank that holds some of it: FSDP1 leaves the head to the second one, FSDP2 its only row to the first one."""
    return 0 if (strategy, part) == ("fsdp2", "head") else 1


def collectives(strategy):
    """How many a run has in float32, in fp16, and those of torch's unscaling in it."""
    scaler = Counted("cpu", **SETTINGS)
    counts = {}
    plugins = {"fp32": LowBitPrecision("bf16", compute_dtype="fp32"), "fp16": PLUGINS["bf16"](scaler)}
    for name, plugin in plugins.items():
        run = trainer(plugin, max_steps=STEPS, devices=RANKS, strategy=STRATEGIES[strategy]())
        with Collectives() as seen:
            run.fit(Learner(shard=strategy == "fsdp2"))
        counts[name] = seen.counts.total()
    return {**counts, "unscaling": scaler.own}


def plain(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 1))
    wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    connect(wrapped)
    optimizer, scaler = SGD(wrapped.parameters(), RATE), make(device="cpu")
    scales, weights = [], [flat(wrapped)]
    for step in range(BAD + 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = wrapped(torch.ones(4, 16)).float().square().mean()
        scaler.scale(loss).backward()
        if step == BAD and dist.get_rank() == 1:
            next(p.grad for p in wrapped.parameters() if p.grad is not None).view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(flat(wrapped))
    return {"scales": scales, "weights": weights}


def work():
    results = {}
    for strategy, scaler, part in PLANTED:
        result = train(plugin(scaler), strategy, part=part, culprit=culprit(strategy, part))
        results[f"planted: {strategy}, {scaler}, {part}"] = result
    for strategy, name in ORGANIC:
        results[f"organic: {strategy}, {name}"] = train(plugin("patient", name), strategy, outlier=True)
    for strategy, part in NORMS:
        results[f"norm: {strategy}, {part}"] = train(plugin("norm"), strategy, part=part)
    for strategy in CLIPPED:
        results[f"clipped: {strategy}"] = train(plugin("conservative"), strategy, end=1, clip=CLIP)
    for strategy in COUNTED:
        results[f"collectives: {strategy}"] = collectives(strategy)
    for name, make in PLAIN.items():
        results[f"plain: {name}"] = plain(make)
    return results
