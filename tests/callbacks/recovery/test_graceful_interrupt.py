"""Ctrl-C, SIGTERM and SLURM's signal in a real Trainer: what is saved, when, and what happens to the signal."""

import multiprocessing
import os
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, SIGUSR1, default_int_handler, getsignal, signal

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
from tests.precision.regression_model import On


class Interrupt(Callback):
    """Sends itself signals, by micro-batch before which they come; notes micro-batches, validations and the end."""

    def __init__(self, signals):
        self.signals = signals
        self.validations, self.seen, self.at_shutdown = [], [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch_idx)
        for number in self.signals.get(batch_idx, []):
            os.kill(os.getpid(), number)

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)

    def on_exception(self, trainer, pl_module, exception):
        self.at_shutdown = getsignal(SIGINT)


@pytest.fixture(autouse=True)
def _handler():
    before = {number: getsignal(number) for number in (SIGTERM, SIGUSR1)}
    yield
    for number, handler in {SIGINT: default_int_handler, **before}.items():
        signal(number, handler)


def fit(*callbacks, ends=None, **kwargs):
    """Eight steps, which may end with an exit status."""
    defaults = {"max_steps": 8, "limit_val_batches": 1, "val_check_interval": 20, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(callbacks=[GracefulInterrupt(), *callbacks], **{**defaults, **kwargs})
    if ends is None:
        trainer.fit(BoringModel())
    else:
        with pytest.raises(SystemExit) as stopped:
            trainer.fit(BoringModel())
        assert stopped.value.code == ends
    return trainer


def saved_step(path="interrupted.ckpt"):
    return torch.load(path, weights_only=True)["global_step"] if Path(path).exists() else None


TWO = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("signals", "how", "ends", "last", "validations", "step"),
    [
        ({2: [SIGINT]}, TWO, 1, 3, [], 2),  # the first of the second step's two micro-batches
        ({1: [SIGINT]}, {"val_check_interval": 2}, 1, 1, [2], 2),
        # validation after the third micro-batch, the end of the step after the fourth
        ({2: [SIGINT]}, {**TWO, "val_check_interval": 3}, 1, 3, [1], 2),
        ({3: [SIGINT, SIGINT]}, {}, 1, 3, [], None),
        ({2: [SIGTERM, SIGTERM], 3: [SIGTERM]}, TWO, 143, 3, [], 2),  # `timeout` sends it to command and group
        ({3: [SIGTERM, SIGINT]}, {}, 1, 3, [], None),
    ],
    ids=["accumulation", "validation", "validation in mid-step", "twice", "SIGTERM", "Ctrl-C after SIGTERM"],
)
def test_the_step_and_a_due_validation_end_and_a_second_ctrl_c_stops_at_once(
    signals, how, ends, last, validations, step
):
    interrupt = Interrupt(signals)
    fit(interrupt, ends=ends, **how)
    assert interrupt.seen == list(range(last + 1))
    assert interrupt.validations == validations
    assert saved_step() == step
    assert ends == 143 or interrupt.at_shutdown is SIG_IGN, "an impatient Ctrl-C would break the shutdown"


def test_saves_beside_the_other_checkpoints_and_says_where(tmp_path, told):
    checkpoint = ModelCheckpoint(tmp_path / "here")
    fit(Interrupt({1: [SIGINT]}), checkpoint, ends=1, limit_val_batches=0, enable_checkpointing=True)
    assert saved_step(tmp_path / "here" / "interrupted.ckpt") == 2
    assert f"To resume: --ckpt_path {tmp_path / 'here' / 'interrupted.ckpt'}" in told.text


@pytest.mark.parametrize("how", [{}, {"val_check_interval": 1}], ids=["step", "validation"])
def test_saves_what_callbacks_behind_it_know_of_the_step(how):
    class Counts(Callback):
        def __init__(self):
            self.ends = self.validations = 0

        def on_train_batch_end(self, *_):
            self.ends += 1

        def on_validation_end(self, *_):
            self.validations += 1

        def state_dict(self):
            return {"ends": self.ends, "validations": self.validations}

    counts, checkpoint = Counts(), ModelCheckpoint()
    trainer = fit(Interrupt({2: [SIGINT]}), counts, checkpoint, ends=1, enable_checkpointing=True, **how)
    saved = torch.load(Path(checkpoint.dirpath, "interrupted.ckpt"), weights_only=True)
    assert saved["callbacks"][counts.state_key] == {"ends": 3, "validations": 3 if how else 0}
    assert trainer.callbacks[-1] is checkpoint


