"""How fast this CPU multiplies codes: a product of a forward pass in NVFP4 with its casts, beside the emulation's and
an unquantized one.

It is measured where it is said, once on a machine for each number of threads and each dtype, and for people alone: the
instruction set decides where GEMMs run (``slower_because``), so that no bit of a result depends on a timing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from lightning_lowbit._torch import disable_current_modes
from lightning_lowbit.compilation import takes_cpp
from lightning_lowbit.kernels import quantize_operand
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.kernels.cpu.library import read_figures, write_figures
from lightning_lowbit.kernels.gemms import code_operand
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.core.gemm import matmul, no_autocast
from lightning_lowbit.nn.native.gemms import results
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.units import has_units

_CPU = torch.device("cpu")
_SIZE = 512  # tokens, and features of the input and of the result
_SECONDS = 0.2  # of rounds, and two at least
_FIGURES = "native", "emulated", "unquantized"
_BUSY = 0.75  # of a product's time: a thread that computes for less of it waits for others, which have no core
_TIE = 1.05  # ratios of times below it are not told from 1

Instant = tuple[float, float]


def now() -> Instant:
    """Returns seconds of time, and those in which this thread has computed."""
    return time.perf_counter(), time.thread_time()


class Times(NamedTuple):
    """The times of one product in seconds, and whether the machine had cores for all threads."""

    native: float
    emulated: float
    unquantized: float
    is_quiet: bool = True


class Speed(NamedTuple):
    """The speed of a CPU's GEMMs of codes."""

    instructions: str  # which multiply codes
    threads: int
    dtype: torch.dtype  # of the computation, and of the product that is not quantized
    times: Times
    is_native: bool = True  # whether the CPU takes these GEMMs, or leaves them out as slower ones

    def __str__(self) -> str:
        native, emulated, unquantized, is_quiet = self.times
        gemms = f"{'Native' if self.is_native else 'Left out'} on this CPU: GEMMs of codes by {self.instructions}"
        if not is_quiet:
            return f"{gemms}. Their speed was not measured: other processes took the cores meanwhile."
        text = (
            f"{gemms}, measured here at {unquantized / native:.2f} times the speed of "
            f"{str(self.dtype).removeprefix('torch.')} and {emulated / native:.2f} times that of the emulation (NVFP4 "
            f"with its casts, {_SIZE} × {_SIZE} × {_SIZE}, {self.threads} thread{'s' * (self.threads > 1)})."
        )
        if self.is_native:
            return text + " The emulation is faster here: backend='emulated' takes it." * (native > _TIE * emulated)
        return text + " They are faster here: backend='native' takes them." * (emulated > _TIE * native)

    def data(self) -> dict[str, Any]:
        """Returns the instructions, and the speed relative to the unquantized product and to the emulation."""
        native, emulated, unquantized, is_quiet = self.times
        return {
            "is_native": self.is_native,
            "instructions": self.instructions,
            "threads": self.threads,
            "speed": unquantized / native,
            "speed_over_emulation": emulated / native,
            "is_quiet": is_quiet,
        }


_source: Callable[[torch.dtype], Times] | None = None  # of `times_from`


@contextmanager
def times_from(source: Callable[[torch.dtype], Times]) -> Iterator[None]:
    """Takes the times that a function returns for a dtype, within this context: nothing is measured, read or written.

    Examples:
        >>> with times_from(lambda dtype: Times(native=1e-3, emulated=2e-3, unquantized=1.5e-3)):
        ...     trainer.fit(model)
    """
    global _source
    previous, _source = _source, source
    try:
        yield
    finally:
        _source = previous


def cpu_speed(dtype: torch.dtype, is_native: bool = True) -> Speed | None:
    """Returns the speed of GEMMs of codes for passes in a dtype, with torch's number of threads, and measures it if no
    process of this machine has; None where the C++ kernels do not multiply codes. ``is_native`` is for the words."""
    if not takes_cpp(_CPU) or dtype not in results("cpu") or (name := instructions()) is None:
        return None
    threads = torch.get_num_threads()
    times = measured(dtype, threads, has_units(dtype, _CPU)) if _source is None else _source(dtype)
    return Speed(name, threads, dtype, times, is_native)


@cache
def measured(dtype: torch.dtype, threads: int, by_units: bool, clock: Callable[[], Instant] = now) -> Times:
    """Returns the times that a file keeps, or those of :func:`measure`, which it then keeps; ``by_units``: whether
    products of this dtype are not float32's."""
    name = f"torch{torch.__version__}-{threads}-{str(dtype).removeprefix('torch.')}{'' if by_units else '-in-float32'}"
    if (figures := read_figures(name, _FIGURES)) is not None:
        native, emulated, unquantized = (figures[field] for field in _FIGURES)
        return Times(native, emulated, unquantized)
    times = measure(dtype, clock)
    if times.is_quiet:
        write_figures(name, dict(zip(_FIGURES, times, strict=False)))
    return times


def measure(dtype: torch.dtype, clock: Callable[[], Instant] = now) -> Times:
    """Measures the three products in turn for about 0.2 s, and returns the shortest time of each."""
    with torch.no_grad(), no_autocast("cpu"), disable_current_modes():
        products = _products(dtype)
        for product in products:
            product()  # memory, caches, and what is made at the first use
        spans: list[list[Instant]] = [[] for _ in products]
        end = clock()[0] + _SECONDS
        while len(spans[0]) < 2 or clock()[0] < end:
            for product, past in zip(products, spans, strict=True):
                start = clock()
                product()
                stop = clock()
                past.append((stop[0] - start[0], stop[1] - start[1]))
    shortest = [min(past) for past in spans]
    is_quiet = all(computed >= _BUSY * seconds for seconds, computed in shortest)
    native, emulated, unquantized = (seconds for seconds, _ in shortest)
    return Times(native, emulated, unquantized, is_quiet)


def _products(dtype: torch.dtype) -> tuple[Callable[[], object], ...]:
    """Returns the products in the order of :class:`Times`."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, w = (torch.randn(_SIZE, _SIZE, generator=generator, device="cpu").to(dtype) for _ in range(2))
    casts = LinearCasts.preset("nvfp4")
    calls = [CastCall(cast, 1) for cast in (casts.fprop_x, casts.fprop_w) if cast is not None]

    def native() -> object:
        return matmul(code_operand(x, calls[0]), code_operand(w, calls[1]).t(), None, dtype)

    def emulated() -> object:
        a, b = (quantize_operand(matrix, call.cast, 1) for matrix, call in zip((x, w), calls, strict=True))
        return matmul(a, b.t(), None, dtype)

    def unquantized() -> object:
        return matmul(Operand(x), Operand(w.t()), None, dtype)

    return native, emulated, unquantized
