"""One of two processes that read one text. The folder holds ``text`` and ``c4``."""

from pathlib import Path

from lightning.pytorch.callbacks import Callback

from tests.recipes.data import runs, streams

RANKS, EPOCHS, STEPS, SAVED = 2, 2, 12, 5
BOTH = {"devices": RANKS, "strategy": "ddp", "limit_val_batches": 0}


class SaveOnce(Callback):
    """Saves after one step, on all ranks together."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == SAVED:
            trainer.save_checkpoint("saved.ckpt")


def text(**trainer):
    return runs.fit(Path("text"), max_epochs=EPOCHS, **BOTH, **trainer).seen


def stream(ckpt_path=None, **trainer):
    return streams.fit(ckpt_path, data={"batch_size": 50}, max_steps=STEPS, **BOTH, **trainer).seen


def work():
    return {
        "text": text(),
        "text, without a sampler": text(use_distributed_sampler=False),
        "stream": stream(callbacks=[SaveOnce()]),
        "stream, resumed": stream(Path("saved.ckpt")),
    }
