"""The Triton kernels beside the plain code: in Triton's interpreter, in a process with ``TRITON_INTERPRET=1``, or on a
GPU, within ``kernels_on``. The plain code runs on the CPU.

Functions take and return what can be pickled, and say in words what differs: an empty list is equality to the bit.
"""

import contextlib
import dataclasses
import functools
import unittest.mock
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_lowbit import Cast, compilation
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.layout import make_laid_out, repeated, taken_apart
from lightning_lowbit.kernels.operands import AMAX, CAST, CAST_BOTH, ROTATE, SIGNS
from lightning_lowbit.kernels.packing import PACK, UNPACK
from lightning_lowbit.kernels.products import PAD, SCALE_AND_ROUND
from lightning_lowbit.nn.core.watch import stage_and_choose
from lightning_lowbit.quant import Hadamard, rotate
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.shard import amax_of
from lightning_lowbit.quant.transforms import SIZES

np.seterr(all="ignore")  # divisions by zero are meant
KEY = 0x123456789ABCDEF
_place = torch.device("cpu")  # where kernels run


def interpret():
    """Has Triton's interpreter replace the functions of its language once, and not in each call of a function, and not
    compute integers again in 64 bits for an assertion that it leaves out: together two thirds of its time."""
    import triton.language as tl  # here, since other processes have no Triton
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@contextlib.contextmanager
def kernels_on(device):
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

    results = function(*tree_map_only(Tensor, copied, arguments))
    for memory, copy in copies.values():
        memory.copy_(copy)
    return tree_map_only(Tensor, Tensor.cpu, results)


class Case(NamedTuple):
    """One operand; ``dtype`` None takes the one that layers take."""

    cast: Cast
    dim: int
    x: Tensor
    amax: float | None = None
    dtype: torch.dtype | None = None
    key: int = KEY


def _of_cases(compare):
    """A function that says what differs in a case, as one of many cases."""

    @functools.wraps(compare)
    def differences(cases):
        return [text for case in cases for text in compare(case)]

    return differences


def by_operation(operation, arguments, where):
    """What the kernel of an operation makes otherwise than the plain code."""
    with compilation.backend("eager"):
        expected = operation.plain(*arguments)
    return _unequal(there(operation.triton, *arguments), expected, where)


@_of_cases
def differences(case):
    x, cast, dtype = case.x, case.cast, case.dtype or operand_dtype(case.x.dtype, case.cast)
    if (reason := there(gpu.covers, cast, x, dtype)) is not None:
        return [f"not covered: {reason}"]
    where = f"{cast}, dim {case.dim}, {describe(x)} to {dtype}, amax {case.amax}"
    return by_operation(CAST, (x, _call(case, dtype=dtype)), where)


def differences_along_columns(cases):
    """Of values that lie along columns, as those on GPUs do."""
    with unittest.mock.patch.object(CastCall, "is_across", lambda call, x: call.dim == 0):
        strides = [there(gpu.make_operand, case.x, _call(case, dtype=case.dtype)).values.stride() for case in cases]
        assert strides == [(1, len(case.x)) for case in cases]
        return differences(cases)


def _call(case, **others):
    key = torch.tensor(case.key) if case.cast.draws else None
    return CastCall(case.cast, case.dim, key, None if case.amax is None else torch.tensor(case.amax), **others)


@_of_cases
def differences_of_both(case):
    row, column, x = case
    calls = CastCall(row, 1, torch.tensor(KEY)), CastCall(column, 0, torch.tensor(-KEY))
    return by_operation(CAST_BOTH, (x, *calls), f"{row} and {column}: {describe(x)}")


@_of_cases
def differences_of_finish(case):
    product, factors, bias, dtype = case
    shapes = [tuple(factor.shape) for factor in factors], None if bias is None else tuple(bias.shape)
    return by_operation(SCALE_AND_ROUND, case, f"{describe(product)}, factors and bias {shapes}, to {dtype}")


@_of_cases
def differences_of_amax(x):
    return by_operation(AMAX, (x, None, 1), describe(x))


@_of_cases
def differences_of_delay(case):
    own, in_force, staged, places = case
    records = [None if staged is None else staged.clone() for _ in range(2)]
    found = there(gpu.delayed_amax, own, in_force, records[0], places)
    with compilation.backend("eager"):
        expected = stage_and_choose(in_force, records[1], places, own)
    return _unequal((found, records[0]), (expected, records[1]), f"{own} at {places}")


