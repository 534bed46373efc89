"""Operands of GEMMs, or of all products of a stack, by one call of a kernel where one serves, else by plain code.

All implementations give the same bits. The plain code of :mod:`lightning_lowbit.quant` is the specification. Each
product of a stack has the bits that it has alone: its own scales, and random bits by a key of its own.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from lightning_lowbit.compilation import kernels_for, opaque
from lightning_lowbit.kernels.cpu import casts as cpp
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.forms import (
    CastForm,
    cast_form,
    cast_sample,
    elements_of,
    form_of,
    pair_form,
    pair_sample,
    rotation_form,
    rotation_sample,
    signs_form,
    signs_sample,
)
from lightning_lowbit.kernels.gpu import casts as triton
from lightning_lowbit.kernels.gpu import stacks
from lightning_lowbit.kernels.memory import resolved
from lightning_lowbit.kernels.ops import Operation, run, run_in_graph
from lightning_lowbit.quant.call import CastCall, operand_dtype
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand, StackOperand, empty_operand, make_operand
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.shard import amax_of as plain_amax
from lightning_lowbit.quant.transforms import Hadamard
from lightning_lowbit.quant.transforms import rotate as plain_rotate

_SMALL = 2**16  # elements, of which one core measures the amax in 10 µs


def _plain_operand(x: Tensor, call: CastCall) -> Operand:
    """Makes the operand by plain code; a rotation and the cast after it each by their kernels."""
    if call.rotation is None:
        return make_operand(x, call)
    return run(CAST, rotate(x, call.rotation, call.dim), call._replace(rotation=None))


def _plain_amax(x: Tensor, rotation: Tensor | None, dim: int) -> Tensor:
    return plain_amax(x if rotation is None else rotate(x, rotation, dim))


CAST = Operation(
    "operands", _plain_operand, cpp.make_operand, triton.make_operand, cast_form, cast_sample, empty_operand
)
CAST_BOTH = Operation(
    "pairs of operands",
    lambda x, row, column: (run(CAST, x, row), run(CAST, x, column)),
    triton=triton.make_both,
    form=pair_form,
    sample=pair_sample,
)
AMAX = Operation("amaxes", _plain_amax, cpp.amax_of, triton.amax_of, rotation_form, rotation_sample)
ROTATE = Operation("rotations", plain_rotate, cpp.rotate, triton.rotate, rotation_form, rotation_sample)
SIGNS = Operation(
    "signs of rotations",
    lambda keys, size: Hadamard(size, "keyed").diagonals(keys, keys.device),
    triton=triton.draw_signs,
    form=signs_form,
    sample=signs_sample,
)


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    rotation: Tensor | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM, as :func:`lightning_lowbit.quant.quantize_operand`, by the fastest code.

    With ``rotation``, the signs of a Hadamard transform (``Hadamard.diagonal``), the operand is that of
    ``rotate(x, rotation, dim)``, to the bit; ``amax`` and ``shard`` describe the rotated matrix.

    Examples:
        >>> quantize_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).values.shape
        torch.Size([4, 64])
    """
    call = CastCall(cast, dim, key, amax, dtype, shard, rotation)
    if is_compiling():
        return Operand(*run_in_graph(CAST, x, call))
    return run(CAST, x, call)


def quantize_both(
    x: Tensor,
    casts: tuple[Cast, Cast],
    keys: tuple[Tensor | None, Tensor | None],
    amax: Tensor | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
) -> tuple[Operand, Operand]:
    """Quantizes a matrix along its rows (dim 1) and its columns (dim 0), each as :func:`quantize_operand` does.

    A kernel makes both from one read of a tensor of :func:`reads_once`.

    Args:
        x: ``[rows, columns]``.
        casts, keys, dtypes: of both operands.
        amax: of both; float32, 0-d, or None.
    """
    calls = [
        CastCall(cast, dim, key, amax if cast.scale.needs_amax else None, dtype)
        for cast, dim, key, dtype in zip(casts, (1, 0), keys, dtypes, strict=True)
    ]
    return run(CAST_BOTH, x, *calls)


