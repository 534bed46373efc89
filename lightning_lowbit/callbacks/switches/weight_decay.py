"""Changes the weight decay during training."""

from typing import Any, ClassVar

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, rank_zero_info
from lightning_lowbit.callbacks.switches.base import Switch
from lightning_lowbit.checks import number
from lightning_lowbit.saved_state import NUMBER

# Like "initial_lr" of torch's schedulers: tells, after a switch to 0 and a resume, which groups had a weight decay.
_INITIAL = "initial_weight_decay"


class WeightDecaySwitch(Switch):
    """Sets the weight decay of all optimizers from a step on; parameters without weight decay stay without.

    Ternary weights flip while the latent weights are small; weight decay keeps them small, and without it they settle.
    "The Era of 1-bit LLMs: Training Tips, Code and FAQ" (in the repository microsoft/unilm) goes from 0.1 to 0 halfway,
    where the learning rate drops too. The weight decay in force is saved with the optimizers.

    Args:
        to: the new weight decay, at least 0.
        at: when, as a fraction of all optimizer steps, in [0, 1].
        step: when, as a number of optimizer steps; instead of ``at``.

    Raises:
        ValueError: an argument is out of range, or not exactly one of ``at`` and ``step`` is given.
        MisconfigurationException: an optimizer has no weight decay, or the run's number of steps is unknown.

    Examples:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[WeightDecaySwitch(at=0.5)])
    """

    changes = "weight decay"
    saved: ClassVar[Any] = {"initial?": [[NUMBER | None]]}  # by optimizer and group

    def __init__(self, to: float = 0.0, *, at: float | None = None, step: int | None = None) -> None:
        self.to = number("to", to, "a weight decay", at_least=0)
        super().__init__(at=at, step=step)
        self._initial: list[list[float | None]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if not any("weight_decay" in group for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"WeightDecaySwitch needs optimizers with weight decay, and {type(optimizer).__name__} has none. "
                    "Use one that has, such as AdamW, or leave out the callback."
                )
        # A folder of shards loads no entry of a group that the group does not have.
        for optimizer, values in zip(trainer.optimizers, self._initial, strict=False):
            for group, value in zip(optimizer.param_groups, values, strict=False):
                if value is not None:
                    group.setdefault(_INITIAL, value)
        self._initial = []  # another run may follow
        _note_new_groups(trainer)
        if not any(group.get(_INITIAL) for group in _groups(trainer)):
            raise MisconfigurationException(
                "WeightDecaySwitch changes a weight decay above 0, and here it is 0 for all parameters. Give the "
                "optimizer a weight decay, or leave out the callback."
            )
        super().on_train_start(trainer, pl_module)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _note_new_groups(trainer)
        decaying = [group for group in _groups(trainer) if group.get(_INITIAL)]
        before = sorted({group["weight_decay"] for group in decaying} - {self.to})
        if before:
            rank_zero_info(f"Step {trainer.global_step}: weight decay {', '.join(map(str, before))} -> {self.to}.")
        for group in decaying:
            group["weight_decay"] = self.to

    def proceed(self, trainer: Trainer, pl_module: LightningModule, steps: int) -> bool:
        """Goes on for groups that join, as from ``BaseFinetuning``; later changes by hand stay."""
        for group in _note_new_groups(trainer):
            if group[_INITIAL]:
                group["weight_decay"] = self.to
        return False

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._initial = []

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        initial = [[group.get(_INITIAL) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        return super()._state(trainer) | {"initial": initial}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._initial = state.get("initial", [])


def _note_new_groups(trainer: Trainer) -> list[dict[str, Any]]:
    new = [group for group in _groups(trainer) if "weight_decay" in group and _INITIAL not in group]
    for group in new:
        group[_INITIAL] = group["weight_decay"]
    return new


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
