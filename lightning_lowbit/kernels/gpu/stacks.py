"""Operands of stacks by the Triton kernels: all products in one launch, and one for their amaxes.

A program works on one product, as on a matrix of its own, which it finds from the ends of rows.
"""

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels.gpu import casts, launches, sizes
from lightning_lowbit.kernels.gpu.launches import Form, Launch
from lightning_lowbit.kernels.memory import checked, ends_on
from lightning_lowbit.quant.call import CastCall, has_factor
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import StackOperand

_ALL = 2**30  # rows or columns: more than there are
_MOST = 1024  # products, whose ends a program reads

Ends = tuple[int, ...] | None


def covers(cast: Cast, x: Tensor, dtype: torch.dtype) -> str | None:
    """Returns why no kernel makes the operands of a stack in a dtype, in words; None where one does."""
    if cast.scale.two_level == "row":
        return "second levels per row"
    if cast.scale.block == "tensor" and cast.scale.statistic != "absmax":
        return "means of whole tensors"
    return casts.covers(cast, x, dtype)


def takes(x: Tensor, ends: Ends) -> bool:
    """Returns whether the kernels take stacks of this size."""
    return 0 < (len(x) if ends is None else len(ends)) <= _MOST and 0 < x.numel() < _ALL


def make_stack(x: Tensor, call: CastCall, ends: Ends) -> StackOperand:
    """Does what ``kernels.operands.plain_stack`` does in one launch, and one for amaxes."""
    rows, width = call.product_rows(x, ends), _width(x, call)
    products, amaxes = len(rows), None
    if call.cast.scale.needs_amax:
        amaxes = amaxes_of(x, call, ends) if call.amax is None else call.amax.float().expand(products).contiguous()
    shape = (products, rows[0], width) if ends is None else (sum(rows), width)
    values = x.new_empty(shape, dtype=call.values_dtype(x.dtype))
    # No program writes the factor of a product without rows.
    fill = torch.empty if all(rows) else torch.ones
    factor = fill(_factor_shape(shape, products, call), dtype=torch.float32, device=x.device)
    casts.run(cast_launch(x, call, ends, amaxes, values, factor))
    return StackOperand(
        values, factor if has_factor(call.cast) else None, None if ends is None else tuple(accumulate(rows))
    )


def amaxes_of(x: Tensor, call: CastCall, ends: Ends) -> Tensor:
    """Returns max|x| of each product, rotated or not: float32 ``[products]``."""
    if ends is None and call.rotation is None:
        return torch.linalg.vector_norm(x, torch.inf, (1, 2), dtype=torch.float32)
    amaxes = torch.zeros(len(x) if ends is None else len(ends), dtype=torch.float32, device=x.device)
    casts.run(amax_launch(x, call, ends, amaxes))
    return amaxes


def amax_launch(x: Tensor, call: CastCall, ends: Ends, amaxes: Tensor) -> Launch:
    """Raises ``amaxes`` (0 before) to max|x| of each product."""
    form, size = _measuring_form(launches.is_transposed(_matrix(x)), *_rotation(call), _products(ends))
    arguments = {"x": x, "amax": amaxes.view(torch.int32), **_stack(x, call, ends)}
    return Launch(form, _programs(call.product_rows(x, ends), _width(x, call), size), arguments)


def cast_launch(x: Tensor, call: CastCall, ends: Ends, amaxes: Tensor | None, values: Tensor, factor: Tensor) -> Launch:
    """Writes the operands ``values`` and their ``factor``; ``amaxes`` are None where they are not needed."""
    rows, device = call.product_rows(x, ends), x.device
    fours = call._replace(rotation=None).in_fours(values.flatten(0, -2))
    turned, dtypes = launches.is_transposed(_matrix(x)), (x.dtype, values.dtype)
    form, size = _casting_form(call.cast.spec, dtypes, turned, fours, *_rotation(call), _products(ends))
    key = call.key if call.cast.draws else None
    arguments = {
        "x": x,
        "values": launches.as_bytes(values),
        "factor": factor,
        "amax": checked("amaxes", amaxes, torch.float32, len(rows), device),
        "key": checked("keys", key, torch.int64, len(rows), device),
        **_stack(x, call, ends),
    }
    return Launch(form, _programs(rows, values.shape[-1], size), arguments)


