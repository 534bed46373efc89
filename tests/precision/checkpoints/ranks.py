"""One of two processes that write the named checkpoints, and go on from them as is named.

A run sees the same two micro-batches in a step however many processes there are. Checkpoints after step ``HALF`` are
``FOLDER/WRITER KIND.ckpt``.
"""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_lowbit import (
    ConservativeGradScaler,
    FP8Precision,
    GradientNormMonitor,
    LowBitAdamW,
    PrecisionSwitch,
    StableSPAM,
)
from tests import ranks
from tests.lightning_imports import NAME, Callback, DDPStrategy, ModelParallelStrategy
from tests.precision.regression_model import state
from tests.ranks import RANKS, FSDPOnCPU

STEPS, HALF, MICRO_BATCHES = 6, 4, 2
OVERFLOW = 1  # the step whose gradients are infinite in fp16, also where each is divided by two


@contextmanager
def _in_place(module, world_size, rank0_only=True):
    """Lightning's context, without offloading, which copies nothing on the CPU: FSDP1 of torch 2.13 then frees the
    weights that it returns, and returns the last one of an optimizer's states for all of them."""
    weights = FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    optimizer = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, weights, optimizer):
        yield


# By name: what a Trainer is given, and how the model cuts its parameters.
STRATEGIES = {
    "one": (lambda: "auto", ""),
    "ddp": (DDPStrategy, ""),
    "fsdp1 file": (lambda: FSDPOnCPU(state_dict_type="full"), ""),
    "fsdp1": (lambda: FSDPOnCPU(state_dict_type="sharded"), ""),
    "fsdp2 file": (lambda: ModelParallelStrategy(RANKS, 1, save_distributed_checkpoint=False), "fsdp2"),
    "fsdp2": (lambda: ModelParallelStrategy(RANKS, 1), "fsdp2"),
    "tensor parallel": (lambda: ModelParallelStrategy(1, RANKS), "tensor parallel"),
    "fsdp2, one rank": (lambda: ModelParallelStrategy(1, 1), "fsdp2"),
}
ALONE = ("one", "fsdp2, one rank")  # what one process does

KINDS = {
    "fp8": (
        lambda: FP8Precision("delayed", history=3, compute_dtype="fp32"),
        lambda p: StableSPAM(p, lr=1e-2, reset_interval=3, weight_decay=0.1),
    ),
    "fp16": (
        lambda: FP8Precision(
            "current", compute_dtype="fp16", scaler=ConservativeGradScaler(init_scale=256, growth_interval=3)
        ),
        lambda p: LowBitAdamW(p, lr=1e-2),
    ),
}


class Regression(ranks.Regression):
    """Learns a map from micro-batches that follow from their place in the run.

    Args:
        optimizer: makes it from parameters.
        cut: how parameters are spread: ``"fsdp2"``, ``"tensor parallel"`` or not at all.
    """

    shape = (8, 16, 4)

    def __init__(self, optimizer, cut=""):
        super().__init__(shard=cut == "fsdp2")
        self.optimizer, self.tensor_parallel = optimizer, cut == "tensor parallel"
        self.losses = {}

    def build(self):
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def configure_model(self):
        super().configure_model()
        cut, self.tensor_parallel = self.tensor_parallel, False
        if cut:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.body, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def training_step(self, batch, batch_idx):
        accumulate = self.trainer.accumulate_grad_batches
        at_once = MICRO_BATCHES // accumulate
        place = self.trainer.global_step * MICRO_BATCHES + batch_idx % accumulate * at_once
        place += self.global_rank if at_once > 1 else 0
        x, y = self.inputs(place, batch_idx)
        if self.trainer.precision_plugin.scaler is not None and self.trainer.global_step == OVERFLOW:
            y = 1e6 * y
        loss = F.mse_loss(self((1 + place % 5) * x).float(), y)
        self.losses[place] = loss.item()
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.trainer.model.parameters())


class Keep(Callback):
    """Saves after step ``HALF``, and notes what plugin and monitor know then, or when a resumed training starts."""

    def __init__(self, monitor, path):
        self.monitor, self.path = monitor, path
        self.state = {}

    def on_train_start(self, trainer, pl_module):
        if trainer.global_step:
            self.note(trainer)

    def on_train_batch_end(self, trainer, *_):
        if self.path and not self.state and trainer.global_step == HALF:
            trainer.save_checkpoint(self.path)
            self.note(trainer)

    def note(self, trainer):
        self.state = {"plugin": state(trainer.precision_plugin), "monitor": self.monitor.state_dict()}


def path_of(writer, kind):
    return f"{writer} {kind}.ckpt"


def train(strategy, kind, ckpt_path=None):
    """A run that saves in the midst, or one that goes on from there: losses by micro-batch, weights, states."""
    plugin, optimizer = KINDS[kind]
    make, cut = STRATEGIES[strategy]
    model, monitor = Regression(optimizer, cut), GradientNormMonitor(every_n_steps=1)
    keep = Keep(monitor, None if ckpt_path else path_of(strategy, kind))
    trainer = ranks.trainer(
        plugin(),
        devices=1 if strategy in ALONE else RANKS,
        strategy=make(),
        callbacks=[
            PrecisionSwitch({r"body\.0": "fp8-current"}, step=2),
            PrecisionSwitch("fqt", step=2, steps=3),
            monitor,
            keep,
        ],
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_BATCHES if accumulates(strategy) else 1,
    )
    with patch(f"{NAME}.strategies.fsdp._get_full_state_dict_context", _in_place):
        trainer.fit(model, ckpt_path=ckpt_path)
    return {"losses": model.losses, "weights": model.whole, "state": keep.state}


# By what is trained and writer: who reads it. FSDP1 gives no rank whole rows, as moments in FP8 need them.
READERS = {
    "fp8": {
        "one": ("ddp", "fsdp1 file", "fsdp2 file"),
        "ddp": ("ddp", "fsdp2 file", "one"),
        "fsdp1 file": ("fsdp1 file", "ddp", "one"),
        "fsdp1": ("fsdp1",),
        "fsdp2 file": ("fsdp2 file", "fsdp1 file", "ddp", "one"),
        "fsdp2": ("fsdp2", "tensor parallel", "fsdp2, one rank"),
        "fsdp2, one rank": ("fsdp2", "tensor parallel"),
        "tensor parallel": ("tensor parallel", "fsdp2", "fsdp2, one rank"),
    },
    "fp16": {
        "one": ("fsdp2 file",),
        "ddp": ("ddp", "fsdp2 file", "one"),
        "fsdp2 file": ("ddp", "one"),
        "fsdp2": ("fsdp2", "fsdp2, one rank"),
        "fsdp2, one rank": ("fsdp2",),
    },
}
PAIRS = [(kind, writer, reader) for kind, of in READERS.items() for writer, readers in of.items() for reader in readers]


def accumulates(strategy):
    """Whether one process sees both micro-batches of a step, one after the other."""
    return strategy in (*ALONE, "tensor parallel")


def resumed(kind, writer, reader):
    return f"{path_of(writer, kind)} {reader}"


def work():
    results = {}
    for kind, writers in READERS.items():
        for writer in writers:
            if writer not in ALONE and path_of(writer, kind) in sys.argv[3:]:
                results[path_of(writer, kind)] = train(writer, kind)
    for kind, writer, reader in PAIRS:
        if reader not in ALONE and resumed(kind, writer, reader) in sys.argv[3:]:
            results[resumed(kind, writer, reader)] = train(reader, kind, path_of(writer, kind))
    return results