def kernel_support(
    casts: Iterable[Cast], device: torch.device | str = "cpu", rotated_along: int | None = None
) -> dict[Cast, str]:
    """Returns the implementation that serves each cast on a device: the name of a backend, or why it is plain code.

    ``rotated_along`` asks for operands with a Hadamard transform along dimension 0 or 1. Where a kernel of its own
    rotates them before, the reason stands behind the name.

    Examples:
        >>> kernel_support([Cast("e2m1", Scale("e4m3", 16)), Cast("e3m0", Scale("e8m0", 32))]).values()
        dict_values(['cpp', 'plain code: elements without a mantissa'])
    """
    support = {}
    for cast in casts:
        if torch.device(device).type == "cpu":
            name, why = "cpp", cpp.obstacle(cast) or (None if library() else "the C++ kernels cannot be built")
            apart = cpp.rotation_obstacle(cast)
        else:
            sample = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            name, why = "triton", triton.covers(cast, sample, operand_dtype(sample.dtype, cast))
            apart = triton.rotation_obstacle(cast, rotated_along or 0)
        if rotated_along is not None and apart is not None:
            name += f", rotated before: {apart}"
        support[cast] = name if why is None else f"plain code: {why}"
    return support


@opaque(lambda x, shard=None, rotation=None, dim=1: x.new_empty((), dtype=torch.float32))
def amax_of(x: Tensor, shard: str | None = None, rotation: Tensor | None = None, dim: int = 1) -> Tensor:
    """Returns max|x|, as :func:`lightning_lowbit.quant.shard.amax_of`, by the fastest code; with ``rotation`` that of
    ``rotate(x, rotation, dim)``. ``shard`` is the spec of one."""
    if shard is not None:
        x = resolved(x)
        return plain_amax(x if rotation is None else rotate(x, rotation, dim), Shard.from_spec(shard))
    return run(AMAX, x, rotation, dim)


def measures_again(x: Tensor) -> bool:
    """Returns whether casts of a tensor should each measure its amax, which takes less time than a call of a kernel."""
    is_measured = not is_compiling() and type(x) in (Tensor, Parameter) and kernels_for(x) == "cpp"
    return is_measured and x.numel() <= _SMALL


def reads_once(x: Tensor) -> bool:
    """Returns whether kernels can make two operands of a tensor from one read, as on GPUs."""
    return not is_compiling() and type(x) is Tensor and kernels_for(x) == "triton"


def signs_of(transform: Hadamard, keys: Tensor | None, device: torch.device) -> Tensor:
    """Returns the signs of a rotation, as :meth:`~lightning_lowbit.quant.Hadamard.diagonals`, by the fastest code."""
    if keys is None or transform.signs == "fixed" or keys.device != device or is_compiling():
        return transform.diagonals(keys, device)
    return run(SIGNS, keys, transform.size)


def rotate(x: Tensor, signs: Tensor, dim: int, inverse: bool = False) -> Tensor:
    """Returns a matrix as :func:`lightning_lowbit.quant.rotate` has it, by the fastest code."""
    if inverse or is_compiling():
        return plain_rotate(x, signs, dim, inverse)
    return run(ROTATE, x, signs, dim)


# --- stacks -----------------------------------------------------------------------------------------------------------

Ends = tuple[int, ...] | None
_KEYS = [0x5DEECE66D, 11, -7]


