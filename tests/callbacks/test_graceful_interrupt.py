"""Ctrl-C in a real Trainer: what is saved, when, and what happens to the signal."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import GracefulInterrupt
from tests.lightnings import BoringModel, Callback, ModelCheckpoint, RandomDataset, Trainer


class Interrupt(Callback):
    """Sends SIGINT before a micro-batch, and notes validations and the end."""

    def __init__(self, *batches):
        self.batches = batches
        self.validations, self.seen, self.at_shutdown = [], [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch_idx)
        for _ in range(self.batches.count(batch_idx)):
            os.kill(os.getpid(), signal.SIGINT)

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)

    def on_exception(self, trainer, pl_module, exception):
        self.at_shutdown = signal.getsignal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler():
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fit(interrupt, **kwargs):
    defaults = {
        "max_steps": 8,
        "limit_val_batches": 1,
        "val_check_interval": 20,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", callbacks=[interrupt, GracefulInterrupt()], **{**defaults, **kwargs})
    if not interrupt.batches:
        trainer.fit(BoringModel())
    else:
        with pytest.raises(SystemExit):
            trainer.fit(BoringModel())
    return trainer


def saved_step(path="interrupted.ckpt"):
    return torch.load(path, weights_only=True)["global_step"]


def test_finishes_the_accumulation(tmp_path):
    interrupt = Interrupt(2)  # the first of the second step's three micro-batches
    fit(interrupt, accumulate_grad_batches=2)
    assert interrupt.seen == [0, 1, 2, 3]
    assert saved_step() == 2
    assert interrupt.at_shutdown is signal.SIG_IGN, "an impatient Ctrl-C would break the shutdown"


def test_a_due_validation_comes_first():
    interrupt = Interrupt(1)
    fit(interrupt, val_check_interval=2)
    assert interrupt.validations == [2]
    assert interrupt.seen == [0, 1]
    assert saved_step() == 2


def test_a_validation_in_the_middle_of_a_step_is_no_end_of_it():
    interrupt = Interrupt(2)  # validation after the third micro-batch, the end of the step after the fourth
    fit(interrupt, accumulate_grad_batches=2, val_check_interval=3)
    assert interrupt.validations == [1]
    assert interrupt.seen == [0, 1, 2, 3]
    assert saved_step() == 2


def test_second_interrupt_stops_at_once():
    interrupt = Interrupt(3, 3)
    fit(interrupt)
    assert interrupt.seen[-1] == 3
    assert not Path("interrupted.ckpt").exists()


def test_saves_beside_the_other_checkpoints(tmp_path):
    interrupt, checkpoint = Interrupt(1), ModelCheckpoint(tmp_path / "here")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[interrupt, GracefulInterrupt(), checkpoint],
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(SystemExit):
        trainer.fit(BoringModel())
    assert saved_step(tmp_path / "here" / "interrupted.ckpt") == 2


def test_gives_the_signal_back():
    before = signal.getsignal(signal.SIGINT)
    fit(Interrupt(), max_steps=2)
    assert signal.getsignal(signal.SIGINT) is before


def test_workers_of_a_loader_leave_it_to_the_trainer(capfd):
    """Ctrl-C reaches all processes of the terminal: the workers inherit the handler, and go on."""

    class InterruptWorkers(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.workers = multiprocessing.active_children()
            if batch_idx in (3, 6):  # the second one would stop the trainer at once
                for worker in self.workers:
                    os.kill(worker.pid, signal.SIGINT)

    class Loader(DataLoader):
        def __iter__(self):  # starts its workers when the first batch is wanted
            yield from super().__iter__()

    interrupt = InterruptWorkers()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=20,
        callbacks=[GracefulInterrupt(), interrupt],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), Loader(RandomDataset(32, 64), num_workers=2))
    assert trainer.global_step == 20 and len(interrupt.workers) == 2
    assert "Interrupted" not in capfd.readouterr().err
