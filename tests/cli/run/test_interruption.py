"""Runs that are killed or interrupted, and resumed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.cli.run.commands import lowbit, scalars, write_tiny
from tests.launch import start, wait_for

LONG = [
    "--trainer.max_steps=400",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
    "--trainer.val_check_interval=100",
]


def begin(checkpoint):
    """A run in a process of its own that has saved a checkpoint."""
    process = start(Path("log.txt"), "lightning_lowbit.cli", "fit", "--config=quickstart", "--config=tiny.yaml", *LONG)
    wait_for(checkpoint.exists, process, Path("log.txt"))
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run of 30 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    here = Path.cwd()
    os.chdir(folder)
    write_tiny()
    try:
        assert lowbit(*LONG, "--trainer.limit_val_batches=0", "--trainer.max_steps=400", *stop_after(60)) == 0
    finally:
        os.chdir(here)
    return scalars(folder / "runs/tiny/version_0", "loss")


def stop_after(steps):
    # max_steps decides the step of the switch; a limit on time or epochs would too. So a run is stopped by a callback.
    return [
        f"--trainer.callbacks+={{class_path: tests.cli.run.test_interruption.StopAfter, init_args: {{steps: {steps}}}}}"
    ]


class StopAfter(Callback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.steps


def resume_and_compare(checkpoint, uninterrupted):
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert step < 50, "the machine was so fast that nothing is left to compare"
    assert lowbit(f"--ckpt_path={checkpoint}", *LONG, "--trainer.limit_val_batches=0", *stop_after(60)) == 0
    resumed = scalars("runs/tiny/version_1", "loss")
    assert min(resumed) == step
    assert resumed == {at: loss for at, loss in uninterrupted.items() if at >= step}
    return step


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupt_and_resume(number, status, uninterrupted):
    process = begin(Path("runs/tiny/version_0/checkpoints/last.ckpt"))
    os.kill(process.pid, number)
    process.join(60)
    output = Path("log.txt").read_text()
    assert process.exitcode == status, f"it ended with {process.exitcode}\n{output}"
    assert "Traceback" not in output, output
    assert "To resume: --ckpt_path" in output, output
    resume_and_compare(Path("runs/tiny/version_0/checkpoints/interrupted.ckpt"), uninterrupted)
