"""The Triton kernels beside the plain code: in Triton's interpreter, in a process with ``TRITON_INTERPRET=1``, or on a
GPU, within ``kernels_on``. The plain code runs on the CPU.

Functions take and return what can be pickled, and say in words what differs: an empty list is equality to the bit.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_lowbit import Cast, compilation
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.layout import make_laid_out, pad, repeated, taken_apart
from lightning_lowbit.kernels.products import plain_scale_and_round
from lightning_lowbit.nn.core.watch import stage_and_choose
from lightning_lowbit.quant import Hadamard, rotate
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import make_operand, operand_dtype
from lightning_lowbit.quant.packed import pack, unpack_
from lightning_lowbit.quant.shard import amax_of
from lightning_lowbit.quant.transforms import SIZES

np.seterr(all="ignore")  # divisions by zero are meant
KEY = 0x123456789ABCDEF
_place = torch.device("cpu")  # where kernels run


@contextlib.contextmanager
def kernels_on(device):
    """Within this context kernels run on a device."""
    global _place
    previous, _place = _place, torch.device(device)
    try:
        yield
    finally:
        _place = previous


def place_of_kernels():
    return _place


def there(function, *arguments):
    """Calls a function where kernels run, on copies of the memory of its tensors, and brings back its results and what
    it has written. Views of one memory stay views of one memory."""
    copies = {}

    def copied(tensor):
        storage = tensor.untyped_storage()
        place = storage.data_ptr() or len(copies)  # empty ones have no address
        if place not in copies:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            copies[place] = memory, memory.to(_place, copy=True)
        copy = copies[place][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=_place)
        return view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    results = function(*_mapped(copied, arguments))
    for memory, copy in copies.values():
        memory.copy_(copy)
    return _mapped(Tensor.cpu, results)


def _mapped(function, value):
    """A structure with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if not isinstance(value, tuple | list):
        return value
    parts = [_mapped(function, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


class Case(NamedTuple):
    """One operand; ``dtype`` None takes the one that layers take."""

    cast: Cast
    dim: int
    x: Tensor
    amax: float | None = None
    dtype: torch.dtype | None = None
    key: int = KEY


def differences(cases):
    """What the kernels make otherwise than the plain code."""
    return [text for case in cases for text in _differences(case)]


def _differences(case):
    x, cast = case.x, case.cast
    key, dtype = torch.tensor(case.key), case.dtype or operand_dtype(x.dtype, cast)
    amax = None if case.amax is None else torch.tensor(case.amax)
    if (reason := there(gpu.covers, cast, x, dtype)) is not None:
        return [f"not covered: {reason}"]
    with compilation.backend("eager"):
        expected = make_operand(x, call := CastCall(cast, case.dim, key, amax, dtype))
    where = f"{cast}, dim {case.dim}, {describe(x)} to {dtype}, amax {case.amax}"
    return _unequal(there(gpu.make_operand, x, call), expected, where)


def differences_of_both(cases):
    """What the kernel for two operands makes otherwise than the plain code."""
    texts = []
    for row, column, x in cases:
        calls = CastCall(row, 1, torch.tensor(KEY)), CastCall(column, 0, torch.tensor(-KEY))
        for call, operand in zip(calls, there(gpu.make_both, x, *calls), strict=True):
            texts += _unequal(operand, make_operand(x, call), f"{row} and {column}: dim {call.dim}, {describe(x)}")
    return texts


def differences_of_finish(cases):
    """What the kernel behind GEMMs makes otherwise than the plain code."""
    texts = []
    for product, factors, bias, dtype in cases:
        shapes = [tuple(factor.shape) for factor in factors], None if bias is None else tuple(bias.shape)
        arguments = product, factors, bias, dtype
        found, expected = there(gpu.scale_and_round, *arguments), plain_scale_and_round(*arguments)
        texts += _unequal((found,), (expected,), f"{describe(product)}, factors and bias {shapes}, to {dtype}")
    return texts


def differences_of_amax(matrices):
    """Where the kernel's largest magnitude is another one."""
    return [text for x in matrices for text in _unequal((there(gpu.amax_of, x),), (amax_of(x),), describe(x))]


def differences_of_delay(cases):
    """Where the kernel of delayed scaling records or chooses another amax."""
    texts = []
    for own, in_force, staged, places in cases:
        records = [None if staged is None else staged.clone() for _ in range(2)]
        found = there(gpu.delayed_amax, own, in_force, records[0], places)
        with compilation.backend("eager"):
            expected = stage_and_choose(in_force, records[1], places, own)
        texts += _unequal((found,), (expected,), f"{own} at {places}")
        if staged is not None:
            texts += _unequal((records[0],), (records[1],), f"staged by {own} at {places}")
    return texts


def differences_of_packing(cases):
    """Where codes and scales, or what is unpacked from them, are others than those of plain code."""
    texts = []
    for case in cases:
        x, cast, dim = case.x, case.cast, case.dim
        key = torch.tensor(case.key) if cast.rounding == "stochastic" else None
        where = f"{cast}, dim {dim}, {describe(x)}"
        if not there(gpu.packs, cast, x, dim):
            texts.append(f"not covered: {where}")
            continue
        with compilation.backend("eager"):
            expected = pack(x, cast, key, None, dim=dim)
        found = there(gpu.pack, x, call := CastCall(cast, dim, key))
        values = torch.empty(x.shape, dtype=operand_dtype(x.dtype, cast))
        unpack_(values, expected[0][None], expected[1], cast, x.dtype, dim)
        again = there(gpu.unpack, *found, call, x.shape, x.dtype).values
        texts += _unequal((again, found[1]), (values, expected[1]), where)
        if x.isfinite().all():
            texts += _unequal((found[0],), (expected[0],), f"bytes of {where}")
    return texts


def differences_of_layout(cases):
    """Where operands of native GEMMs, with a scale for so many elements, are others than those of plain code."""
    texts = []
    for (cast, dim, x, amax, _, number), block in cases:
        key = torch.tensor(number) if cast.draws else None
        given = None if amax is None else torch.tensor(amax)
        where = f"{cast}, dim {dim}, {describe(x)}, amax {amax}"
        if not there(gpu.lays_out, cast, x, block, dim):
            texts.append(f"not covered: {where}")
            continue
        with compilation.backend("eager"):
            expected = make_laid_out(x, call := CastCall(cast, dim, key, given, block=block))
        found = there(gpu.lay_out, x, call)
        size = x.shape[1 - dim], x.shape[dim]
        apart = [taken_apart(*made[:2], block, *size) for made in (found, expected)]
        down = [block if len(scales) < size[0] else 1 for _, scales in apart]  # of tiles
        spread = [repeated(scales.float(), *size, rows, block) for (_, scales), rows in zip(apart, down, strict=True)]
        values = [_decoded(cast, codes) * scales for (codes, _), scales in zip(apart, spread, strict=True)]
        texts += _unequal((values[0], found[2]), (values[1], expected[2]), where)
        if x.isfinite().all():
            bytes_ = [tuple(one.contiguous().view(torch.uint8) for one in made[:2]) for made in (found, expected)]
            texts += _unequal(*bytes_, f"bytes of {where}")
    return texts


def differences_of_rotation(cases):
    """Where the kernels make others of rotated groups than the plain code: values, amaxes, and rotated matrices."""
    texts = []
    for (cast, dim, x, amax, _, number), size in cases:
        key, given = torch.tensor(number), None if amax is None else torch.tensor(amax)
        signs = Hadamard(size, "keyed").diagonal(key, x.device)
        where = f"{cast}, dim {dim}, {describe(x)}, rotated by {size}"
        if (
            reason := there(gpu.covers, cast, x, operand_dtype(x.dtype, cast)) or gpu.rotation_obstacle(cast, dim)
        ) is not None:
            texts.append(f"not covered: {reason}, {where}")
            continue
        rotated = rotate(x, signs, dim)
        with compilation.backend("eager"):
            expected = make_operand(rotated, call := CastCall(cast, dim, key, given))
        found = there(gpu.make_operand, x, call._replace(rotation=signs))
        texts += _unequal(found, expected, where)
        texts += _unequal((there(gpu.rotate, x, signs, dim),), (rotated,), f"rotation alone: {where}")
        texts += _unequal((there(gpu.amax_of, x, signs, dim),), (amax_of(rotated).abs(),), f"amax: {where}")
    return texts


def differences_of_bytes(cases):
    """Where the kernel copies a matrix of bytes, with zeros below and to the right, otherwise than plain code."""
    texts = []
    for x, rows, columns in cases:
        pair = there(gpu.pad_bytes, x, rows, columns), pad(x, rows, columns)
        texts += _unequal(pair[:1], pair[1:], f"{describe(x)}, {rows} rows and {columns} columns more")
    return texts


def differences_of_signs(keys):
    """Where the kernel draws others than the plain code, for each size of groups."""
    texts = []
    for size in SIZES:
        pair = there(gpu.draw_signs, keys, size), Hadamard(size, "keyed").diagonals(keys, keys.device)
        texts += _unequal(pair[:1], pair[1:], f"signs of groups of {size}")
    return texts


def _decoded(cast, codes):
    return cast.format.decode(codes) if codes.dtype == torch.uint8 else codes.float()


def shard(x, cast, dim, place):
    """The values of a shard."""
    return there(gpu.make_operand, x, CastCall(cast, dim, torch.tensor(KEY), None, torch.float32, place)).values


def describe(x):
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"


def _unequal(found, expected, what):
    texts = []
    for name, one, other in zip(("values", "factor"), found, expected, strict=False):
        if one is None or other is None:
            texts += [] if one is other else [f"{what}: {name} is missing"]
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            texts.append(f"{what}: {name} {describe(one)}, not {describe(other)}")
            continue
        wide, others = one.float(), other.float()
        nan = wide.isnan(), others.isnan()
        wrong = (nan[0] != nan[1]) | (wide.view(torch.int32) != others.view(torch.int32)) & ~(nan[0] & nan[1])
        if wrong.any():
            first = wide[wrong][0].item(), others[wrong][0].item()
            texts.append(f"{what}: {name} differ in {int(wrong.sum())} of {wrong.numel()}, such as {first}")
    return texts
