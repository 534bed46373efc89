"""Packed operands by the C++ kernels: codes and scales as :mod:`lightning_lowbit.quant.packed` has them."""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu import casts
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.quant.packed import Packed, empty_packed, packed_bytes, per_byte, unpacked_factor

_CODINGS = {"sign-magnitude": 0, "twos-complement": 1, "offset": 2}
_SCALES = {"e8m0": 4, "fp32": 5, "bf16": 6, "fp16": 7}  # all others: 3


def pack(x: Tensor, call: CastCall) -> Packed | None:
    """Returns the packed operand of a resolved matrix; None for arguments that the kernels do not take."""
    form, shape = casts.cpp_cast(call.cast.spec, call.dim, x.dtype, torch.float32), call.shape(x)
    if form is None or not casts.takes(x, form, call) or shape[1] % (layout := _layout(call.cast.spec)).per_byte:
        return None
    packed, (rows, columns) = empty_packed(x, call), shape
    start = address("codes and scales", packed.data, torch.uint8, packed.data.numel())
    codes = layout.codes(start, rows * columns)
    casts.write(x.contiguous(), form, call, packed.data, packed.factor, codes)
    return packed


def unpack(data: Tensor, factor: Tensor, call: CastCall, shape: torch.Size, source: torch.dtype) -> Operand | None:
    """Unpacks the operand of a matrix of this shape and dtype; returns None for arguments that are not covered."""
    dtype, cast, dim = call.values_dtype(source), call.cast, call.dim
    target = torch.float32 if dtype == torch.int8 else dtype
    form, layout, kernels = casts.cpp_cast(cast.spec, dim, source, target), _layout(cast.spec), library()
    if form is None or kernels is None or shape[1] % layout.per_byte or not shape.numel():
        return None
    rows, columns = shape
    data, values = data.contiguous(), data.new_empty(shape, dtype=dtype)
    start = address("codes and scales", data, torch.uint8, packed_bytes(rows, columns, cast, dim))
    kernels.lowbit_unpack(
        start,
        rows,
        columns,
        ctypes.byref(layout.codes(start, rows * columns)),
        form.address,
        address("values", values, dtype, rows * columns),
        casts.OUTPUTS[dtype],
        torch.get_num_threads(),
    )
    return Operand(values, unpacked_factor(data[None], factor, cast, rows * columns, dim))


def packed_codes(data: Tensor, call: CastCall, rows: int, columns: int) -> tuple[casts.CppCast, casts.Codes] | None:
    """Returns the cast of a packed matrix and the structure of its bytes; None where the kernels do not unpack it."""
    form, layout = casts.cpp_cast(call.cast.spec, call.dim, torch.float32, torch.float32), _layout(call.cast.spec)
    if form is None or columns % layout.per_byte:
        return None
    size = packed_bytes(rows, columns, call.cast, call.dim)
    return form, layout.codes(address("codes and scales", data, torch.uint8, size), rows * columns)


class _Layout(NamedTuple):
    """The codes of a cast as the kernels take them."""

    coding: int
    scale_coding: int
    bits: int
    per_byte: int

    def codes(self, start: int, elements: int) -> casts.Codes:
        """Returns the structure for bytes at an address: the scales come after the codes of the elements."""
        return casts.Codes(start + -(-elements // self.per_byte), self.coding, self.scale_coding, self.bits)


@cache
def _layout(spec: str) -> _Layout:
    cast = Cast.from_spec(spec)
    element, scale = cast.format, _SCALES.get(cast.scale.format, 3)
    return _Layout(_CODINGS[element.encoding], scale, element.bits, per_byte(element))
