"""One of two processes of which the second is killed.

``python -m tests.precision.checkpoints.ranks_killed RANK FOLDER FATE``.

The fate is ``"nothing"``, ``"in a step"`` or ``"in a save"``. A run goes on from the last checkpoint, if there is one.
Where it came from and the weights at its end lie in ``FOLDER/FATE RANK.pt``.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_lowbit import CrashSafeCheckpoint, FP4Precision, StableSPAM
from tests.lightning_imports import Callback, LightningModule, ModelParallelStrategy, Trainer, quiet_trainer
from tests.precision.checkpoints.ranks import RANKS, STEPS, Regression

SAVED = 2  # steps between checkpoints
DIES = {"in a step": 5, "in a save": 6}  # steps taken when rank 1 is killed
NOTICED = 30  # seconds in which a process misses another one; Lightning's strategies wait for 30 minutes


class Die(Callback):
    """Kills rank 1 before a step, or before it opens its shard of a checkpoint."""

    def __init__(self, fate: str) -> None:
        self.fate, self.steps, self.came_from = fate, 0, 0
        sys.addaudithook(self.hear)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.came_from = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.fate == "in a step" and trainer.global_step == DIES[self.fate] and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps = trainer.global_step

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_due = self.fate == "in a save" and self.steps == DIES[self.fate]
        if is_due and event == "open" and str(arguments[0]).endswith("__1_0.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)


def train(fate, folder):
    model, die = Regression(lambda p: StableSPAM(p, lr=1e-2, reset_interval=3), "fsdp2"), Die(fate)
    quiet_trainer(
        FP4Precision("nvfp4"),
        devices=RANKS,
        strategy=ModelParallelStrategy(RANKS, 1),
        callbacks=[die, CrashSafeCheckpoint(folder, every_n_train_steps=SAVED, save_last=True, save_top_k=0)],
        max_steps=STEPS,
        use_distributed_sampler=False,
        enable_checkpointing=True,
    ).fit(model, ckpt_path="last")
    return {"weights": model.whole, "came from": die.came_from}


def main(rank, folder, fate):
    os.environ.update(LOCAL_RANK=rank, NODE_RANK="0", WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    os.chdir(folder)
    meet = f"file://{Path(folder)}/store of {fate}"
    timeout = timedelta(seconds=NOTICED)
    dist.init_process_group("gloo", init_method=meet, timeout=timeout, rank=int(rank), world_size=RANKS)
    if fate == "nothing":
        torch.save(train(fate, "uninterrupted"), f"uninterrupted {rank}.pt")
    torch.save(train(fate, "checkpoints"), f"{fate} {rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
