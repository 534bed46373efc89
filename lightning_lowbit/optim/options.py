"""The options of the optimizers: a table of checks and messages."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_lowbit.checks import is_number


class Option(NamedTuple):
    is_valid: Callable[[Any], bool]
    needed: str
    advice: str


def _is_decay(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_rate(value: Any) -> bool:
    return (
        value.dim() == 0 and not value.is_complex() if isinstance(value, Tensor) else _is_finite(value) and value >= 0
    )


def _is_betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_decay, value))


def _one_of(*names: str | None) -> Option:
    words = ", ".join("None" if name is None else repr(name) for name in names)
    return Option(lambda value: value in names, f"one of {words}", "names are case-sensitive")


def _flag(advice: str) -> Option:
    return Option(lambda value: isinstance(value, bool), "True or False", advice)


def _not_negative(advice: str) -> Option:
    return Option(lambda value: _is_finite(value) and value >= 0, "a finite number >= 0", advice)


def _positive(advice: str) -> Option:
    return Option(lambda value: _is_finite(value) and value > 0, "a finite number > 0", advice)


_DECAY = Option(_is_decay, "a number in [0, 1)", "it is the decay of an average, such as 0.9")

#: All options of this package's optimizers, by their key in a parameter group.
OPTIONS: dict[str, Option] = {
    "lr": Option(_is_rate, "a finite number >= 0, or a real 0-d tensor", "1e-3 is usual"),
    "betas": Option(_is_betas, "two numbers in [0, 1)", "(0.9, 0.999) is usual"),
    "eps": _positive("it keeps 0/0 away, 1e-8 is usual"),
    "norm_eps": _positive("it keeps 0/0 away, 1e-8 is usual"),
    "weight_decay": _not_negative("pass 0 for none"),
    "maximize": _flag("True ascends"),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3"), _DECAY),
    "spike_threshold": _positive("SPAM's is 5000"),
    "max_norm": _positive("1 is usual"),
    "element_clip": _one_of("ada_clip", "spike_clip", None),
    "norm_clip": _one_of("ada_gn", "grad_clip", None),
    "reset_interval": Option(
        lambda value: value is None or _is_count(value), "an integer >= 1, or None", "None never resets the moments"
    ),
    "warmup_steps": Option(
        lambda value: is_number(value) and (value == 0 or _is_count(value)),
        "an integer >= 0",
        "0 keeps the full rate after a reset",
    ),
    "total_steps": Option(
        lambda value: value is None or _is_count(value),
        "an integer >= 1, or None",
        "it is the length of the run, and None keeps the decays as they are",
    ),
    "matrices_only": _flag("True leaves biases and norms to plain Adam"),
    "moments": _one_of("fp32", "fp8"),
    "master_weights": _one_of("fp16", None),
    "density": Option(
        lambda value: is_number(value) and 1e-9 < value <= 1 and abs(round(1 / value) * value - 1) < 1e-6,
        "1 over an integer",
        "such as 1, 0.5 or 0.25",
    ),
}


def check_options(owner: str, options: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` that names the first option with a wrong value."""
    for name, (is_valid, needed, advice) in OPTIONS.items():
        if name in options and not is_valid(options[name]):
            raise ValueError(f"{owner} needs {name} to be {needed}, got {options[name]!r}; {advice}.")