def test_gives_the_signal_back():
    before = getsignal(SIGINT)
    fit(max_steps=2)
    assert getsignal(SIGINT) is before


def test_workers_of_a_loader_leave_it_to_the_trainer(capfd):
    """Ctrl-C reaches all processes of the terminal: the workers inherit the handler, and go on."""

    class InterruptWorkers(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.workers = multiprocessing.active_children()
            if batch_idx in (3, 6):  # the second one would stop the trainer at once
                for worker in self.workers:
                    os.kill(worker.pid, SIGINT)

    class Loader(DataLoader):
        def __iter__(self):  # starts its workers when the first batch is wanted
            yield from super().__iter__()

    interrupt = InterruptWorkers()
    trainer = quiet_trainer(max_steps=20, callbacks=[GracefulInterrupt(), interrupt])
    trainer.fit(BoringModel(), Loader(RandomDataset(32, 64), num_workers=2))
    assert trainer.global_step == 20 and len(interrupt.workers) == 2
    assert "Interrupted" not in capfd.readouterr().err


def test_sigterm_before_the_first_step_ends_with_143():
    early = On(on_validation_batch_start=lambda *_: os.kill(os.getpid(), SIGTERM))
    fit(early, seen := Interrupt({}), ends=143, num_sanity_val_steps=2, limit_val_batches=2)
    assert not seen.seen


@pytest.mark.parametrize("number, status", [(SIGINT, 1), (SIGTERM, 143)])
def test_a_signal_after_the_last_step_stops_what_would_follow(number, status):
    late = On(on_train_end=lambda *_: os.kill(os.getpid(), number))
    checkpoint = ModelCheckpoint(save_last=True, every_n_epochs=1)
    fit(late, checkpoint, ends=status, max_steps=2, enable_checkpointing=True)
    assert saved_step(checkpoint.last_model_path) == 2


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_that_was_ignored_stays_ignored(number):
    signal(number, SIG_IGN)
    assert fit(Interrupt({0: [number], 1: [number]}), max_steps=2).global_step == 2
    assert getsignal(number) is SIG_IGN


def test_a_handler_of_the_user_hears_sigterm_too():
    heard = []
    signal(SIGTERM, lambda *_: heard.append(True))
    fit(Interrupt({1: [SIGTERM]}), ends=143)
    assert heard == [True] and saved_step() == 2


@pytest.mark.fast("step-steps0")
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
    assert saved_step() == (3 if steps else None)


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """What a task of SLURM sees, and a command that writes down how it is called."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    (tmp_path / "scontrol").chmod(0o755)
    known = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "NNODES": "1"}
    for name, value in {**known, **dict.fromkeys(("PROCID", "LOCALID", "NODEID"), "0")}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_slurms_requeue_saves_at_the_end_of_the_step_and_sigterm_after_it_too(slurm, tmp_path):
    requeue = Interrupt({2: [SIGUSR1], 6: [SIGTERM]})  # each before the first of a step's two micro-batches
    fit(requeue, ends=143, plugins=[SLURMEnvironment()], **TWO)
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    assert saved_step("hpc_ckpt_1.ckpt") == 2
    assert requeue.seen == list(range(8)) and saved_step() == 4
    resumed = fit(plugins=[SLURMEnvironment()], max_steps=3, **TWO)
    assert resumed.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt"), "Lightning goes on from its own"


def test_a_handler_that_the_user_has_for_slurms_signal_stays(slurm):
    heard = []

    class Look(Interrupt):
        def on_train_batch_start(self, *arguments):
            super().on_train_batch_start(*arguments)
            assert heard, "it waits for the end of the step"

    signal(SIGUSR1, lambda *_: heard.append(True))
    fit(Look({0: [SIGUSR1]}), max_steps=2, plugins=[SLURMEnvironment()])
