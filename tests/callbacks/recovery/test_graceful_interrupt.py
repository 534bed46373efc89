"""Ctrl-C, SIGTERM and SLURM's signal in a real Trainer: what is saved, when, and what happens to the signal."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import GracefulInterrupt
from tests.launch import LIMIT, start
from tests.lightning_imports import (
    BoringModel,
    Callback,
    ModelCheckpoint,
    RandomDataset,
    SLURMEnvironment,
    quiet_trainer,
)


class Interrupt(Callback):
    """Sends a signal before a micro-batch, and notes validations and the end."""

    def __init__(self, *batches, number=signal.SIGINT):
        self.batches, self.number = batches, number
        self.validations, self.seen, self.at_shutdown = [], [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch_idx)
        for _ in range(self.batches.count(batch_idx)):
            os.kill(os.getpid(), self.number)

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)

    def on_exception(self, trainer, pl_module, exception):
        self.at_shutdown = signal.getsignal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in {signal.SIGINT: signal.default_int_handler, **before}.items():
        signal.signal(number, handler)


def fit(interrupt, **kwargs):
    defaults = {"max_steps": 8, "limit_val_batches": 1, "val_check_interval": 20, "num_sanity_val_steps": 0}
    callbacks = [*kwargs.pop("callbacks", []), interrupt, GracefulInterrupt()]
    trainer = quiet_trainer(callbacks=callbacks, **{**defaults, **kwargs})
    if not interrupt.batches:
        trainer.fit(BoringModel())
    else:
        with pytest.raises(SystemExit) as stopped:
            trainer.fit(BoringModel())
        assert stopped.value.code == (1 if interrupt.number == signal.SIGINT else 143)
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
    trainer = quiet_trainer(
        max_steps=4,
        callbacks=[interrupt, GracefulInterrupt(), checkpoint],
        limit_val_batches=0,
        enable_checkpointing=True,
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
    trainer = quiet_trainer(max_steps=20, callbacks=[GracefulInterrupt(), interrupt])
    trainer.fit(BoringModel(), Loader(RandomDataset(32, 64), num_workers=2))
    assert trainer.global_step == 20 and len(interrupt.workers) == 2
    assert "Interrupted" not in capfd.readouterr().err


# --- SIGTERM ---


def test_sigterm_finishes_the_step_saves_and_ends_with_143():
    interrupt = Interrupt(2, 2, 3, number=signal.SIGTERM)  # `timeout` sends it to the command and to its group
    fit(interrupt, accumulate_grad_batches=2)
    assert interrupt.seen == [0, 1, 2, 3]
    assert saved_step() == 2


def test_sigterm_before_the_first_step_ends_with_143():
    class Early(Callback):
        def on_validation_batch_start(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)

    early = Interrupt(0, number=signal.SIGTERM)
    fit(early, callbacks=[Early()], num_sanity_val_steps=2, limit_val_batches=2)
    assert not early.seen


def test_ctrl_c_after_sigterm_stops_at_once():
    class Both(Interrupt):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.seen.append(batch_idx)
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)

    interrupt = Both(3)
    fit(interrupt)
    assert interrupt.seen[-1] == 3 and not Path("interrupted.ckpt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_stays_ignored(number):
    class Look(Interrupt):
        def on_train_batch_start(self, *_):
            self.seen.append(signal.getsignal(number))
            os.kill(os.getpid(), number)

    signal.signal(number, signal.SIG_IGN)
    look = Look()
    assert fit(look, max_steps=2).global_step == 2
    assert look.seen == [signal.SIG_IGN] * 2
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_handler_of_the_user_hears_sigterm_too():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    fit(Interrupt(1, number=signal.SIGTERM))
    assert heard == [True] and saved_step() == 2


@pytest.mark.parametrize("when, steps", [("step", ["3", "3"]), ("check", [])])
def test_all_ranks_stop_where_one_has_the_signal(tmp_path, when, steps):
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [
        start(log, "tests.callbacks.recovery.ranks_graceful_interrupt", str(rank), str(tmp_path), when)
        for rank, log in enumerate(logs)
    ]
    for rank in ranks:
        rank.join(LIMIT)
    told = "\n".join(log.read_text()[-3000:] for log in logs)
    assert [rank.exitcode for rank in ranks] == [143, 143], told
    assert [path.read_text() for path in sorted(tmp_path.glob("?.txt"))] == steps, told
    assert saved_step(tmp_path / "interrupted.ckpt") == 3 if steps else not (tmp_path / "interrupted.ckpt").exists()


# --- SLURM ---


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """What a task of SLURM sees, and a command that writes down how it is called."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    (tmp_path / "scontrol").chmod(0o755)
    known = {
        "JOB_ID": "7",
        "JOB_NAME": "train",
        "NTASKS": "1",
        "NNODES": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
    }
    for name, value in known.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_slurms_requeue_saves_at_the_end_of_the_step_and_sigterm_after_it_too(slurm, tmp_path):
    class Requeue(Interrupt):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.number = signal.SIGUSR1 if batch_idx == 2 else signal.SIGTERM
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    requeue = Requeue(2, 6)  # each before the first of a step's two micro-batches
    fit(requeue, accumulate_grad_batches=2, plugins=[SLURMEnvironment()])
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    assert saved_step("hpc_ckpt_1.ckpt") == 2
    assert requeue.seen == list(range(8)) and saved_step() == 4
    resumed = fit(Interrupt(), accumulate_grad_batches=2, plugins=[SLURMEnvironment()], max_steps=3)
    assert resumed.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt"), "Lightning goes on from its own"


def test_a_handler_that_the_user_has_for_slurms_signal_stays(slurm):
    heard = []

    class Look(Interrupt):
        def on_train_batch_start(self, *_):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard, "it waits for the end of the step"

    signal.signal(signal.SIGUSR1, lambda *_: heard.append(True))
    fit(Look(), max_steps=2, plugins=[SLURMEnvironment()])
