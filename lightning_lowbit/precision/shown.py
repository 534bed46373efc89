"""The ``repr`` of plugins: the constructor call that makes an equal one."""

import inspect
from collections.abc import Mapping
from typing import Any, Self

from lightning_lowbit.nn.casts import PRESETS, LinearCasts


class Shown:
    """Gives a class the ``repr`` of its constructor call, such as ``FP4Precision('nvfp4', skip=['lm_head'])``."""

    _arguments: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Stores the arguments: subclass constructors change them before they reach a base class."""
        made = super().__new__(cls)
        defaults = _defaults(cls)
        first = next(iter(defaults))  # the casts: always shown
        if not args and defaults[first] is not inspect.Parameter.empty:
            kwargs = {first: defaults[first]} | kwargs
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}
        named = {n: v for n, v in kwargs.items() if n == first or defaults.get(n) not in (v, given[n])}
        shown = (_show(value) if name == first else f"{name}={_show(value)}" for name, value in named.items())
        made._arguments = ", ".join([*map(_show, args), *shown])
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments})"


def _defaults(cls: type) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if issubclass(base, Shown) and "__init__" in vars(base):
            _, *parameters = inspect.signature(base.__init__).parameters.values()
            for each in parameters:
                defaults.setdefault(each.name, each.default)
    return defaults


def _show(value: Any) -> str:
    if isinstance(value, LinearCasts):
        return repr(str(value)) if str(value) in PRESETS else f"<{value}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(each)}" for key, each in value.items()) + "}"
    return repr(value)
