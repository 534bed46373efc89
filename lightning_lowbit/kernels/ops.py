"""Operations of kernels: a row for each names its implementations, and :func:`run` chooses among them.

All implementations give the same bits. Before a Triton kernel is first used on a device, in each form that Triton
compiles, a sample is compared with the plain code. A kernel that differs, or fails to compile or launch, is left to the
plain code, with one warning.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.compilation import backend, is_captured, kernels_for, opaque, refuse_in_capture, takes_cpp
from lightning_lowbit.kernels.memory import Misfit, is_dense, resolved
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.shard import Shard

_OPERATIONS: dict[str, "Operation"] = {}  # by name, of all rows
_warned: set[tuple[str, torch.device]] = set()


@dataclass(eq=False)
class Operation:
    """An operation and its implementations, functions of the same arguments, the first of which is a tensor.

    Attributes:
        name: the results, for warnings: "operands".
        plain: the specification, which serves where no kernel does. Under ``backend("eager")`` it calls no kernel.
        cpp: the kernel for CPUs, or None; it returns None for arguments that it does not take.
        triton: the kernel for GPUs, or None.
        form: the constants of the Triton kernel on which its bits may depend, hashable; None for arguments that it does
            not take.
        sample: arguments of a form on a device, on which the kernel is compared; None where no kernel serves the form.
        empty: memory for the results of an operation on a matrix and a :class:`CastCall`, which compiled graphs need.
    """

    name: str
    plain: Callable[..., Any]
    cpp: Callable[..., Any] | None = None
    triton: Callable[..., Any] | None = None
    form: Callable[..., Hashable | None] = lambda *arguments: ()
    sample: Callable[[Any, torch.device], tuple[Any, ...] | None] = lambda form, device: None
    empty: Callable[[Tensor, CastCall], Iterable[Tensor | None]] | None = None
    _verdicts: dict[tuple[Hashable, torch.device], bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _OPERATIONS[self.name] = self

    def is_served(self, form: Hashable, device: torch.device) -> bool:
        """Returns whether the Triton kernel serves a form on a device, after a comparison when this is first asked."""
        verdict = self._verdicts.get((form, device))
        if verdict is None:
            refuse_in_capture(f"a kernel for {self.name}")
            verdict = self._verdicts[form, device] = False  # a warning may be an error: nothing is compared again
            if (arguments := self.sample(form, device)) is not None:
                verdict = agrees(f"{self.name} ({form})", device, lambda: self._equals_plain(arguments))
                self._verdicts[form, device] = verdict
        return verdict

    def _equals_plain(self, arguments: tuple[Any, ...]) -> bool:
        assert self.triton is not None
        with torch.no_grad(), backend("eager"):
            expected = [*_tensors(self.plain(*arguments))]
        results = [*_tensors(self.triton(*arguments))]
        if not expected:  # the plain code lies with the caller: a launch is all that can be tried
            return True
        return len(results) == len(expected) and all(map(_is_equal, expected, results))

    def leave(self, form: Hashable, device: torch.device, error: Exception) -> None:
        """Leaves a form, and on CPUs the operation, to the plain code after an error of its kernel; warns once."""
        if takes_cpp(device):
            language, self.cpp = "C++", None
        else:
            language, self._verdicts[form, device] = "Triton", False
        warn_of_failure(language, self.name, error, device)


def run(operation: Operation, x: Tensor, *arguments: Any) -> Any:
    """Runs an operation by the kernel that serves, else by the plain code. Not for graphs that are compiled.

    Raises:
        ValueError: from the plain code, or tensors that do not fit each other.
        torch.OutOfMemoryError: of kernels too, since plain code needs more memory.
    """
    kernel, form, result, failure = None, None, None, None
    if is_dense(x) and (language := kernels_for(x)) is not None:
        if language == "cpp":
            kernel = operation.cpp
        elif operation.triton is not None:
            form = operation.form(x, *arguments)
            if form is not None and operation.is_served(form, x.device):
                kernel = operation.triton
    if x.is_neg():
        x = resolved(x)
    if kernel is not None:
        try:
            result = kernel(x, *arguments)
        except Exception as error:
            if not is_of_kernel(error):
                raise
            failure = error.with_traceback(None)  # which would keep tensors
    if result is None:
        result = operation.plain(x, *arguments)
    if failure is not None:  # the plain code has not raised: the kernel is at fault
        operation.leave(form, x.device, failure)
    return result


def run_in_graph(operation: Operation, x: Tensor, call: CastCall) -> list[Tensor]:
    """Returns the tensors of :func:`run` in a compiled graph, which calls an operator and does not look into it."""
    shard = None if call.shard is None else call.shard.spec
    return _cast(
        x, operation.name, call.cast.spec, call.dim, call.key, call.amax, call.dtype, shard, call.rotation, call.block
    )


def _empty_tensors(x: Tensor, operation: str, *arguments: Any) -> list[Tensor]:
    empty = _OPERATIONS[operation].empty
    assert empty is not None
    return [*_tensors(empty(x, call_from_specs(*arguments)))]


@opaque(_empty_tensors)
def _cast(
    x: Tensor,
    operation: str,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    shard: str | None,
    rotation: Tensor | None,
    block: int,
) -> list[Tensor]:
    call = call_from_specs(spec, dim, key, amax, dtype, shard, rotation, block)
    return [*_tensors(run(_OPERATIONS[operation], x, call))]


def call_from_specs(spec: str, dim: int, key: Any, amax: Any, dtype: Any, shard: str | None, *others: Any) -> CastCall:
    """Returns the :class:`CastCall` of an operator's arguments: the cast and the shard come as their specs."""
    part = None if shard is None else Shard.from_spec(shard)
    return CastCall(Cast.from_spec(spec), dim, key, amax, dtype, part, *others)


