"""Packed operands by the C++ kernels: codes and scales as :mod:`lightning_lowbit.quant.packed` has them."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit.formats import Format
from lightning_lowbit.kernels.cpu import casts
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, resolved
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import factor_shape
from lightning_lowbit.quant.packed import packed_bytes, per_byte
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.transforms import rotated_shape

_CODINGS = {"sign-magnitude": 0, "twos-complement": 1, "offset": 2}
_SCALES = {"e8m0": 4, "fp32": 5, "bf16": 6, "fp16": 7}  # all others: 3
_OUTPUTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def covers(cast: Cast, columns: int) -> bool:
    """Whether the kernels pack matrices with this many columns: a byte holds codes of one row alone."""
    return casts.obstacle(cast) is None and columns % per_byte(cast.format) == 0 and library() is not None


def pack(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    shard: Shard | None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The result of :func:`lightning_lowbit.quant.packed.pack`; None for what the kernels do not take."""
    plan, cast = casts.plan_of(spec, dim, x.dtype, torch.float32), Cast.from_spec(spec)
    shape = x.shape if rotation is None else rotated_shape(x.shape, rotation, dim)
    if plan is None or not covers(cast, shape[1]) or not casts.takes(x, plan, key, amax, shard, rotation):
        return None
    x, (rows, columns) = x.contiguous(), shape
    data = x.new_empty(packed_bytes(rows, columns, cast, dim), dtype=torch.uint8)
    factor = x.new_empty(factor_shape(x, cast, dim) if cast.scale.two_level == "row" else (), dtype=torch.float32)
    casts.write(x, plan, key, amax, shard, data, factor, rotation, _codes(cast, data, rows, columns, dim))
    return data, factor


def unpack_(out: Tensor, data: Tensor, cast: Cast, dtype: torch.dtype, dim: int) -> bool:
    """Writes values as :func:`lightning_lowbit.quant.packed.unpack_`; False for what the kernels do not take."""
    if out.dtype not in _OUTPUTS or dtype not in casts.INPUTS or not covers(cast, out.shape[1]) or out.numel() == 0:
        return False
    target = torch.float32 if out.dtype == torch.int8 else out.dtype
    plan, (rows, columns) = casts.plan_of(cast.spec, dim, dtype, target), out.shape
    kernels, data = library(), resolved(data).contiguous()
    assert plan is not None and kernels is not None
    kernels.lowbit_unpack(
        address("codes and scales", data, torch.uint8, packed_bytes(rows, columns, cast, dim)),
        rows,
        columns,
        ctypes.byref(_codes(cast, data, rows, columns, dim)),
        plan.address,
        address("values", out, out.dtype, rows * columns),
        _OUTPUTS[out.dtype],
        torch.get_num_threads(),
    )
    return True


def _codes(cast: Cast, data: Tensor, rows: int, columns: int, dim: int) -> casts.Codes:
    coding, scale, bits, count = _layout(cast)
    start = address("codes and scales", data, torch.uint8, packed_bytes(rows, columns, cast, dim))
    return casts.Codes(start + -(-rows * columns // count), coding, scale, bits)


@cache
def _layout(cast: Cast) -> tuple[int, int, int, int]:
    element: Format = cast.format
    return _CODINGS[element.encoding], _SCALES.get(cast.scale.format, 3), element.bits, per_byte(element)
