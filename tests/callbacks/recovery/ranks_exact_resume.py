"""One of two processes that note what they draw, under the strategies that the caller names."""

import sys

import torch

from lightning_lowbit import ExactResume
from tests.ranks import RANKS, STRATEGIES, Regression, trainer


class Draws(Regression):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def work():
    """Draws by strategy. The ranks were given two seeds: of one that launches others, the environment is another."""
    results = {}
    for strategy in sys.argv[3:]:
        callbacks = [ExactResume(int(sys.argv[1]))]
        trainer(max_steps=2, devices=RANKS, strategy=STRATEGIES[strategy](), callbacks=callbacks).fit(model := Draws())
        results[strategy] = model.seen
    return results