@_of_cases
def differences_of_packing(case):
    x, call, where = case.x, _call(case), f"{case.cast}, dim {case.dim}, {describe(case.x)}"
    if not there(gpu.packs, case.cast, x, case.dim):
        return [f"not covered: {where}"]
    found = there(gpu.pack, x, call)
    with compilation.backend("eager"):
        expected = PACK.plain(x, call)
        values = UNPACK.plain(*expected, call, x.shape, x.dtype).values
    again = there(gpu.unpack, *found, call, x.shape, x.dtype).values
    texts = _unequal((again, found.factor), (values, expected.factor), where)
    return texts + (_unequal(found.data, expected.data, f"bytes of {where}") if x.isfinite().all() else [])


@_of_cases
def differences_of_layout(case):
    case, block = case
    cast, dim, x = case.cast, case.dim, case.x
    call, where = _call(case, block=block), f"{cast}, dim {dim}, {describe(x)}, amax {case.amax}"
    if not there(gpu.lays_out, cast, x, block, dim):
        return [f"not covered: {where}"]
    with compilation.backend("eager"):
        expected = make_laid_out(x, call)
    found = there(gpu.lay_out, x, call)
    size = x.shape[1 - dim], x.shape[dim]
    apart = [taken_apart(*made[:2], block, *size) for made in (found, expected)]
    down = [block if len(scales) < size[0] else 1 for _, scales in apart]  # of tiles
    spread = [repeated(scales.float(), *size, rows, block) for (_, scales), rows in zip(apart, down, strict=True)]
    values = [_decoded(cast, codes) * scales for (codes, _), scales in zip(apart, spread, strict=True)]
    texts = _unequal((values[0], found[2]), (values[1], expected[2]), where)
    if x.isfinite().all():
        bytes_ = [tuple(one.contiguous().view(torch.uint8) for one in made[:2]) for made in (found, expected)]
        texts += _unequal(*bytes_, f"bytes of {where}")
    return texts


@_of_cases
def differences_of_rotation(case):
    (cast, dim, x, *_, number), size = case
    signs = Hadamard(size, "keyed").diagonal(torch.tensor(number), x.device)
    where = f"{cast}, dim {dim}, {describe(x)}, rotated by {size}"
    reason = there(gpu.covers, cast, x, operand_dtype(x.dtype, cast)) or gpu.rotation_obstacle(cast, dim)
    if reason is not None:
        return [f"not covered: {reason}, {where}"]
    texts = by_operation(CAST, (x, _call(case[0], rotation=signs)), where)
    texts += by_operation(ROTATE, (x, signs, dim), f"rotation alone: {where}")
    return texts + _unequal(there(gpu.amax_of, x, signs, dim), amax_of(rotate(x, signs, dim)).abs(), f"amax: {where}")


@_of_cases
def differences_of_bytes(case):
    return by_operation(PAD, case, f"{describe(case[0])}, {case[1:]} rows and columns more")


def differences_of_signs(keys):
    return [text for size in SIZES for text in by_operation(SIGNS, (keys, size), f"signs of groups of {size}")]


def _decoded(cast, codes):
    return cast.format.decode(codes) if codes.dtype == torch.uint8 else codes.float()


def shard(x, cast, dim, place):
    return there(gpu.make_operand, x, CastCall(cast, dim, torch.tensor(KEY), None, torch.float32, place)).values


def describe(x):
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"


def _unequal(found, expected, what):
    """Where tensors, numbers, or tuples of them and None, differ in more than the bits of NaN."""
    if isinstance(found, tuple) and isinstance(expected, tuple) and len(found) == len(expected):
        return [text for pair in zip(found, expected, strict=True) for text in _unequal(*pair, what)]
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return [] if found == expected else [f"{what}: {found}, not {expected}"]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{what}: {describe(found)}, not {describe(expected)}"]
    one, other = found.float(), expected.float()
    same = (one.view(torch.int32) == other.view(torch.int32)) | one.isnan() & other.isnan()
    if same.all():
        return []
    first = one[~same][0].item(), other[~same][0].item()
    return [f"{what}: {int((~same).sum())} of {same.numel()} differ, such as {first}"]
