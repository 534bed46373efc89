"""Products of a whole stack by one GEMM, ``torch.nn.functional.grouped_mm``, instead of one after the other.

    Y[rows of e] = X[rows of e] · W[e]          rows of one matrix, by a stack of matrices
    Y[e] = X[rows of e]ᵀ · G[rows of e]         the rows of two matrices

Operands are the values that the emulation multiplies, in bfloat16. The GEMM adds in float32 and rounds to bfloat16;
scales of tensors and rows, and a bias, come after that in float32, and the result is rounded a second time. Without
them it is the emulation's up to the order of sums.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import counted_as, is_within_cast, refuse_in_capture, within_cast
from lightning_lowbit.kernels.memory import ends_on
from lightning_lowbit.nn.native.gemms import finish
from lightning_lowbit.quant.operand import StackOperand

_ALIGNED = 8  # elements: rows begin at multiples of 16 bytes
_CAPABILITIES = (9, 10)  # the first numbers of those for which torch 2.13 has a kernel; it loops on other GPUs


def grouped_product(left: StackOperand, right: StackOperand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies the operands of all products of a stack, to ``[rows, n]``, or ``[products, m, n]``.

    Args:
        left: grouped rows ``[rows, k]``; or, transposed, those of a second grouped operand ``[m, rows]``.
        right: matrices ``[products, k, n]``, or grouped rows ``[rows, n]``.
        bias: ``[products, n]``, for grouped rows; or None.
        dtype: bfloat16, of the result.
    """
    assert left.ends is not None
    if right.ends is not None:
        return _products(left, right, dtype)
    (rows, inner), n = left.values.shape, right.values.shape[2]
    with _counted_as(rows, inner, n):
        product = _grouped_mm(_padded(left.values, 1), _padded(right.values, 1, 2), left.ends)[:rows, :n]
    factors = []
    for factor in (left.factor, right.factor):
        if factor is not None:
            factors.append(factor if factor.dim() == 2 else _of_rows(factor, left.ends, rows))
    biases = None if bias is None else _of_rows(bias, left.ends, rows)
    return finish(product, factors, biases, dtype)


def _products(left: StackOperand, right: StackOperand, dtype: torch.dtype) -> Tensor:
    ends, (m, rows), n = left.ends, left.values.shape, right.values.shape[1]
    assert ends is not None and right.ends == ends
    with _counted_as(m, rows, n):
        product = _grouped_mm(_padded(left.values.t(), 1).t(), _padded(right.values, 1), ends)[:, :m, :n]
    factors = [_spread(factor, m) for factor in (left.factor, right.factor) if factor is not None]
    result = finish(product.flatten(0, 1), factors, None, dtype).view(-1, m, n)
    if any(start == end for start, end in pairwise((0, *ends))):  # GEMMs may leave those unwritten
        offsets = ends_on(result.device, ends)[: len(ends)]
        result = result.masked_fill((offsets.diff(prepend=offsets.new_zeros(1)) == 0)[:, None, None], 0.0)
    return result


def _spread(factor: Tensor, m: int) -> Tensor:
    """Returns factors of products for their rows, one below the other, ``[products · m, 1]``; or for their columns,
    ``[products, 1, n]``."""
    if factor.dim() == 1:
        factor = factor[:, None, None].expand(-1, m, 1)
    return factor.reshape(-1, 1) if factor.shape[1:] == (m, 1) else factor


