"""Random numbers that are the same in a resumed and in an uninterrupted run."""

import random
from typing import Any

import numpy as np
import torch

from lightning_lowbit._lightning import LightningModule, Trainer
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.nn.keys import hash_numbers
from lightning_lowbit.precision.run_settings import global_seed


class ExactResume(LowBitCallback):
    """Seeds torch, NumPy and Python before each training batch, from (seed, optimizer step, batch, rank).

    Lightning's checkpoints hold no random state, so that after a resume dropout draws other numbers. With this callback
    the numbers of a batch are a function of its place in the run, and nothing needs to be stored.

    Loading (the order of data, augmentation) is up to the loader: a plain ``DataLoader`` begins its epoch again after a
    resume. Use one with ``state_dict`` and ``load_state_dict``. A checkpoint from the middle of an accumulation lacks
    the gradients so far: resume from the end of an optimizer step.

    Args:
        seed: any integer; None takes that of ``seed_everything``, or 0.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = global_seed() if seed is None else seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seeds."""
        seed = hash_numbers(self.seed, trainer.global_step, batch_idx, trainer.global_rank) % 2**64
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
