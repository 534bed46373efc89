"""How a plugin is shown: the call that makes another like it."""

from collections.abc import Mapping
from typing import Any, Self

from lightning_lowbit.nn.casts import PRESETS, LinearCasts


class Shown:
    """Has a ``repr`` of the arguments that the constructor was given: ``FP4Precision('nvfp4', skip=['lm_head'])``.

    Casts are named by their preset; those that have none are described, in angle brackets.
    """

    _arguments: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Notes the arguments, before the constructor of a subclass makes others of them."""
        made = super().__new__(cls)
        made._arguments = ", ".join([*map(_show, args), *(f"{name}={_show(value)}" for name, value in kwargs.items())])
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments})"


def _show(value: Any) -> str:
    if isinstance(value, LinearCasts):
        return repr(str(value)) if str(value) in PRESETS else f"<{value}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(each)}" for key, each in value.items()) + "}"
    return repr(value)
