"""Random numbers as a function of the place in the run."""

import random

import numpy as np
import torch

from lightning_lowbit import ExactResume
from tests.lightning_imports import BoringModel, quiet_trainer


class Draws(BoringModel):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return super().training_step(batch, batch_idx)


def draws(**kwargs):
    model = Draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(random.SystemRandom().randrange(2**31))
    quiet_trainer(max_steps=3, accumulate_grad_batches=2, callbacks=[ExactResume(**kwargs)], limit_val_batches=0).fit(
        model
    )
    return model.seen


def test_draws_depend_on_the_place_and_the_seed_alone(monkeypatch):
    first = draws()
    assert len(first) == 6
    for generator in range(3):
        assert len({seen[generator] for seen in first}) == 6, "two micro-batches draw the same numbers"
    assert draws() == first
    assert draws(seed=0) == first
    assert not set(draws(seed=1)) & set(first)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert draws() == draws(seed=1)
