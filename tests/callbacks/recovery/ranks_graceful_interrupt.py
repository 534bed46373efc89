"""One of two ranks; the second gets SIGTERM in its third step, or in the sanity check:
``python -m tests.callbacks.recovery.ranks_graceful_interrupt RANK FOLDER step|check``.

The steps it has begun are in ``FOLDER/RANK.txt``.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_lowbit import GracefulInterrupt
from tests.lightning_imports import BoringModel, Callback, quiet_trainer


class Terminate(Callback):
    def __init__(self, steps, when):
        self.steps, self.when = steps, when

    def on_validation_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and self.when == "check":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer, *_):
        self.steps.write_text(str(trainer.global_step + 1))
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def main(rank, folder, when):
    torch.set_num_threads(1)
    # How torchrun tells them; they meet in a file.
    os.environ.update(TORCHELASTIC_RUN_ID="1", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    callbacks = [Terminate(Path(folder, f"{rank}.txt"), when), GracefulInterrupt()]
    check = {"limit_val_batches": 1, "val_check_interval": 8, "num_sanity_val_steps": int(when == "check")}
    run = {"default_root_dir": folder, "devices": 2, "strategy": "ddp", "max_steps": 8}
    quiet_trainer(callbacks=callbacks, **run, **check).fit(BoringModel())


if __name__ == "__main__":
    main(*sys.argv[1:])
