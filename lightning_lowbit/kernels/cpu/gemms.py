"""GEMMs of codes with scales of blocks on CPUs (source/gemm.cpp), which cast or unpack their operands, too."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu import casts
from lightning_lowbit.kernels.cpu.codes import packed_codes
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.cpu.products import window_of
from lightning_lowbit.kernels.memory import Misfit, address, described, is_dense, resolved, start
from lightning_lowbit.quant.call import CastCall, has_factor
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.packed import pack, packing_obstacle, unpacked_factor
from lightning_lowbit.quant.transforms import rotate

INSTRUCTIONS = ("plain loops", "AVX2", "AVX-VNNI", "AVX-512 VNNI", "NEON dot products", "AVX-512")

# Numbers of results in source/gemm.cpp, by their dtype and the one to which they are rounded.
_RESULTS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float32, torch.bfloat16): 2,
}
_MOST = 127, 15  # the largest elements on the left and on the right, in steps
_MOST_PIXELS = 2**31 - 2  # whose numbers are int32, with that of a row of zeros behind them
_LONGEST = (2**31 - 1) // (_MOST[0] * _MOST[1])  # of sums in int32


class _Panels(ctypes.Structure):
    """``Panels`` of source/panels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("rows", "inner")),
        *((name, ctypes.c_int32) for name in ("dim", "block", "offset")),
    ]


