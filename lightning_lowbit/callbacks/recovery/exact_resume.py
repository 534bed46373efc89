"""The same random numbers in a resumed run as in an uninterrupted one."""

import random
from typing import Any

import numpy as np
import torch

from lightning_lowbit._lightning import LightningModule, Trainer
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.nn.state.keys import hash_numbers
from lightning_lowbit.precision.run_settings import global_seed


class ExactResume(LowBitCallback):
    """Seeds torch, NumPy and Python before each training batch, from (seed, optimizer step, batch, rank).

    Lightning's checkpoints hold no random state, so dropout draws other numbers after a resume. With this callback, the
    random numbers of a batch depend only on its place in the run.

    The order of data is up to the loader: a plain ``DataLoader`` restarts its epoch after a resume. Use one with
    ``state_dict`` and ``load_state_dict``. A checkpoint from the middle of gradient accumulation lacks the accumulated
    gradients: resume from the end of an optimizer step.

    Args:
        seed: any integer; None takes that of ``seed_everything``, or 0.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[ExactResume()])
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = global_seed() if seed is None else seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seed = hash_numbers(self.seed, trainer.global_step, batch_idx, trainer.global_rank) % 2**64
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