def agrees(name: str, device: torch.device, is_equal: Callable[[], bool]) -> bool:
    """Returns whether Triton kernels pass a comparison with the plain code on a sample; warns if they differ or fail.

    The caller remembers the answer. ``name`` names the results in the warning.
    """
    try:
        if is_equal():
            return True
        fault = "differs from the plain code"
    except Exception as error:
        if not is_of_kernel(error):
            raise
        fault = _failure(error)
    _warn("Triton", name, fault, device)
    return False


def is_of_kernel(error: Exception) -> bool:
    """Returns whether plain code may do better: not without memory, or for arguments that do not fit each other."""
    if isinstance(error, Misfit | torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
        return False
    return not is_captured()  # or the graph is lost


def warn_of_failure(language: str, name: str, error: Exception, device: torch.device) -> None:
    """Warns, once for each name and device, that a kernel has failed and is not used again."""
    if (name, device) not in _warned:
        _warned.add((name, device))
        _warn(language, name, _failure(error), device)


def _failure(error: Exception) -> str:
    return f"fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _warn(language: str, name: str, fault: str, device: torch.device) -> None:
    warnings.warn(
        f"The {language} kernel for {name} {fault} on {device}, and is not used there: the plain code is slower, with "
        f"the right bits. Please report the {'CPU' if language == 'C++' else 'GPU'} and the versions of torch and "
        f"{'the C++ compiler' if language == 'C++' else 'Triton'}.",
        stacklevel=3,
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    """Yields the tensors of a result, in their order; it may hold numbers, too."""
    if isinstance(result, Tensor):
        yield result
    elif result is not None and not isinstance(result, int):
        for part in result:
            yield from _tensors(part)


def _is_equal(expected: Tensor, result: Tensor) -> bool:
    if expected.dtype != result.dtype:
        return False
    if expected.itemsize == 1:  # codes, and scales of one byte
        return torch.equal(expected.view(torch.uint8), result.view(torch.uint8))
    return torch.equal(expected, result)