def quantize_stack(x: Tensor, call: CastCall, ends: Ends = None) -> StackOperand:
    """Quantizes the operands of all products of a stack, each as :func:`quantize_operand` does alone.

    Args:
        x: matrices ``[products, rows, columns]``; with ``ends`` the rows of all of them, ``[rows, columns]``.
        call: of each product. Its key is int64 ``[products]``; its rotation may have a row for each product, and along
            rows pads each of them; its amax scales all of them.
        ends: ascending, where the rows of each product end; the last one is the number of rows.

    Examples:
        >>> call = CastCall(Cast("e2m1", Scale("e4m3", 16, two_level=True)), 1)
        >>> quantize_stack(torch.randn(10, 64), call, (3, 3, 10)).factor.shape
        torch.Size([3])
    """
    return run(CAST_STACK, x, call, ends)


def plain_stack(x: Tensor, call: CastCall, ends: Ends) -> StackOperand:
    """Quantizes one product after the other; the factor of one without rows is 1."""
    stack = StackOperand(x, None, ends)
    operands = []
    for index, (matrix, _) in enumerate(stack.products()):
        alone = call.of_product(index)
        operands.append(run(CAST, matrix, alone) if matrix.numel() else empty_product(matrix, alone))
    return joined(operands, call.dim, ends is not None)


def empty_product(matrix: Tensor, call: CastCall) -> Operand:
    """Returns the operand of a matrix without elements, with factors of 1."""
    values, factor = empty_operand(matrix, call)
    return Operand(values, None if factor is None else factor.fill_(1))


def joined(operands: list[Operand], dim: int, is_grouped: bool) -> StackOperand:
    """Joins the operands of products, contracted along ``dim``: as matrices, or their rows in one matrix."""
    values, factors = [values for values, _ in operands], [factor for _, factor in operands if factor is not None]
    if not is_grouped:
        return StackOperand(torch.stack(values), torch.stack(factors) if factors else None)
    ends = tuple(accumulate(map(len, values)))
    is_of_rows = bool(factors) and factors[0].dim() == 2 and dim == 1
    factor = (torch.cat if is_of_rows else torch.stack)(factors) if factors else None
    return StackOperand(torch.cat(values), factor, ends)


class StackForm(NamedTuple):
    """The form of the casts of a stack: that of a product, and whether their rows are in one matrix."""

    product: CastForm
    is_grouped: bool
    has_signs: bool  # for each product

    def __str__(self) -> str:
        return f"{self.product}, of {'grouped rows' if self.is_grouped else 'matrices'}"


def stack_form(x: Tensor, call: CastCall, ends: Ends) -> StackForm | None:
    """Returns the form of a stack that kernels may serve."""
    count = len(x) if ends is None else len(ends)
    alone = call.of_product(0)
    matrix = x[0] if ends is None else x
    if call.shard is not None or not stacks.takes(x, ends) or not alone.is_regular(x.device):
        return None
    if call.cast.draws and (call.key is None or call.key.shape != (count,) or not call.key.is_contiguous()):
        return None
    form, has_signs = form_of(matrix, alone), call.rotation is not None and call.rotation.dim() == 2
    return None if form is None else StackForm(form, ends is not None, has_signs)


def stack_sample(form: StackForm, device: torch.device) -> tuple[Tensor, CastCall, Ends] | None:
    product, ends = form.product, (20, 20, 64)
    cast, x = Cast.from_spec(product.spec), torch.empty(1, 1, dtype=product.source, device=device)
    if product.group and triton.rotation_obstacle(cast, product.dim) is not None:
        return None
    if stacks.covers(cast, x, product.dtype) is not None:
        return None
    x = elements_of(product, device, *((64,) if form.is_grouped else (3, 40)))
    keys = torch.tensor(_KEYS, device=device)
    signs = None
    if product.group:
        drawn = Hadamard(product.group, "keyed").diagonals(keys, device)
        signs = drawn if form.has_signs else drawn[0].contiguous()
    call = CastCall(cast, product.dim, keys if cast.draws else None, None, product.dtype, None, signs)
    return x, call, ends if form.is_grouped else None


CAST_STACK = Operation("operands of stacks", plain_stack, None, stacks.make_stack, stack_form, stack_sample)
