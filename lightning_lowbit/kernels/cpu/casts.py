"""Casts by the C++ kernels, which equal :func:`lightning_lowbit.quant.quantize_operand` to the bit."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit.formats import Format
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.wanted import Wanted
from lightning_lowbit.quant.blocks import ALL, tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import factor_shape, is_rounded
from lightning_lowbit.quant.scaling import e8m0_rule, fp32_numerator

# The numbers of dtypes in source/casts.cpp.
_INPUTS = {torch.float32: 0, torch.bfloat16: 1}
_OUTPUTS = {**_INPUTS, torch.int8: 2}

_KINDS = {"nearest": 0, "up": 1}
_ERRORS = {None: 0, "mse": 1, "mae": 2}


class _Grid(ctypes.Structure):
    _fields_ = [("max", ctypes.c_float), ("min_exponent", ctypes.c_int32), ("mantissa_bits", ctypes.c_int32)]

    @classmethod
    def of(cls, format: Format) -> "_Grid":
        return cls(format.max, format.min_exponent, format.mantissa_bits)


class _Plan(ctypes.Structure):
    """``Plan`` of source/rounding.h."""

    _fields_ = [
        ("element", _Grid),
        ("scale", _Grid),
        *((name, ctypes.c_int32) for name in ("tile_rows", "tile_columns", "statistic", "kind", "four_over_six")),
        *((name, ctypes.c_int32) for name in ("two_level", "per_block", "stochastic")),
        *((name, ctypes.c_int32) for name in ("exact", "through_bf16", "top_exponent")),
        *((name, ctypes.c_float) for name in ("round_up_from", "numerator", "prescale", "epsilon", "factor", "size")),
    ]


class _Output(ctypes.Structure):
    """``Output`` of source/casts.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("plan", "values", "factor", "key")),
        *((name, ctypes.c_int32) for name in ("dtype", "all_columns", "first")),
    ]


def obstacle(x: Tensor, wanted: Wanted) -> str | None:
    """Why the kernels do not make an operand, in words; None where they do."""
    if x.dtype not in _INPUTS or wanted.dtype not in _OUTPUTS:
        return f"operands from {x.dtype} to {wanted.dtype}"
    if x.numel() == 0:
        return "empty tensors"
    if wanted.shard is not None and wanted.shard.cuts(tile_of(wanted.cast, wanted.dim, 2)):
        return "statistics over several processes"
    return cast_obstacle(wanted.cast)


@cache
def cast_obstacle(cast: Cast) -> str | None:
    """Why the kernels do not cover a cast, in words; None where they do."""
    if cast.element == "e3m0":
        return "elements without a mantissa"
    if cast.scale.statistic == "minmax":
        return "scales with a zero point"
    if cast.scale.statistic == "absmean" and cast.scale.block != "tensor":
        return "means of blocks"
    return None


@cache
def _plan(spec: str, dim: int, through_bfloat16: bool) -> tuple[_Plan, int, int]:
    """The plan of a cast along a dimension, its address, and the columns that indices of elements are padded to."""
    cast = Cast.from_spec(spec)
    scale, tile = cast.scale, tile_of(cast, dim, 2)
    exponent, round_up_from = e8m0_rule(cast.format, scale.rounding) if scale.format == "e8m0" else (0, 0.0)
    kind = {"e8m0": 2, "fp32": 4 if scale.rounding == "power_of_two" else 3}.get(scale.format)
    plan = _Plan(
        element=_Grid.of(cast.grid),
        scale=_Grid.of(scale.storage),
        tile_rows=tile[0],
        tile_columns=tile[1],
        statistic=0 if scale.block != "tensor" else 1 if scale.statistic == "absmax" else 2,
        kind=_KINDS[str(scale.rounding)] if kind is None else kind,
        four_over_six=_ERRORS[scale.four_over_six],
        two_level=scale.two_level,
        per_block=scale.per_block,
        stochastic=cast.rounding == "stochastic",
        exact=cast.fits_bfloat16 and scale.format not in ("e8m0", "fp32"),  # those reach subnormal numbers
        through_bf16=through_bfloat16,
        top_exponent=exponent,
        round_up_from=round_up_from,
        numerator=scale.largest * cast.format.max,
        prescale=scale.prescale,
        epsilon=scale.epsilon,
        factor=scale.factor,
        size=fp32_numerator(cast) if scale.format == "fp32" else 0.0,
    )
    return plan, ctypes.addressof(plan), max(tile[1], 1)


def quantize(x: Tensor, operands: Sequence[Wanted], amax: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Values and factors of one or two operands, from one reading of ``x`` ``[rows, columns]``; ``amax`` is 0-d float32
    or None. Factors without meaning (:func:`lightning_lowbit.quant.operand.has_factor`) are arbitrary."""
    x, (rows, columns) = x.contiguous(), x.shape
    outputs, results = (_Output * len(operands))(), []
    for output, (cast, dim, key, dtype, shard) in zip(outputs, operands, strict=True):
        through = dtype != x.dtype == torch.bfloat16 and is_rounded(x.dtype, cast)
        plan, address, side = _plan(cast.spec, dim, through)
        values = torch.empty((rows, columns), dtype=dtype)
        factor = torch.empty(factor_shape(x, cast, dim))
        output.plan, output.values, output.factor = address, values.data_ptr(), factor.data_ptr()
        output.dtype, output.all_columns = _OUTPUTS[dtype], columns + -columns % side
        if plan.stochastic:
            assert key is not None
            output.key = key.data_ptr()
        if shard is not None:
            _, output.all_columns, output.first = shard.place(x.shape, tile_of(cast, dim, 2))
        results.append((values, factor))
    kernels = library()
    assert kernels is not None
    given = None if amax is None else amax.data_ptr()
    threads = torch.get_num_threads()
    kernels.lowbit_cast(x.data_ptr(), _INPUTS[x.dtype], rows, columns, given, outputs, len(operands), threads)
    return results


def amax_of(x: Tensor) -> Tensor:
    """max|x|: 0-d float32; not finite if an element is not."""
    x, result = x.contiguous(), torch.empty(())
    kernels = library()
    assert kernels is not None
    kernels.lowbit_amax(x.data_ptr(), _INPUTS[x.dtype], x.numel(), result.data_ptr(), torch.get_num_threads())
    return result