@cache
def _casting_form(
    spec: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    transposed: bool,
    fours: bool,
    dim: int,
    group: int,
    signs: int,
    products: int,
) -> tuple[Form, tuple[int, int]]:
    """Returns the form of a cast, from one dtype to another, and the rows and columns of a program."""
    form, size = launches.form_of_cast(spec, dim, *dtypes, transposed, group, fours)
    constants: dict[str, Any] = {}
    if form.kernel == "cast_blocks" and form.constants["SIDES"][0] > 1 and not group:  # or registers spill on sm_100
        down, across = form.constants["BLOCKS"]
        constants["BLOCKS"] = (down, max(across // 2, 1))
        size = (size[0], form.constants["SIDES"][1] * constants["BLOCKS"][1])
    if form.kernel == "cast_rows":
        size = (size[0], _ALL) if form.constants["AXIS"] == 1 else (_ALL, size[1])
    constants |= {"KERNEL": form.kernel, "PROGRAM": size, "PRODUCTS": products, "SIGNS": signs}
    return Form("cast_stack", form.constants | constants, form.warps), size


@cache
def _measuring_form(transposed: bool, dim: int, group: int, signs: int, products: int) -> tuple[Form, tuple[int, int]]:
    rows, columns, warps = (64, 64, 4) if transposed else (8, 512, 4)
    constants: dict[str, Any] = {"PRODUCTS": products, "SIGNS": signs}
    if group:
        rows, columns, warps = sizes.rotated_tile(transposed, group, dim)
        constants["ROTATION"] = launches.constants_of_rotation(group, dim)
    return Form("measure_stack", {"TILE": (rows, columns), **constants}, warps), (rows, columns)


def _rotation(call: CastCall) -> tuple[int, int, int]:
    """Returns the dimension of a cast, the size of rotated groups or 0, and the signs of each product, or 0."""
    if call.rotation is None:
        return call.dim, 0, 0
    group = call.rotation.shape[-1]
    return call.dim, group, group if call.rotation.dim() == 2 else 0


def _products(ends: Ends) -> int:
    """Returns how many ends a program reads."""
    return 0 if ends is None else len(ends_on(torch.device("cpu"), ends))


def _programs(rows: list[int], width: int, size: tuple[int, int]) -> int:
    return sum(-(-count // size[0]) for count in rows) * max(-(-width // size[1]), 1)


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[0]


def _width(x: Tensor, call: CastCall) -> int:
    """Returns the columns of the operands: a rotation along rows pads them to whole groups."""
    return x.shape[-1] + (0 if call.rotation is None or call.dim == 0 else -x.shape[-1] % call.rotation.shape[-1])


def _factor_shape(shape: tuple[int, ...], products: int, call: CastCall) -> tuple[int, ...]:
    if call.cast.scale.block != "row":
        return (products,)
    return (*shape[:-1], 1) if call.dim == 1 else (products, 1, shape[-1])


def _stack(x: Tensor, call: CastCall, ends: Ends) -> dict[str, Any]:
    """Returns where the products are: ends, sizes and strides, and the signs of their rotation."""
    matrix, signs = _matrix(x), call.rotation
    if signs is not None:
        products = 1 if signs.dim() == 1 else len(x) if ends is None else len(ends)
        checked("signs", signs, torch.float32, products * signs.shape[-1], x.device)
    return {
        "ends": None if ends is None else ends_on(x.device, ends),
        "rows": matrix.shape[0],
        "columns": matrix.shape[1],
        "row_stride": matrix.stride(0),
        "column_stride": matrix.stride(1),
        "product_stride": x.stride(0),
        "signs": signs,
    }