def sums_of_rows(g: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Returns the sums of the rows of each product: ``[products, columns]``, by a GEMM with ones, rounded once."""
    ones = StackOperand(g.new_ones(len(g), _ALIGNED), None, ends)
    with within_cast():  # it is no product of the layer
        return _products(ones.t(), StackOperand(g, None, ends), g.dtype)[:, 0]


def _counted_as(*shape: int) -> AbstractContextManager[None]:
    return nullcontext() if is_within_cast() else counted_as(*shape)


def _grouped_mm(left: Tensor, right: Tensor, ends: tuple[int, ...]) -> Tensor:
    return F.grouped_mm(left, right, offs=ends_on(left.device, ends)[: len(ends)])


def _padded(values: Tensor, *dims: int) -> Tensor:
    """Returns matrices as the GEMM reads them, with zeros up to multiples of 8 along some dimensions."""
    missing = [-size % _ALIGNED if dim in dims else 0 for dim, size in enumerate(values.shape)]
    if any(missing):
        return F.pad(values, [number for more in reversed(missing) for number in (0, more)])
    return values if _is_read(values) or _is_read(values.mT) else values.clone(memory_format=torch.contiguous_format)


def _is_read(values: Tensor) -> bool:
    """Returns whether the rows of matrices are contiguous, and each begins at a multiple of 16 bytes."""
    *outer, along = values.stride()
    is_aligned = values.data_ptr() % 16 == 0 and not any(stride % _ALIGNED for stride in outer)
    return along == 1 and is_aligned and outer[-1] >= values.shape[-1]


def _of_rows(numbers: Tensor, ends: tuple[int, ...], rows: int) -> Tensor:
    """Returns numbers of each product, ``[products]``, ``[products, 1, n]`` or ``[products, n]``, for each row."""
    return numbers.reshape(len(ends), -1).index_select(0, _product_of_rows(numbers.device, ends, rows))


@lru_cache(maxsize=4)
def _product_of_rows(device: torch.device, ends: tuple[int, ...], rows: int) -> Tensor:
    offsets = ends_on(device, ends)[: len(ends)]
    return torch.searchsorted(offsets, torch.arange(rows, dtype=torch.int32, device=device), right=True)


# --- devices ----------------------------------------------------------------------------------------------------------


@cache
def grouped_obstacle(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Returns why no grouped GEMM of torch's serves passes on a device in a dtype (None for any), in words; None if one
    does."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major not in _CAPABILITIES:
            name = torch.cuda.get_device_name(device)
            return f"torch has no grouped GEMM for {name}, of compute capability {major}.{minor}, but a loop"
    elif device.type != "cpu":  # where torch has a loop of its own
        return f"torch's grouped GEMM was not tried on {'AMD GPUs' if torch.version.hip else repr(device.type)}"
    if dtype in (None, torch.bfloat16):
        return None
    return f"grouped GEMMs multiply in bfloat16, and layers compute in {dtype}: train in bf16"


@cache
def has_grouped_gemm(device: torch.device) -> bool:
    """Returns whether the grouped GEMM of a device multiplies small stacks rightly; warns, once, if it does not."""
    refuse_in_capture("a grouped GEMM")
    try:
        fault = None if all(torch.equal(*pair) for pair in _trials(device)) else "gives other results"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        fault = f"fails ({' '.join(str(error).split())[:200]})"
    if fault is None:
        return True
    warnings.warn(
        f"torch's grouped GEMM {fault} on {device}, and grouped='native' does not take it there: the products of "
        "experts run one after the other. Please report the GPU and the version of torch.",
        stacklevel=2,
    )
    return False


def _trials(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields products of -1, 0 and 1 in both forms, and what they should be: sums that bfloat16 holds."""
    generator, ends = torch.Generator("cpu").manual_seed(0), (5, 5, 40, 41)

    def small(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator, device="cpu").to(torch.bfloat16)

    x, g, w = small(41, 72), small(41, 20), small(4, 20, 72)
    (x_there, g_there), w_there = ((StackOperand(one.to(device), None, ends)) for one in (x, g)), w.to(device)
    stack = StackOperand(w_there)
    rows = [slice(start, end) for start, end in pairwise((0, *ends))]
    with torch.no_grad(), within_cast():
        for left, right, expected in (
            (x_there, stack.t(), torch.cat([x[part].float() @ w[i].float().t() for i, part in enumerate(rows)])),
            (g_there, stack, torch.cat([g[part].float() @ w[i].float() for i, part in enumerate(rows)])),
            (g_there.t(), x_there, torch.stack([g[part].float().t() @ x[part].float() for part in rows])),
        ):
            yield grouped_product(left, right, None, torch.bfloat16).float().cpu(), expected
