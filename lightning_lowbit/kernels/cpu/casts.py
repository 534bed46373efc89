"""Casts by the C++ kernels; they equal :func:`lightning_lowbit.quant.quantize_operand` to the bit."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, are_signs, start
from lightning_lowbit.kernels.numbers import Grid, cast_numbers
from lightning_lowbit.quant.blocks import Tile, tile_of
from lightning_lowbit.quant.call import CastCall, are_regular, factor_shape, has_factor, is_rounded, operand_dtype
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.quant.transforms import rotated_shape

# The numbers of dtypes, as source/rounding.h has them.
INPUTS = {torch.float32: 0, torch.bfloat16: 1}
OUTPUTS = {**INPUTS, torch.int8: 2}

_KINDS = {"e8m0": 2, "bf16": 3, "fp16": 4, "fp32": 5}
_SECOND_LEVELS = {False: 0, True: 1, "row": 2}
_ERRORS = {"": 0, "mse": 1, "mae": 2}


class _Grid(ctypes.Structure):
    _fields_ = [("max", ctypes.c_float), ("min_exponent", ctypes.c_int32), ("mantissa_bits", ctypes.c_int32)]


class _Numbers(ctypes.Structure):
    """``CastNumbers`` of source/rounding.h."""

    _fields_ = [
        ("element", _Grid),
        ("scale", _Grid),
        *((name, ctypes.c_int32) for name in ("input", "output")),
        *((name, ctypes.c_int32) for name in ("tile_rows", "tile_columns", "statistic", "kind", "four_over_six")),
        *((name, ctypes.c_int32) for name in ("two_level", "per_block", "stochastic")),
        *((name, ctypes.c_int32) for name in ("stochastic_scales", "correction")),
        *((name, ctypes.c_int32) for name in ("exact", "through_bf16", "top_exponent")),
        *((name, ctypes.c_float) for name in ("round_up_from", "numerator", "prescale", "epsilon", "factor", "size")),
    ]


class Codes(ctypes.Structure):
    """``Codes`` of source/codes.h."""

    _fields_ = [("scales", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("coding", "scale_coding", "bits"))]


class _Rotation(ctypes.Structure):
    """``Rotation`` of source/rotation.h."""

    _fields_ = [("signs", ctypes.c_void_p), ("size", ctypes.c_int32), ("dim", ctypes.c_int32)]


class CppCast(NamedTuple):
    """A cast along one dimension, from one dtype to another, as the kernels take it."""

    numbers: ctypes.Structure  # what the kernels read, at the address
    address: int
    dtype: torch.dtype  # of the values
    tile: Tile  # of blocks
    has_factor: bool
    has_factors: bool  # one for each row or column
    draws: bool  # whether it needs a key
    needs_amax: bool  # that of the tensor
    rotates: bool  # whether the kernels rotate the matrix, too


@cache
def obstacle(cast: Cast) -> str | None:
    """Returns why the kernels do not cover a cast, in words; None where they do."""
    if cast.element == "e3m0":
        return "elements without a mantissa"
    if cast.scale.statistic == "minmax":
        return "scales with a zero point"
    if cast.scale.statistic == "absmean" and cast.scale.block != "tensor":
        return "means of blocks"
    return None


@cache
def rotation_obstacle(cast: Cast) -> str | None:
    """Returns why the kernels do not rotate a matrix that they cast, in words; None where they do."""
    if cast.scale.two_level == "row":
        return "second levels per row"
    return "the mean of a tensor" if cast.scale.block == "tensor" and cast.scale.statistic != "absmax" else None


@cache
def cpp_cast(spec: str, dim: int, source: torch.dtype, dtype: torch.dtype | None) -> CppCast | None:
    """Returns the cast with this spec along ``dim``, from the dtype ``source`` to ``dtype`` (None:
    :func:`operand_dtype`); None where the kernels do not cover it."""
    cast = Cast.from_spec(spec)
    dtype = dtype or operand_dtype(source, cast)
    if obstacle(cast) is not None or source not in INPUTS or dtype not in OUTPUTS or library() is None:
        return None
    scale, tile, shared = cast.scale, tile_of(cast, dim, 2), cast_numbers(cast)
    numbers = _Numbers(
        element=_grid(shared.elements),
        scale=_grid(shared.storage),
        input=INPUTS[source],
        output=OUTPUTS[dtype],
        tile_rows=tile[0],
        tile_columns=tile[1],
        statistic=0 if not shared.is_tensor else 1 if shared.statistic == "absmax" else 2,
        kind=_KINDS.get(scale.format, int(shared.up)) + shared.power_of_two,
        four_over_six=_ERRORS[shared.four_over_six],
        two_level=_SECOND_LEVELS[scale.two_level],
        per_block=shared.scaled,
        stochastic=shared.stochastic,
        stochastic_scales=shared.drawn,
        correction=scale.correction or 0,
        exact=cast.fits_bfloat16 and scale.format not in ("e8m0", "fp32"),  # those reach subnormal numbers
        through_bf16=dtype != source == torch.bfloat16 and is_rounded(source, cast),
        top_exponent=shared.exponent,
        round_up_from=1 + shared.threshold * 2.0**-23,
        numerator=shared.top,
        prescale=shared.prescale,
        epsilon=shared.epsilon,
        factor=shared.factor,
        size=shared.size,
    )
    return CppCast(
        numbers,
        ctypes.addressof(numbers),
        dtype,
        tile,
        has_factor(cast),
        "row" in (scale.block, scale.two_level),
        cast.draws,
        scale.needs_amax,
        rotation_obstacle(cast) is None,
    )


def _grid(grid: Grid) -> _Grid:
    return _Grid(grid.max, grid.min_exponent, grid.mantissa_bits)


def takes(x: Tensor, form: CppCast, call: CastCall) -> bool:
    """Returns whether the kernels take these arguments: no empty matrices, no statistics shared with other processes,
    and nothing that the plain code refuses."""
    _, dim, key, amax, _, shard, rotation, _ = call
    if (form.draws or amax is not None) and not are_regular(form.draws, form.needs_amax, key, amax, x.device):
        return False
    if rotation is not None and not (form.rotates and are_signs(rotation, x, dim)):
        return False
    return x.dim() == 2 and x.numel() > 0 and (shard is None or call.stands_alone())


def make_operand(x: Tensor, call: CastCall) -> Operand | None:
    """Returns the operand of a resolved matrix; None for arguments that the kernels do not take."""
    form = cpp_cast(call.cast.spec, call.dim, x.dtype, call.dtype)
    if form is None or not takes(x, form, call):
        return None
    x, factor = x.contiguous(), None
    if call.rotation is None:
        values = torch.empty_like(x, dtype=form.dtype, memory_format=torch.contiguous_format)
    else:
        values = x.new_empty(call.shape(x), dtype=form.dtype)
    if form.has_factor:
        shape = factor_shape(values.shape, call.cast, call.dim) if form.has_factors else ()
        factor = x.new_empty(shape, dtype=torch.float32)
    write(x, form, call, values, factor)
    return Operand(values, factor)


def write(
    x: Tensor, form: CppCast, call: CastCall, values: Tensor, factor: Tensor | None, codes: Codes | None = None
) -> None:
    """Writes the values (or codes) and the factor of a cast to new tensors.

    ``x`` is contiguous, and :func:`takes` has compared the arguments.
    """
    _, dim, key, amax, _, shard, rotation, _ = call
    place = None
    if shard is not None:
        place = (ctypes.c_int32 * 2)(*shard.place(call.shape(x), form.tile)[1:])
    library().lowbit_cast(  # type: ignore[union-attr]
        start(x),
        *x.shape,
        form.address,
        start(values),
        None if factor is None else start(factor),
        start(key) if form.draws and key is not None else None,
        None if amax is None else start(amax),
        _reference(rotation_of(rotation, dim)),
        place,
        None if codes is None else ctypes.byref(codes),
        None,
        torch.get_num_threads(),
    )


def amax_of(x: Tensor, rotation: Tensor | None = None, dim: int = 1) -> Tensor | None:
    """Returns max|x| of a float32 or bfloat16 tensor, or of a rotated matrix: 0-d float32; None for all others."""
    dtype, kernels, count = INPUTS.get(x.dtype), library(), x.numel()
    if dtype is None or kernels is None or count == 0:
        return None
    if rotation is not None and not (x.dim() == 2 and are_signs(rotation, x, dim)):
        return None
    x, result = x.contiguous(), x.new_empty((), dtype=torch.float32)
    shape, signs = x.shape if x.dim() == 2 else (1, count), _reference(rotation_of(rotation, dim))
    kernels.lowbit_amax(start(x), dtype, *shape, signs, start(result), torch.get_num_threads())
    return result


def delayed_amax(amax: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor | None:
    """Does :func:`lightning_lowbit.kernels.delayed_amax`, for tensors that have been compared; None without kernels."""
    if (kernels := library()) is None:
        return None
    result, bits = torch.empty_like(amax), sum(1 << place for place in places)
    force, record = start(in_force) + places[0] * in_force.itemsize, None if staged is None else start(staged)
    kernels.lowbit_delayed_amax(start(amax), force, record, bits, start(result))
    return result


def rotate(x: Tensor, rotation: Tensor, dim: int) -> Tensor | None:
    """Rotates a float32 or bfloat16 matrix as :func:`lightning_lowbit.quant.rotate` does; None for all others."""
    dtype, kernels = INPUTS.get(x.dtype), library()
    if dtype is None or kernels is None or x.numel() == 0 or x.dim() != 2 or not are_signs(rotation, x, dim):
        return None
    x, result = x.contiguous(), x.new_empty(rotated_shape(x.shape, rotation, dim))
    signs = _reference(rotation_of(rotation, dim))
    kernels.lowbit_rotate(start(x), dtype, *x.shape, signs, start(result), torch.get_num_threads())
    return result


def rotation_of(rotation: Tensor | None, dim: int) -> ctypes.Structure | None:
    """Returns the structure of a rotation that :func:`are_signs` has compared; None for none."""
    if rotation is None:
        return None
    return _Rotation(address("signs", rotation, torch.float32, len(rotation)), len(rotation), dim)


def _reference(structure: ctypes.Structure | None) -> Any:
    return None if structure is None else ctypes.byref(structure)
