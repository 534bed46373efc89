"""Evaluation of a checkpoint in the precision of its training, whatever the configuration says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lowbit.cli.configs import as_list
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import load_checkpoint, state_of


def as_trained(trainer: Mapping[str, Any], path: str | None, weights_only: bool = True) -> dict[str, Any]:
    """Arguments of the Trainer to override, so that it evaluates a checkpoint as it was trained.

    Args:
        trainer: the instantiated arguments of the configuration.
        path: of the checkpoint; None, or a path that is not local, overrides nothing.
        weights_only: as in ``torch.load``.

    Returns:
        The overrides; empty if the checkpoint does not hold its casts, or the configured plugin has
        ``casts_of_checkpoint=False``.
    """
    plugins = as_list(trainer.get("plugins") or [])
    own = next((plugin for plugin in plugins if isinstance(plugin, LowBitPrecision)), None)
    if path is None or not Path(path).exists() or (own is not None and not own.casts_of_checkpoint):
        return {}
    checkpoint = load_checkpoint(path, weights_only)
    state = state_of(checkpoint)
    if state is None or state.get("trained") is None:
        return {}  # the plugin warns of it
    same: dict[str, Any] = {} if own is None else {"exact": own.exact, "backend": own.backend}
    plugin = LowBitPrecision.from_checkpoint(checkpoint, **same)
    return {"plugins": [*(each for each in plugins if each is not own), plugin], "precision": None}
