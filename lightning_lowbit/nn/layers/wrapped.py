"""Modules whose ``forward`` was replaced, as parallel plans of ``transformers`` and hooks of ``accelerate`` do it.

The function that they set as ``module.forward`` calls a method of the class that the module then had. Conversion
changes that class; so the method is replaced, where it is held, by one that is looked up when it is called.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_LEVELS = 6  # from the replacement down to the method: closures, their objects, and the objects of these

Slot = tuple[Any, Callable[[Any], None]]  # a method, and a function that puts another one in its place


def late_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the ``forward`` of a module's class, looked up at the time of the call."""
    forward: Any = type(module).forward
    return forward(module, *args, **kwargs)


def replaced_forward(module: nn.Module) -> str | None:
    """Returns the name of a function that replaces ``forward`` without calling the class's own; None without one."""
    forward = vars(module).get("forward")
    if forward is None or any(True for _ in _methods(module)):
        return None
    return getattr(forward, "__qualname__", None) or type(forward).__name__


def follow_class(module: nn.Module) -> None:
    """Lets a function that replaces a module's ``forward`` call the ``forward`` of the module's class at that time."""
    for method, put in [*_methods(module)]:
        if isinstance(method, MethodType):
            put(partial(late_forward, module))


def _methods(module: nn.Module) -> Iterator[Slot]:
    """Finds the class's ``forward`` in the function that replaces it on a module, and beside that function."""
    if "forward" not in vars(module):
        return
    for name, value in [*vars(module).items()]:  # accelerate keeps the method beside its replacement
        if _is_forward(value, module):
            yield value, partial(setattr, module, name)
    yield from _within(vars(module)["forward"], module, set(), _LEVELS)


def _is_forward(value: Any, module: nn.Module) -> bool:
    if isinstance(value, partial):
        return value.func is late_forward and value.args == (module,)
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward


def _within(holder: Any, module: nn.Module, seen: set[int], levels: int) -> Iterator[Slot]:
    if levels == 0 or id(holder) in seen or isinstance(holder, (nn.Module, Tensor, type, ModuleType)):
        return
    seen.add(id(holder))
    slots: list[Slot] = []
    if isinstance(holder, FunctionType):
        cells = (cell for cell in holder.__closure__ or () if cell != CellType())  # an empty one has no contents
        slots += [(cell.cell_contents, partial(setattr, cell, "cell_contents")) for cell in cells]
    slots += [(value, partial(setattr, holder, name)) for name, value in getattr(holder, "__dict__", {}).items()]
    for value, put in slots:
        if _is_forward(value, module):
            yield value, put
        else:
            yield from _within(value, module, seen, levels - 1)
