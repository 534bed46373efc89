"""The 16-bit dtypes that a device multiplies by instructions of its own (units), and products where it has none.

A CPU without units for bfloat16 or float16 multiplies these by torch's plain loops, in ten times float32's time or
more. A product in float32 of the same operands, rounded once, is what a unit computes, up to the order of its sum.
Layers multiply so themselves; :class:`Float32Products` does it for what is not quantized.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_lowbit._torch import (
    CPU_PRODUCTS,
    OpOverload,
    TorchDispatchMode,
    cpu_has_units,
    innermost_mode,
    is_composite,
    leave_innermost_mode,
    run_composite,
)

_Result = TypeVar("_Result")

_WITHOUT = frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if not cpu_has_units(dtype))


@contextmanager
def cpu_without(*dtypes: torch.dtype) -> Iterator[None]:
    """Takes this CPU in a context for one without units for these dtypes and with units for all others.

    Examples:
        >>> with cpu_without(torch.bfloat16):
        ...     trainer.fit(model)  # as on a CPU with AVX2 alone
    """
    global _WITHOUT
    before, _WITHOUT = _WITHOUT, frozenset(dtypes)
    try:
        yield
    finally:
        _WITHOUT = before


def has_units(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a device multiplies bfloat16 or float16 by instructions of its own; True if it does not tell."""
    if device.type == "cpu":
        return dtype not in _WITHOUT
    if dtype != torch.bfloat16:
        return True
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)  # autocast to bfloat16 needs it
    answer = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    return answer is None or bool(answer(including_emulation=False))


def lacks_units(x: Tensor) -> bool:
    """Returns whether a tensor is on a CPU without units for its dtype, so that its products are float32's."""
    return x.dtype in _WITHOUT and x.is_cpu


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes torch's products of dtypes that this CPU has no units for in float32, and rounds them once.

    It serves forward and backward passes that run within it, also of compiled code.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets models compile: their code calls the products as operations."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rounded = CPU_PRODUCTS.get(func)
        if rounded is None and isinstance(func, OpOverload) and is_composite(func):  # comes whole in inference mode
            return run_composite(func, self, args, kwargs)
        if rounded is None or not lacks_units(args[0]):
            return func(*args, **kwargs)
        dtype, out = args[0].dtype, kwargs.get("out")

        def wide(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype == dtype else x

        if out is not None:  # of compiled code
            rest = {name: wide(x) for name, x in kwargs.items() if name != "out"}
            return out.copy_(func.overloadpacket.default(*map(wide, args), **rest))
        results = func(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()})
        if isinstance(results, Tensor):
            return results.to(dtype)
        return tuple(x.to(dtype) if i < rounded and x is not None else x for i, x in enumerate(results))


def float32_products(dtypes: Iterable[torch.dtype], device: torch.device) -> AbstractContextManager[Any]:
    """Returns :class:`Float32Products` where a model of these dtypes needs them on a device; else, and in a graph that
    is compiled, an empty context."""
    is_eager = not torch.compiler.is_compiling()
    is_slow = is_eager and device.type == "cpu" and not _WITHOUT.isdisjoint(dtypes)
    return Float32Products() if is_slow else nullcontext()  # type: ignore[no-untyped-call]


def multiplies_itself(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a function that computes such products in float32 itself: it leaves :class:`Float32Products`, which
    takes time for each of its operations, unless another mode came later."""

    @wraps(function)
    def wrapper(*args: Any) -> _Result:
        if torch.compiler.is_compiling() or not isinstance(innermost_mode(), Float32Products):
            return function(*args)
        with leave_innermost_mode():
            return function(*args)

    return wrapper
