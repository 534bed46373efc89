"""Checks of states that come from a file, before anything is loaded from them.

A kind describes a value:

    int, float | None, Tensor      its type; True and False are no numbers
    [kind]                         a list or tuple of any length
    (kind, kind)                   a list or tuple of this length
    {"a": kind, "b?": kind}        a mapping with these entries; b may be missing, others may be there
    {str: kind}                    a mapping with any names
    OneOf(kind, kind)              one of these kinds
    a function                     returns whether the value is valid; its docstring describes valid values
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

NUMBER = int | float

_ADVICE = "it was damaged, or written by another version. Load another checkpoint, or only the weights of this one"


class OneOf:
    """Several kinds, the usual one first."""

    def __init__(self, *kinds: Any) -> None:
        self.kinds = kinds


def check_state(owner: str, state: object, kind: Any, at: str = "") -> None:
    """Raises a ``ValueError`` for a state that is not of a kind.

    Args:
        owner: the name of the state's owner, for the message.
        state: a state, or an entry of one.
        kind: a kind, as the module describes them.
        at: the place of the entry in the state, such as ``".good.1"``.

    Examples:
        >>> check_state("SpikeRollback", {"good": [1.0, "x"]}, {"good": [NUMBER]})
        ValueError: SpikeRollback's state in the checkpoint has good.1 = 'x', which should be a number: …
    """
    if isinstance(kind, OneOf):
        if not any(_conforms(owner, state, one) for one in kind.kinds):
            check_state(owner, state, kind.kinds[0], at)
    elif isinstance(kind, dict):
        _check_mapping(owner, state, kind, at)
    elif isinstance(kind, list | tuple):
        length = f"a list of {len(kind)} values" if isinstance(kind, tuple) else "a list"
        if not isinstance(state, list | tuple) or (isinstance(kind, tuple) and len(state) != len(kind)):
            raise _wrong(owner, at, state, length)
        for index, value in enumerate(state):
            check_state(owner, value, kind[index if isinstance(kind, tuple) else 0], f"{at}.{index}")
    elif not _is(state, kind):
        raise _wrong(owner, at, state, _words(kind))


def count(value: object) -> bool:
    """a whole number, 0 or more"""
    return _is(value, int) and value >= 0  # type: ignore[operator]


def row(value: object) -> bool:
    """one row of floating-point numbers"""
    return isinstance(value, Tensor) and value.dim() == 1 and value.is_floating_point() and is_dense(value)


def _check_mapping(owner: str, state: object, kind: dict[Any, Any], at: str) -> None:
    if not isinstance(state, Mapping):
        raise _wrong(owner, at, state, "a mapping")
    for name, value_kind in kind.items():
        if not isinstance(name, str):  # any names
            for key, value in state.items():
                check_state(owner, key, name, f"{at}.{key}")
                check_state(owner, value, value_kind, f"{at}.{key}")
            continue
        key = name.removesuffix("?")
        if key in state:
            check_state(owner, state[key], value_kind, f"{at}.{key}")
        elif key == name:
            entry = f"{at}.{key}".removeprefix(".")
            needed = "" if isinstance(value_kind, dict | list | tuple | OneOf) else f", {_words(value_kind)}"
            raise ValueError(f"{owner}'s state in the checkpoint lacks the entry {entry}{needed}: {_ADVICE}.")


def _conforms(owner: str, state: object, kind: Any) -> bool:
    try:
        check_state(owner, state, kind)
    except ValueError:
        return False
    return True


def _is(value: object, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool or bool in get_args(kind)
    return isinstance(value, kind) if isinstance(kind, type) or get_args(kind) else kind(value)


def _words(kind: Any) -> str:
    if not isinstance(kind, type) and not get_args(kind):
        return str(kind.__doc__)
    if get_args(kind)[:2] == get_args(NUMBER):
        return "a number" if len(get_args(kind)) == 2 else "a number or None"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _wrong(owner: str, at: str, value: object, needed: str) -> ValueError:
    what = f" has {at.removeprefix('.')} = {shown(value)}, which" if at else f" is {shown(value)} and"
    return ValueError(f"{owner}'s state in the checkpoint{what} should be {needed}: {_ADVICE}.")


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor has a number for each place, as the tensors that this package writes."""
    return tensor.layout == torch.strided and not tensor.is_meta


def shown(value: object) -> str:
    """Returns a value in at most 60 characters; of a tensor, dtype and shape."""
    if isinstance(value, Tensor):
        how = "" if is_dense(value) else " without numbers" if value.is_meta else f" in the layout {value.layout}"
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}{how}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
