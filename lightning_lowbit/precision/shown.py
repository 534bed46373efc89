"""The ``repr`` of plugins, which is the constructor call that makes an equal one, and the signature of this call."""

import inspect
from collections.abc import Mapping
from typing import Any, Self

from lightning_lowbit.nn.casts.linear_casts import PRESETS, LinearCasts


class Shown:
    """Gives a class the ``repr`` of its constructor call, such as ``FP4Precision('nvfp4', skip=['lm_head'])``.

    The signature that ``help`` and notebooks show has the arguments behind ``**kwargs``, too.
    """

    _arguments: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls).values()))  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Stores the arguments: subclass constructors change them before they reach a base class."""
        made = super().__new__(cls)
        defaults = {name: parameter.default for name, parameter in _parameters(cls).items()}
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


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor by name, and in the place of its ``**kwargs`` those of the next one."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if not issubclass(base, Shown) or "__init__" not in vars(base):
            continue
        _, *own = inspect.signature(base.__init__).parameters.values()
        named = [each for each in own if each.kind is not each.VAR_KEYWORD]
        behind = bool(found)  # then positions are those of the class before
        found |= {p.name: p for p in named if p.name not in found and (not behind or p.kind is p.KEYWORD_ONLY)}
        if len(named) == len(own):  # no **kwargs
            break
    return found


def _show(value: Any) -> str:
    if isinstance(value, LinearCasts):
        return repr(str(value)) if str(value) in PRESETS else f"<{value}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(each)}" for key, each in value.items()) + "}"
    return repr(value)
