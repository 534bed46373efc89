"""One of two processes that read one text. The folder holds ``text`` and ``c4``."""

from pathlib import Path

from tests.precision.regression_model import On
from tests.recipes.data import runs, streams

RANKS, EPOCHS, STEPS, SAVED = 2, 2, 12, 5
BOTH = {"devices": RANKS, "strategy": "ddp", "limit_val_batches": 0}


def text(**trainer):
    return runs.fit(Path("text"), max_epochs=EPOCHS, **BOTH, **trainer).seen


def save_once(trainer, *_):
    if trainer.global_step == SAVED:
        trainer.save_checkpoint("saved.ckpt")


def stream(ckpt_path=None, **trainer):
    return streams.fit(ckpt_path, data={"batch_size": 50}, max_steps=STEPS, **BOTH, **trainer).seen


def work():
    return {
        "text": text(),
        "text, without a sampler": text(use_distributed_sampler=False),
        "stream": stream(callbacks=[On(on_train_batch_end=save_once)]),
        "stream, resumed": stream(Path("saved.ckpt")),
    }
