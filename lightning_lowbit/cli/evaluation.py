"""Evaluation of a checkpoint in the precision of its training, independent of the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import load_checkpoint, state_of


def as_trained(trainer: Mapping[str, Any], path: str | None, weights_only: bool = True) -> dict[str, Any]:
    """Overrides of the Trainer's (instantiated) arguments that evaluate a checkpoint as it was trained.

    Empty if the path is None or not local, the checkpoint does not hold its casts, or the configured plugin has
    ``casts_of_checkpoint=False``.
    """
    plugins = as_list(trainer.get("plugins") or [])
    own = next((plugin for plugin in plugins if isinstance(plugin, LowBitPrecision)), None)
    if path is None or not Path(path).exists() or (own is not None and not own.casts_of_checkpoint):
        return {}
    checkpoint = load_checkpoint(path, weights_only)
    state = state_of(checkpoint)
    if state is None or state.get("trained") is None:
        return {}  # the plugin warns about it
    same: dict[str, Any] = {} if own is None else {"exact": own.exact, "backend": own.backend}
    plugin = LowBitPrecision.from_checkpoint(checkpoint, **same)
    return {"plugins": [*(each for each in plugins if each is not own), plugin], "precision": None}
