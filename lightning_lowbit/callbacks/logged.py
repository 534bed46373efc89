"""What was logged once, and is old."""

from collections.abc import Iterable

from lightning.pytorch import Trainer


def forget_logged(trainer: Trainer, names: Iterable[str]) -> None:
    """Drops metrics that were logged in ``on_train_batch_end``, when the next batch begins.

    Lightning would log a value that was logged once again and again until the end of the epoch, however old.
    """
    assert trainer._results is not None
    for name in names:
        trainer._results.pop(f"on_train_batch_end.{name}", None)
