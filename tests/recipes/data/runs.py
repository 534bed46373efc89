"""Runs that record the batches they see."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_lowbit.recipes.data import TextDataModule
from tests.lightning_imports import quiet_trainer

SIZES = {"sequence_length": 8, "batch_size": 2}


class Recorder(LightningModule):
    """Remembers the batches it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        torch.rand(3)  # moves the global generator, as dropout would
        return self.weight * batch.float().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(path, ckpt_path=None, num_workers=0, data=None, **trainer):
    """A quiet run on the CPU."""
    model = Recorder()
    module = TextDataModule(str(path), **{"val_fraction": 0.25, "num_workers": num_workers, **SIZES, **(data or {})})
    quiet_trainer(**{"devices": 1, **trainer}).fit(model, datamodule=module, ckpt_path=ckpt_path)
    return model


def assert_refused(path, message, **arguments):
    """That a run over data ends with one line, before it writes anything."""
    root = Path("run")
    root.mkdir(exist_ok=True)
    settings = {"accelerator": "cpu", "default_root_dir": root, "logger": TensorBoardLogger(root), "max_steps": 1}
    with pytest.raises(ValueError, match=message) as error:
        Trainer(**settings).fit(Recorder(), datamodule=TextDataModule(path, **arguments))
    assert "\n" not in str(error.value) and not list(root.iterdir())


class SaveAlways(Callback):
    """Saves after each optimizer step and after each epoch, at the moments of ``ModelCheckpoint``."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        file = self.folder / f"step{trainer.global_step}.ckpt"
        if not file.exists():  # with accumulation, a batch need not end a step
            trainer.save_checkpoint(file)

    def on_train_epoch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"epoch{trainer.current_epoch}.ckpt")
