"""Warns about options of optimizers and schedulers, such as learning rate and ``T_max``, that a checkpoint overrides.

For a scheduled learning rate or weight decay, the initial values are compared. ``ReduceLROnPlateau`` stores none.
"""

import inspect
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit._torch import schedules_of

Options = Sequence[tuple[str, Mapping[str, Any]]]
"""Class and options of each parameter group, and of each scheduler."""


def asked_options(optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> tuple[Options, Options]:
    """Records the options of optimizers and schedulers (or ``LRSchedulerConfig``) before a checkpoint is loaded."""
    every = [scheduler for config in schedulers for scheduler in _nested(getattr(config, "scheduler", config))]
    groups = [
        (type(optimizer).__name__, _group_options(group, optimizer, bool(every)))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return groups, [(type(scheduler).__name__, _scheduler_options(scheduler)) for scheduler in every]


def overridden(
    asked: tuple[Options, Options], checkpoint: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> list[str]:
    """Lists the options that a checkpoint overrides, such as ``"AdamW: lr 0.001 (asked for: 0.05)"``."""
    states = checkpoint.get("optimizer_states") or [
        {"param_groups": optimizer.param_groups} for optimizer in optimizers
    ]
    groups = [group for state in states for group in state["param_groups"]]
    schedulers = [one for state in checkpoint.get("lr_schedulers", ()) for one in _nested(state)]
    lines = [
        f"{cls}: {name.removeprefix('initial_')} {held} (asked for: {value})"
        for (cls, options), saved in [*zip(asked[0], groups, strict=False), *zip(asked[1], schedulers, strict=False)]
        for name, value in options.items()
        for held in _held(saved, name)
        if held != value
    ]
    return list(dict.fromkeys(lines))  # parameter groups may repeat a line


def warn_overridden(lines: Sequence[str]) -> None:
    if lines:
        rank_zero_warn(
            f"The checkpoint overrides options that this run asks for. In force are: {'; '.join(lines)}. To change "
            "them, set them in a callback's on_train_start; or load the checkpoint's weights alone, with "
            "load_state_dict, and call fit without ckpt_path."
        )


@contextmanager
def explained(optimizer: Any) -> Generator[None, None, None]:
    """Context of a step. A ``KeyError`` of options, which a checkpoint of another optimizer replaced, is explained."""
    try:
        yield
    except KeyError as error:
        groups, names = getattr(optimizer, "param_groups", ()), getattr(optimizer, "defaults", ())
        if not (lacks := [name for name in names if any(name not in group for group in groups)]):
            raise
        raise ValueError(
            f"The checkpoint is of another optimizer than {type(optimizer).__name__}: it holds no {', '.join(lacks)}. "
            "Give the optimizer of its run, or load its weights alone, with load_state_dict."
        ) from error


def _group_options(group: Mapping[str, Any], optimizer: Optimizer, is_scheduled: bool) -> dict[str, Any]:
    # Schedulers that change the momentum store its bounds in the group.
    moved = {"momentum", "betas"} if "base_momentum" in group else set[str]()
    if is_scheduled:
        moved.add("lr")
    # Some optimizers store counters in their groups, next to their options.
    names = optimizer.defaults.keys() & inspect.signature(type(optimizer)).parameters.keys()
    initial = {"initial_lr": _plain(group["initial_lr"])} if is_scheduled and "initial_lr" in group else {}
    return initial | {n: _plain(group[n]) for n in optimizer.defaults if n in names & group.keys() - moved}


def _scheduler_options(scheduler: Any) -> dict[str, Any]:
    names = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch"}
    return {name: _plain(value) for name, value in scheduler.state_dict().items() if name in names}


def _held(saved: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the saved value of an option, if there is one."""
    initial = name if name in ("lr", "initial_lr") else f"initial_{name}"
    return [_plain(saved[key]) for key in (initial, name.removeprefix("initial_")) if key in saved][:1]


def _nested(scheduler: Any) -> list[Any]:
    return [scheduler, *(inner for one in schedules_of(scheduler) for inner in _nested(one))]


def _plain(value: Any) -> Any:
    """Turns tensors into numbers and lists into tuples: checkpoints may hold either."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Counter):  # milestones of MultiStepLR
        return tuple(sorted(value.elements()))
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
