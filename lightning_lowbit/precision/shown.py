"""How a plugin is shown: the call that makes another like it."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Self

from lightning_lowbit.nn.casts import PRESETS, LinearCasts


class Shown:
    """Has a ``repr`` of what the constructor was given, but for defaults: ``FP4Precision('nvfp4', skip=['lm_head'])``.

    Casts are named by their preset; those that have none are described, in angle brackets. Where no argument names
    them, they follow: ``FP8Precision(): fp8-delayed``.
    """

    _arguments: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Notes the arguments, before the constructor of a subclass makes others of them."""
        made = super().__new__(cls)
        parameters = [signature(c.__init__).parameters for c in reversed(cls.__mro__)]  # type: ignore[misc]
        default = {name: parameter.default for each in parameters for name, parameter in each.items()}
        given = {name: value for name, value in kwargs.items() if name not in default or not _is(default[name], value)}
        made._arguments = ", ".join([*map(_show, args), *(f"{name}={_show(value)}" for name, value in given.items())])
        return made

    def __repr__(self) -> str:
        shown = f"{type(self).__name__}({self._arguments})"
        casts = str(getattr(self, "casts", ""))
        return shown if casts in self._arguments or "<" in self._arguments else f"{shown}: {casts}"


def _is(default: Any, value: Any) -> bool:
    """Whether an argument is its default; an empty list is an empty tuple."""
    return bool(default == value) or (default == () and value == [])


def _show(value: Any) -> str:
    if isinstance(value, LinearCasts):
        return repr(str(value)) if str(value) in PRESETS else f"<{value}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(each)}" for key, each in value.items()) + "}"
    return repr(value)
