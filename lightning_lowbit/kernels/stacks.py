"""Operands of all products of a stack, such as those of experts, by one call where a kernel serves.

Each product has the bits that it has alone: its own scales, and random bits by a key of its own.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.forms import CastForm, elements_of, form_of
from lightning_lowbit.kernels.gpu import casts
from lightning_lowbit.kernels.gpu import stacks as triton
from lightning_lowbit.kernels.operands import CAST
from lightning_lowbit.kernels.ops import Operation, run
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand, StackOperand, empty_operand
from lightning_lowbit.quant.transforms import Hadamard

Ends = tuple[int, ...] | None
_KEYS = [0x5DEECE66D, 11, -7]


def quantize_stack(x: Tensor, call: CastCall, ends: Ends = None) -> StackOperand:
    """Quantizes the operands of all products of a stack, each as :func:`~.operands.quantize_operand` does alone.

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
    if call.shard is not None or not triton.takes(x, ends) or not alone.is_regular(x.device):
        return None
    if call.cast.draws and (call.key is None or call.key.shape != (count,) or not call.key.is_contiguous()):
        return None
    form, has_signs = form_of(matrix, alone), call.rotation is not None and call.rotation.dim() == 2
    return None if form is None else StackForm(form, ends is not None, has_signs)


def stack_sample(form: StackForm, device: torch.device) -> tuple[Tensor, CastCall, Ends] | None:
    product, ends = form.product, (20, 20, 64)
    cast, x = Cast.from_spec(product.spec), torch.empty(1, 1, dtype=product.source, device=device)
    if product.group and casts.rotation_obstacle(cast, product.dim) is not None:
        return None
    if triton.covers(cast, x, product.dtype) is not None:
        return None
    x = elements_of(product, device, *((64,) if form.is_grouped else (3, 40)))
    keys = torch.tensor(_KEYS, device=device)
    signs = None
    if product.group:
        drawn = Hadamard(product.group, "keyed").diagonals(keys, device)
        signs = drawn if form.has_signs else drawn[0].contiguous()
    call = CastCall(cast, product.dim, keys if cast.draws else None, None, product.dtype, None, signs)
    return x, call, ends if form.is_grouped else None


CAST_STACK = Operation("operands of stacks", plain_stack, None, triton.make_stack, stack_form, stack_sample)
