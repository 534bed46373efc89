"""Modules whose ``forward`` was replaced, as parallel plans of ``transformers`` and hooks of ``accelerate`` do it.

What they set as ``module.forward`` calls a method of the class that the module then had. Conversion changes that class;
so the method is replaced, where it is held, by one that is looked up when it is called.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_LEVELS = 6  # from what was set down to the method: closures, their objects, and the objects of these

Slot = tuple[Any, Callable[[Any], None]]  # a method, and what puts another one in its place


def late_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of the class that a module has when this is called."""
    forward: Any = type(module).forward
    return forward(module, *args, **kwargs)


def replaced_forward(module: nn.Module) -> str | None:
    """What has replaced a module's ``forward`` without calling that of its class; None if nothing has."""
    own = vars(module).get("forward")
    if own is None or any(True for _ in _methods(module)):
        return None
    return getattr(own, "__qualname__", None) or type(own).__name__


def follow_class(module: nn.Module) -> None:
    """Has whatever replaced a module's ``forward`` call that of the class that the module has by then."""
    for method, put in [*_methods(module)]:
        if isinstance(method, MethodType):
            put(partial(late_forward, module))


def _methods(module: nn.Module) -> Iterator[Slot]:
    """Where the forward method of a module's class is held, of those with a ``forward`` of their own."""
    if "forward" not in vars(module):
        return
    seen: set[int] = set()
    for name, held in [*vars(module).items()]:  # accelerate keeps the method beside what replaces it
        if _is_forward(held, module):
            yield held, partial(setattr, module, name)
    yield from _within(vars(module)["forward"], module, seen, _LEVELS)


def _is_forward(held: Any, module: nn.Module) -> bool:
    if isinstance(held, partial):
        return held.func is late_forward and held.args == (module,)
    return isinstance(held, MethodType) and held.__self__ is module and held.__func__ is type(module).forward


def _within(holder: Any, module: nn.Module, seen: set[int], levels: int) -> Iterator[Slot]:
    if levels == 0 or id(holder) in seen or isinstance(holder, (nn.Module, Tensor, type, ModuleType)):
        return
    seen.add(id(holder))
    held: list[Slot] = []
    if isinstance(holder, FunctionType):
        cells = (cell for cell in holder.__closure__ or () if cell != CellType())  # an empty one has no contents
        held += [(cell.cell_contents, partial(setattr, cell, "cell_contents")) for cell in cells]
    held += [(value, partial(setattr, holder, name)) for name, value in getattr(holder, "__dict__", {}).items()]
    for value, put in held:
        if _is_forward(value, module):
            yield value, put
        else:
            yield from _within(value, module, seen, levels - 1)
