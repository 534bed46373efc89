"""Where a hot function finds its fastest form.

The functions that touch every element of an operand are written once, as plain tensor code. :func:`compiled` runs that
code as it stands (the reference) or as machine code generated from it by ``torch.compile``; the results are the same
to the bit. A hand-written kernel for some device belongs in this package and is chosen in this one place.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

_logger = logging.getLogger("lightning_lowbit")

Backend = Literal["auto", "eager", "compiled"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

_backend: Backend = "auto"
_thread = threading.local()
_has_told = False  # that a compilation has failed which the first one had promised

# Generating code takes a second or two per function, so "auto" leaves small operands (tests, toy models) to eager code.
_AUTO_ELEMENTS = 2**16

# The element functions hash, round and scale in some 30 operations. Inductor's defaults cut such a chain in the middle
# and write a float32 temporary of the whole operand; these keep it in registers.
_INDUCTOR_OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
}


_ADVICE = (
    "as eager code: the same bits, several times slower. Installing a C++ compiler (g++ or clang) usually mends it; "
    "where the cache is damaged or its disk full, set TORCHINDUCTOR_CACHE_DIR to an empty folder with room."
)


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Within this context every cast runs on ``name``; ``"auto"`` compiles for operands of at least 2^16 elements.

    Raises:
        ValueError: ``name`` is no backend.
    """
    global _backend
    if name not in ("auto", "eager", "compiled"):
        raise ValueError(f"Unknown backend {name!r}: choose 'auto', 'eager' or 'compiled'.")
    previous, _backend = _backend, name
    try:
        yield
    finally:
        _backend = previous


@contextmanager
def counted_as(*shape: int) -> Iterator[None]:
    """Within this context a matrix product counts as one of this shape: its padding is no work of the model's."""
    previous, _thread.shape = counted_shape(), shape
    try:
        yield
    finally:
        _thread.shape = previous


def counted_shape() -> tuple[int, ...] | None:
    """What :func:`counted_as` says in this thread: rows, inner size, columns; None for a product's own."""
    return getattr(_thread, "shape", None)


def within_cast() -> AbstractContextManager[None]:
    """Within this context matrix products belong to a cast: they are no GEMMs of the model, and not counted as such."""
    return counted_as(0)


def is_within_cast() -> bool:
    """Whether this thread is in :func:`within_cast`."""
    return counted_shape() == (0,)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates ``function(blocks, *tensors_or_none, **static) -> Tensor`` so that it may run compiled.

    ``blocks`` is the blocked view of an operand, in which odd dimensions are the sides of a block. Their sizes become
    constants of the generated code; those of even dimensions stay dynamic, so that one compilation serves all layers.
    Keyword arguments are constants too: hashable, and few different ones.
    """

    @wraps(function)
    def dispatch(blocks: Tensor, *tensors: Tensor | None, **static: Any) -> Tensor:
        # Inside a user's torch.compile the plain code becomes part of the user's graph.
        wanted = _backend == "compiled" or (_backend == "auto" and blocks.numel() >= _AUTO_ELEMENTS)
        if not wanted or torch.compiler.is_compiling() or not _can_compile(blocks.device.type):
            return function(blocks, *tensors, **static)
        layout = tuple(None if tensor is None else _mark_dynamic(tensor) for tensor in (blocks, *tensors))
        return _generate(function, tuple(sorted(static.items())), layout)(blocks, *tensors)

    return dispatch


@cache
def _generate(
    function: Callable[..., Tensor], static: tuple[tuple[str, Any], ...], layout: tuple[tuple[Any, ...] | None, ...]
) -> Callable[..., Tensor]:
    """The compiled function for these constants, and for tensors of this layout (which only tells graphs apart).

    It compiles when it is called, and anew for other sizes: where that fails, it is the plain code from then on.
    """
    constants = dict(static)

    def specialized(*tensors: Tensor | None) -> Tensor:
        return function(*tensors, **constants)

    # Dynamo counts recompilations per code object, and after eight runs eager code in silence: each graph has its own.
    specialized.__code__ = specialized.__code__.replace()
    chosen = torch.compile(specialized, options=_INDUCTOR_OPTIONS)

    def run(blocks: Tensor, *tensors: Tensor | None) -> Tensor:
        nonlocal chosen
        try:
            return chosen(blocks, *tensors)
        except torch.OutOfMemoryError:  # of which plain code needs more
            raise
        except Exception as error:
            if chosen is specialized:
                raise
            result = specialized(blocks, *tensors)  # or else it raises, too, and nothing is wrong with the compiler
            chosen = specialized
            _warn_once(blocks.device.type, error)
            return result

    return run


def _mark_dynamic(tensor: Tensor) -> tuple[Any, ...]:
    """Marks the dimensions that stay dynamic, and returns the tensor's layout: its dtype and which sizes are 1."""
    for dimension in range(0, tensor.dim(), 2):
        if tensor.shape[dimension] > 1:  # a size of one cannot be dynamic: it broadcasts
            torch._dynamo.mark_dynamic(tensor, dimension)
    return (tensor.dtype, *(size == 1 for size in tensor.shape))


@cache
def _can_compile(device_type: str) -> bool:
    """Whether code can be generated here; says so once where it cannot."""
    _tell(f"lightning_lowbit compiles its casts for {device_type!r}: the first steps take some seconds longer.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing the compiler warns, which is an error in some programs
            torch.compile(lambda x: x + 1, options={})(torch.zeros(2, device=device_type))
    except Exception as error:
        warnings.warn(
            f"torch.compile does not work on {device_type!r} here ({_reason(error)}). Casts run {_ADVICE}",
            stacklevel=2,
        )
        return False
    return True


def _tell(message: str) -> None:
    """Says something in the first process: to the logger, where the program has set up logging, or else on stderr."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    if _logger.hasHandlers():
        _logger.info(message)
    elif _logger.level <= logging.INFO:
        print(message, file=sys.stderr, flush=True)


def _warn_once(device_type: str, error: Exception) -> None:
    """Says once that something could not be compiled, though :func:`_can_compile` could."""
    global _has_told
    if not _has_told:
        _has_told = True
        warnings.warn(
            f"torch.compile failed on {device_type!r} ({_reason(error)}). What it fails for runs {_ADVICE}",
            stacklevel=4,
        )


def _reason(error: BaseException) -> str:
    """What went wrong, in one line: of a compiler's output the line with the error, else the innermost cause."""
    chain = [error]
    while (cause := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(cause)
    lines = [line.strip() for each in chain for line in str(each).splitlines()]
    first = next((line.strip() for line in str(chain[-1]).splitlines() if line.strip()), "")
    innermost = f"{type(chain[-1]).__name__}: {first}" if first else type(chain[-1]).__name__
    return next((line for line in lines if "error:" in line), innermost)


def opaque(fake: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that a user's ``torch.compile`` must call and not look into.

    The compiler drops the rounding of what it computes to bfloat16 where only float32 code reads it, and our functions
    are defined on rounded tensors. Inside a compiled graph the function is a custom operator; elsewhere it is itself.

    Args:
        fake: gives empty results of the right shapes and dtypes, from the same arguments: tensors, strings, numbers.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        operator = torch.library.custom_op(f"lightning_lowbit::{function.__name__}", function, mutates_args=())
        operator.register_fake(fake)

        @wraps(function)
        def dispatch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            chosen: Any = operator if torch.compiler.is_compiling() else function
            result: _R = chosen(*args, **kwargs)
            return result

        return dispatch

    return decorate
