"""The ``repr`` of plugins, which is the constructor call that makes an equal one, and the signature of this call."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

from lightning_lowbit._lightning import both_are_imported, goes_with
from lightning_lowbit.checks import nearest
from lightning_lowbit.nn.casts.linear_casts import PRESETS, LinearCasts


class Shown:
    """Gives a class the ``repr`` of its constructor call, such as ``FP4Precision('nvfp4', skip=['lm_head'])``, and the
    signature that ``help`` and notebooks show the arguments behind ``**kwargs``, too."""

    _arguments: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls).values()))  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Stores the arguments: subclass constructors change them before they reach a base class."""
        plugin = super().__new__(cls)
        if unknown := kwargs.keys() - _parameters(cls).keys():
            name = min(unknown)
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{nearest(name, _parameters(cls))}")
        defaults = {name: parameter.default for name, parameter in _parameters(cls).items()}
        first = next(iter(defaults))  # the casts: always shown
        if not args and defaults[first] is not inspect.Parameter.empty:
            kwargs = {first: defaults[first]} | kwargs
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}
        named = {n: v for n, v in kwargs.items() if n == first or defaults.get(n) not in (v, values[n])}
        shown = (_show(value) if name == first else f"{name}={_show(value)}" for name, value in named.items())
        plugin._arguments = ", ".join([*map(_show, args), *shown])
        return plugin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments})"

    def __str__(self) -> str:
        # If the Trainer belongs to the other Lightning, its error message quotes this.
        return f"{self!r} ({goes_with(self)})" if both_are_imported() else repr(self)


def former_arguments(state: Mapping[str, Any], constructor: Callable[..., None]) -> dict[str, Any]:
    """Returns the arguments of a plugin that an earlier version pickled: most of them are attributes in its state."""
    names = inspect.signature(constructor).parameters.keys() & state.keys()
    is_auto = getattr(state.get("_compute"), "is_auto", False)
    return {
        "quantize_output": True,  # of versions without this argument
        **{name: state[name] for name in names},
        "compute_dtype": "auto" if is_auto else state["precision"],
        "scaler": None if state["_scaling"] is None else state["_scaling"].scaler,
    }


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Returns a constructor's parameters by name; the base class's take the place of its ``**kwargs``."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if not issubclass(base, Shown) or "__init__" not in vars(base):
            continue
        _, *every = inspect.signature(base.__init__).parameters.values()
        named = [parameter for parameter in every if parameter.kind is not parameter.VAR_KEYWORD]
        new = [parameter for parameter in named if parameter.name not in parameters]
        # Only the first class has positional arguments.
        parameters |= {p.name: p for p in new if not parameters or p.kind is p.KEYWORD_ONLY}
        if len(named) == len(every):  # no **kwargs
            break
    return parameters


def _show(value: Any) -> str:
    if isinstance(value, LinearCasts):
        return repr(str(value)) if str(value) in PRESETS else f"<{value}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(item)}" for key, item in value.items()) + "}"
    return repr(value)
