"""Options of optimizers and schedulers that a checkpoint overrides.

``Trainer.fit(ckpt_path=...)`` loads the state of each optimizer and scheduler, and options are part of it: the learning
rate, betas, weight decay, ``T_max``. What a run asks for is then not what it trains with. :func:`asked_options` keeps
the former, :func:`overridden` compares it with the checkpoint: of a scheduled learning rate, and of a weight decay that
a callback switches, the initial values. ``ReduceLROnPlateau`` keeps none.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import rank_zero_warn

Options = Sequence[tuple[str, Mapping[str, Any]]]
"""Class and options of each parameter group, and of each scheduler."""


def asked_options(optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> tuple[Options, Options]:
    """The options of optimizers and schedulers (or ``LRSchedulerConfig``), before a checkpoint is loaded."""
    made = [each for config in schedulers for each in _nested(getattr(config, "scheduler", config))]
    groups = [
        (type(each).__name__, _of_group(group, each, bool(made))) for each in optimizers for group in each.param_groups
    ]
    return groups, [(type(each).__name__, _of_scheduler(each)) for each in made]


def overridden(
    asked: tuple[Options, Options], checkpoint: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> list[str]:
    """The options that a checkpoint overrides, such as ``"AdamW: lr 0.001 (asked for: 0.05)"``.

    Args:
        asked: from :func:`asked_options`.
        checkpoint: with Lightning's keys.
        optimizers: of the run, into which a sharded checkpoint, which holds nothing of them, was loaded already.
    """
    states = checkpoint.get("optimizer_states") or [{"param_groups": each.param_groups} for each in optimizers]
    groups = [group for state in states for group in state["param_groups"]]
    schedulers = [each for state in checkpoint.get("lr_schedulers", ()) for each in _nested(state)]
    lines = [
        f"{cls}: {name.removeprefix('initial_')} {held} (asked for: {value})"
        for (cls, options), saved in [*zip(asked[0], groups, strict=False), *zip(asked[1], schedulers, strict=False)]
        for name, value in options.items()
        for held in _held(saved, name)
        if held != value
    ]
    return list(dict.fromkeys(lines))  # once for all groups


def warn_of(lines: Sequence[str]) -> None:
    """Warns of what :func:`overridden` found."""
    if lines:
        rank_zero_warn(
            f"The checkpoint overrides options that this run asks for. In force are: {'; '.join(lines)}. To change "
            "them in mid-training, set them in a callback's on_train_start, when the checkpoint has been loaded; or "
            "load its weights alone, with load_state_dict, and call fit without ckpt_path."
        )


def _of_group(group: Mapping[str, Any], optimizer: Optimizer, is_scheduled: bool) -> dict[str, Any]:
    # Schedules that change the momentum leave its bounds in the group.
    moved = {"momentum", "betas"} if "base_momentum" in group else set[str]()
    if is_scheduled:
        moved.add("lr")
    # Some optimizers count their steps beside their options.
    names = optimizer.defaults.keys() & inspect.signature(type(optimizer)).parameters.keys()
    initial = {"initial_lr": _plain(group["initial_lr"])} if is_scheduled and "initial_lr" in group else {}
    return initial | {n: _plain(group[n]) for n in optimizer.defaults if n in names & group.keys() - moved}


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    """The arguments of a scheduler that are in its state; ``last_epoch`` is no option."""
    names = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch"}
    return {name: _plain(value) for name, value in scheduler.state_dict().items() if name in names}


def _held(saved: Mapping[str, Any], name: str) -> Iterator[Any]:
    """The value of an option in a saved group or schedule, if it has one."""
    initial = name if name in ("lr", "initial_lr") else f"initial_{name}"
    for key in (initial, name.removeprefix("initial_")):
        if key in saved:
            yield _plain(saved[key])
            return


def _nested(scheduler: Any) -> Iterator[Any]:
    """A scheduler, or its state, and those within it, as in ``SequentialLR``."""
    yield scheduler
    within = scheduler.get("_schedulers") if isinstance(scheduler, Mapping) else getattr(scheduler, "_schedulers", None)
    for each in within or ():
        yield from _nested(each)


def _plain(value: Any) -> Any:
    """Tensors as numbers and lists as tuples, since checkpoints may hold either."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Counter):  # milestones
        return tuple(sorted(value.elements()))
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