class _Operand(ctypes.Structure):
    """``GemmOperand`` of source/gemm.cpp."""

    _fields_ = [
        ("panels", _Panels),
        *((name, ctypes.c_void_p) for name in ("factors", "matrix")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("numbers", "key", "amax", "rotation", "place", "packed", "window")),
        ("factor_count", ctypes.c_int32),
        ("step", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_grouped", "rotates_apart")),
    ]


class _Result(ctypes.Structure):
    """``GemmResult`` of source/gemm.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "bias")),
        *((name, ctypes.c_int32) for name in ("dtype", "bias_dtype")),
    ]


class _Stack(ctypes.Structure):
    """``GemmStack`` of source/gemm.cpp."""

    _fields_ = [("ends", ctypes.c_void_p), ("products", ctypes.c_int64)]


class Form(NamedTuple):
    """What is known of the operands of a cast along one dimension."""

    block: int  # 0 for none
    step: float
    largest: float  # element, in steps
    factors: bool  # one for each row
    factor: bool  # one


@cache
def form_of(spec: str, dim: int) -> Form:
    """Returns the form of the operands of a cast, given by its spec, along a dimension."""
    cast = Cast.from_spec(spec)
    block, format = cast.scale.block, cast.grid
    along = block[dim] if isinstance(block, tuple) else block
    by_row = block == "row" or cast.scale.two_level == "row"
    step = 2.0 ** (format.min_exponent - format.mantissa_bits)
    return Form(
        block=along if isinstance(along, int) else 0,
        step=step,
        largest=format.max / step,
        factors=by_row,
        factor=has_factor(cast) and not by_row,
    )


@cache
def shared_block(left: str, left_dim: int, right: str, right_dim: int) -> int | None:
    """Returns the elements of the contraction axis that share scales of two casts (0 for all of them), given by their
    specs and the dimensions of this axis; None where the kernels do not multiply them.

    These take elements of 127 steps on the left and 15 on the right; blocks of 16 or a multiple, of which one is a
    multiple of the other; and scales that show a NaN, since codes do not.
    """
    forms = form_of(left, left_dim), form_of(right, right_dim)
    blocks = [form.block for form in forms if form.block]
    if any(casts.obstacle(cast) or packing_obstacle(cast) for cast in map(Cast.from_spec, (left, right))):
        return None
    if any(block % 16 for block in blocks) or (blocks and max(blocks) % min(blocks)):
        return None
    is_small = forms[0].largest <= _MOST[0] and forms[1].largest <= _MOST[1]
    return min(blocks, default=0) if is_small else None


def instructions() -> str | None:
    """Returns the instructions that multiply codes on this CPU, one of ``INSTRUCTIONS``; None without kernels."""
    if (kernels := library()) is None:
        return None
    number = ctypes.c_int32()
    kernels.lowbit_instructions(ctypes.byref(number))
    return INSTRUCTIONS[number.value]


def takes_pixels(left: Any, right: Any) -> bool:
    """Returns whether the kernels find the patches of the left operand in its pixels: channels are whole blocks of both
    operands then, and no code depends on its place."""
    x, call = left.x, left.call
    forms = form_of(call.cast.spec, call.dim), form_of(right.call.cast.spec, right.call.dim)
    has_places = call.cast.draws or forms[0].factors or call.rotation is not None or call.shard is not None
    if library() is None or has_places or call.dim != 1 or len(x) > _MOST_PIXELS:
        return False
    if not forms[0].block or left.pixels.shape[1] % max(form.block for form in forms):
        return False
    numbers = casts.cpp_cast(call.cast.spec, 1, x.dtype, torch.float32)
    return is_dense(x) and x.is_cpu and numbers is not None and casts.takes(x, numbers, call)


def multiply(
    x: Tensor, left: Any, right: Any, bias: Tensor | None, dtype: torch.dtype, through: torch.dtype | None = None
) -> Tensor | None:
    """Returns the product of operands, ``x`` that of ``left``; None for arguments that the kernels do not take."""
    kernels, number = library(), _RESULTS.get((dtype, through or dtype))
    if kernels is None or number is None or not _fits(left, right):
        return None
    if right.pixels is not None or (left.pixels is not None and not takes_pixels(left, right)):
        return None
    keep: list[Any] = []  # tensors and structures that the kernel reads
    first, second = _operand(left._replace(x=x), keep), _operand(right, keep)
    if first is None or second is None:
        return None
    stack, products, shape = None, 1, [left.rows, right.rows]
    if left.ends is not None:
        products = len(left.ends)
        places = (ctypes.c_int64 * products)(*left.ends)
        stack = _Stack(ctypes.addressof(places), products)
        keep += stack, places
        shape = shape if left.call.dim == 1 else [products, *shape]
    values = x.new_empty(shape, dtype=dtype)
    result = _Result(start(values), None, number, 0)
    if bias is not None:
        if bias.dtype not in casts.INPUTS or bias.numel() != products * right.rows:
            return None
        bias = resolved(bias).contiguous()
        result.bias = address("a bias", bias, bias.dtype, products * right.rows)
        result.bias_dtype = casts.INPUTS[bias.dtype]
    structures = (None if one is None else ctypes.byref(one) for one in (first, second, result, stack))
    kernels.lowbit_gemm(*structures, torch.get_num_threads())
    return values


def _fits(left: Any, right: Any) -> bool:
    """Returns whether the kernels multiply operands of these casts, whose sums are no larger than int32 holds."""
    block = shared_block(left.call.cast.spec, left.call.dim, right.call.cast.spec, right.call.dim)
    return block is not None and (block or left.inner) <= _LONGEST


def _operand(operand: Any, keep: list[Any]) -> _Operand | None:
    x, call, factor, shape, ends, pixels = operand
    if not (is_dense(x) and x.is_cpu):
        return None
    form, dim, rows, inner = form_of(call.cast.spec, call.dim), call.dim, operand.rows, operand.inner
    panels = _Panels(None, None, rows, inner, dim, form.block, 0)
    count = rows if form.factors else int(form.factor)
    if factor is not None:
        return _packed_operand(x, call, factor, shape, panels, count, form.step, keep)
    numbers = casts.cpp_cast(call.cast.spec, dim, x.dtype, torch.float32)
    products = len(ends) if ends is not None else len(x) if x.dim() == 3 else None
    one = call if products is None else call.of_product(0)
    matrix = x if x.dim() == 2 else x[0]
    if numbers is None or not casts.takes(matrix, numbers, one):  # plain code casts it, or says why not
        if products is not None or pixels is not None:
            return None
        x = x if call.rotation is None else rotate(x, call.rotation, dim)
        x, factor = pack(x, call.cast, call.key, call.amax, None, call.shard, dim)
        return _packed_operand(x, call, factor, shape, panels, count, form.step, keep)
    window, source = None, call.shape(x) if products is None else call.stack_shape(x)
    if pixels is not None:
        window, source = window_of(pixels.shape[0], pixels.dimensions), pixels.patches_shape
        panels.rows, panels.inner = pixels.matrix_shape
    if source != shape or (pixels is not None and x.shape != pixels.matrix_shape):
        raise Misfit(
            f"A GEMM of codes needs a matrix whose operand is {tuple(shape)}, and got {described(x)}. Make the operand "
            "by code_operand."
        )
    x = resolved(x).contiguous()
    place = None if call.shard is None else (ctypes.c_int32 * 2)(*call.shard.place(shape, numbers.tile)[1:])
    rotation, key = casts.rotation_of(one.rotation, dim), call.key if numbers.draws else None
    if products is not None:
        if key is not None:
            key = key.contiguous()
            address("keys", key, torch.int64, products)
        if call.rotation is not None and call.rotation.dim() == 2:
            address("signs", call.rotation, torch.float32, products * call.rotation.shape[1])
    keep += x, key, place, rotation, window
    return _Operand(
        panels,
        None,
        start(x),
        *x.shape[-2:],
        numbers.address,
        None if key is None else start(key),
        None if call.amax is None else start(call.amax),
        None if rotation is None else ctypes.addressof(rotation),
        None if place is None else ctypes.addressof(place),
        None,
        None if window is None else ctypes.addressof(window),
        count,
        form.step,
        ends is not None,
        one.rotation is not call.rotation,
    )


def _packed_operand(
    data: Tensor,
    call: CastCall,
    factor: Tensor,
    shape: torch.Size,
    panels: _Panels,
    count: int,
    step: float,
    keep: list[Any],
) -> _Operand | None:
    rows, columns = shape
    data = data.contiguous()
    if (parts := packed_codes(data, call, rows, columns)) is None:
        return None
    numbers, codes = parts
    factors = None
    if count:
        whole = unpacked_factor(data[None], factor, call.cast, rows * columns, call.dim)
        assert whole is not None
        factor = whole.contiguous()
        factors = address("factors", factor, torch.float32, count)
    keep += data, codes, factor
    others = numbers.address, None, None, None, None, ctypes.addressof(codes), None, count, step
    return _Operand(panels, factors, start(data), rows, columns, *others)
