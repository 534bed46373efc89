"""Runs that are killed or interrupted, and resumed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.cli.run.commands import lowbit, scalars
from tests.launch import start, wait_for

LONG = [
    "--trainer.max_steps=400",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
    "--trainer.val_check_interval=100",
]


class Stop(Callback):
    """After 60 steps: max_steps decides the step of the switch, and a limit on time or epochs would, too."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 60


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupt_and_resume(number, status):
    process = start(Path("log.txt"), "lightning_lowbit.cli", "fit", "--config=quickstart", "--config=tiny.yaml", *LONG)
    checkpoints = Path("runs/tiny/version_0/checkpoints")
    wait_for((checkpoints / "last.ckpt").exists, process, Path("log.txt"))
    os.kill(process.pid, number)
    process.join(60)
    output = Path("log.txt").read_text()
    assert process.exitcode == status, f"it ended with {process.exitcode}\n{output}"
    assert "Traceback" not in output, output
    assert "To resume: --ckpt_path" in output, output
    step = torch.load(checkpoints / "interrupted.ckpt", weights_only=True)["global_step"]
    assert step < 50, "the machine was so fast that nothing is left to compare"
    alone = ["--trainer.limit_val_batches=0", "--trainer.callbacks+=tests.cli.run.test_interruption.Stop"]
    for more in ([f"--ckpt_path={checkpoints / 'interrupted.ckpt'}"], []):
        assert lowbit(*LONG, *alone, *more) == 0
    resumed, whole = (scalars(f"runs/tiny/version_{number}", "loss") for number in (1, 2))
    assert resumed == {at: loss for at, loss in whole.items() if at >= step}
