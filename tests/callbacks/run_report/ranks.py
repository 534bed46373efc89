"""One of two processes that train with a report."""

import torch

from tests.callbacks.run_report.runs import Known, trainer
from tests.lightning_imports import BoringModel, CSVLogger

RANKS, STEPS = 2, 4


class Shared(Known):
    """Logs which process it is."""

    def training_step(self, batch, batch_idx):
        self.k = self.trainer.global_step + 1
        self.log("rank", torch.tensor(float(self.trainer.global_rank)), on_step=True, on_epoch=True, sync_dist=True)
        return BoringModel.training_step(self, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(float(self.trainer.global_rank)), sync_dist=True)


def work():
    logger = CSVLogger(".", name=None)
    made = trainer(devices=RANKS, strategy="ddp", logger=logger, max_steps=STEPS, limit_train_batches=2)
    made.fit(Shared())
    return {}
