"""Casts by the C++ kernels; they equal :func:`lightning_lowbit.quant.quantize_operand` to the bit."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.formats import Format
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, start
from lightning_lowbit.quant.blocks import Tile, tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import (
    Operand,
    are_regular,
    factor_shape,
    has_factor,
    is_rounded,
    operand_dtype,
    stands_alone,
)
from lightning_lowbit.quant.scales import e8m0_rule, fp32_numerator
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.transforms import SIZES, rotated_shape

# The numbers of dtypes in source/casts.cpp.
INPUTS = {torch.float32: 0, torch.bfloat16: 1}
_OUTPUTS = {**INPUTS, torch.int8: 2}

_KINDS = {"nearest": 0, "stochastic": 0, "up": 1}
_SECOND_LEVELS = {False: 0, True: 1, "row": 2}
_ERRORS = {None: 0, "mse": 1, "mae": 2}


class _Grid(ctypes.Structure):
    _fields_ = [("max", ctypes.c_float), ("min_exponent", ctypes.c_int32), ("mantissa_bits", ctypes.c_int32)]

    @classmethod
    def of(cls, format: Format) -> "_Grid":
        return cls(format.max, format.min_exponent, format.mantissa_bits)


class _Settings(ctypes.Structure):
    """``Plan`` of source/rounding.h."""

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


class Plan(NamedTuple):
    """A cast along one dimension, from one dtype to another, as the kernels take it.

    Attributes:
        settings, address: the structure that the kernels read.
        dtype: that of the values.
        cast, dim, tile: the cast, the dimension of its blocks, and its tile.
        has_factor: whether there is a factor.
        draws, needs_amax: whether the cast needs a key, and the amax of the tensor.
        rotates: whether the kernels rotate the matrix, too.
    """

    settings: ctypes.Structure
    address: int
    dtype: torch.dtype
    cast: Cast
    dim: int
    tile: Tile
    has_factor: bool
    draws: bool
    needs_amax: bool
    rotates: bool


@cache
def obstacle(cast: Cast) -> str | None:
    """Why the kernels do not cover a cast, in words; None where they do."""
    if cast.element == "e3m0":
        return "elements without a mantissa"
    if cast.scale.statistic == "minmax":
        return "scales with a zero point"
    if cast.scale.statistic == "absmean" and cast.scale.block != "tensor":
        return "means of blocks"
    return None


def rotates(cast: Cast) -> str | None:
    """Why the kernels do not rotate what they cast, in words; None where they do."""
    if cast.scale.two_level == "row":
        return "second levels per row"
    return "the mean of a tensor" if cast.scale.block == "tensor" and cast.scale.statistic != "absmax" else None


@cache
def plan_of(spec: str, dim: int, source: torch.dtype, dtype: torch.dtype | None) -> Plan | None:
    """The plan of a cast from the dtype ``source`` to ``dtype`` (None: :func:`lightning_lowbit.quant.operand_dtype`);
    None where the kernels do not cover it."""
    cast = Cast.from_spec(spec)
    dtype = dtype or operand_dtype(source, cast)
    if obstacle(cast) is not None or source not in INPUTS or dtype not in _OUTPUTS or library() is None:
        return None
    scale, tile = cast.scale, tile_of(cast, dim, 2)
    exponent, round_up_from = e8m0_rule(cast.format, scale.rounding) if scale.format == "e8m0" else (0, 0.0)
    kind = {"e8m0": 2, "bf16": 3, "fp16": 4, "fp32": 6 if scale.rounding == "power_of_two" else 5}.get(scale.format)
    settings = _Settings(
        element=_Grid.of(cast.grid),
        scale=_Grid.of(scale.storage),
        input=INPUTS[source],
        output=_OUTPUTS[dtype],
        tile_rows=tile[0],
        tile_columns=tile[1],
        statistic=0 if scale.block != "tensor" else 1 if scale.statistic == "absmax" else 2,
        kind=_KINDS[str(scale.rounding)] if kind is None else kind,
        four_over_six=_ERRORS[scale.four_over_six],
        two_level=_SECOND_LEVELS[scale.two_level],
        per_block=scale.per_block,
        stochastic=cast.rounding == "stochastic",
        stochastic_scales=scale.rounding == "stochastic",
        correction=scale.correction or 0,
        exact=cast.fits_bfloat16 and scale.format not in ("e8m0", "fp32"),  # those reach subnormal numbers
        through_bf16=dtype != source == torch.bfloat16 and is_rounded(source, cast),
        top_exponent=exponent,
        round_up_from=round_up_from,
        numerator=scale.largest * cast.format.max / scale.factor,
        prescale=scale.prescale,
        epsilon=scale.epsilon,
        factor=scale.factor,
        size=fp32_numerator(cast) if scale.format == "fp32" else 0.0,
    )
    return Plan(
        settings,
        ctypes.addressof(settings),
        dtype,
        cast,
        dim,
        tile,
        has_factor(cast),
        cast.draws,
        scale.needs_amax,
        rotates(cast) is None,
    )


def takes(
    x: Tensor,
    plan: Plan,
    key: Tensor | None,
    amax: Tensor | None,
    shard: Shard | None,
    rotation: Tensor | None = None,
) -> bool:
    """Whether the kernels take these arguments: not empty matrices, nor those that share statistics with other
    processes, nor anything that the plain code refuses."""
    is_given = plan.draws or amax is not None  # else there is nothing to check
    if is_given and not are_regular(plan.draws, plan.needs_amax, key, amax, x.device):
        return False
    if rotation is not None and not (plan.rotates and are_signs(rotation, plan.dim)):
        return False
    is_matrix = x.dim() == 2 and x.numel() > 0
    return is_matrix and (shard is None or stands_alone(plan.cast, plan.dim, amax, shard))


def are_signs(rotation: Tensor, dim: int) -> bool:
    """Whether the kernels rotate groups along a dimension by these signs."""
    is_there = (
        type(rotation) is Tensor and rotation.is_cpu and rotation.dtype == torch.float32 and not rotation.is_neg()
    )
    return is_there and rotation.dim() == 1 and len(rotation) in SIZES and rotation.is_contiguous() and dim in (0, 1)


def quantize(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    shard: Shard | None,
    rotation: Tensor | None = None,
) -> Operand | None:
    """The operand of :func:`lightning_lowbit.quant.quantize_operand`; None for what the kernels do not take."""
    plan = plan_of(spec, dim, x.dtype, dtype)
    if plan is None or not takes(x, plan, key, amax, shard, rotation):
        return None
    x, factor = x.contiguous(), None
    if rotation is None:
        values = torch.empty_like(x, dtype=plan.dtype, memory_format=torch.contiguous_format)
    else:
        values = x.new_empty(rotated_shape(x.shape, rotation, dim), dtype=plan.dtype)
    if plan.has_factor:
        factor = x.new_empty(factor_shape(values, plan.cast, dim), dtype=torch.float32)
    write(x, plan, key, amax, shard, values, factor, rotation)
    return Operand(values, factor)


def write(
    x: Tensor,
    plan: Plan,
    key: Tensor | None,
    amax: Tensor | None,
    shard: Shard | None,
    values: Tensor,
    factor: Tensor | None,
    rotation: Tensor | None = None,
    codes: Codes | None = None,
) -> None:
    """Writes what a cast gives to ``values`` and ``factor``, which are new: values of the plan's dtype, or codes. The
    other tensors are those that :func:`takes` has seen, and ``x`` is contiguous."""
    place = None
    if shard is not None:
        shape = x.shape if rotation is None else rotated_shape(x.shape, rotation, plan.dim)
        place = (ctypes.c_int32 * 2)(*shard.place(shape, plan.tile)[1:])
    library().lowbit_cast(  # type: ignore[union-attr]
        start(x),
        *x.shape,
        plan.address,
        start(values),
        None if factor is None else start(factor),
        start(key) if plan.draws and key is not None else None,
        None if amax is None else start(amax),
        _turn(rotation, plan.dim),
        place,
        None if codes is None else ctypes.byref(codes),
        torch.get_num_threads(),
    )


def amax_of(x: Tensor, rotation: Tensor | None = None, dim: int = 1) -> Tensor | None:
    """max|x| of a float32 or bfloat16 tensor, of a rotated one a matrix: 0-d float32, not finite if an element is not;
    None for all others."""
    dtype, kernels, count = INPUTS.get(x.dtype), library(), x.numel()
    if dtype is None or kernels is None or count == 0:
        return None
    if rotation is not None and not (x.dim() == 2 and are_signs(rotation, dim)):
        return None
    x, result = x.contiguous(), x.new_empty((), dtype=torch.float32)
    shape, turn = x.shape if x.dim() == 2 else (1, count), _turn(rotation, dim)
    kernels.lowbit_amax(start(x), dtype, *shape, turn, start(result), torch.get_num_threads())
    return result


def delayed_amax(own: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor | None:
    """:func:`lightning_lowbit.kernels.delayed.delayed_amax` on a CPU, which has compared the tensors; None where no
    kernel does it."""
    if (kernels := library()) is None:
        return None
    result, bits = torch.empty_like(own), sum(1 << place for place in places)
    force, record = start(in_force) + places[0] * in_force.itemsize, None if staged is None else start(staged)
    kernels.lowbit_delayed_amax(start(own), force, record, bits, start(result))
    return result


def rotate(x: Tensor, rotation: Tensor, dim: int) -> Tensor | None:
    """A float32 or bfloat16 matrix as :func:`lightning_lowbit.quant.rotate` has it; None for all others."""
    dtype, kernels = INPUTS.get(x.dtype), library()
    if dtype is None or kernels is None or x.numel() == 0 or x.dim() != 2 or not are_signs(rotation, dim):
        return None
    x, result, turn = x.contiguous(), x.new_empty(rotated_shape(x.shape, rotation, dim)), _turn(rotation, dim)
    kernels.lowbit_rotate(start(x), dtype, *x.shape, turn, start(result), torch.get_num_threads())
    return result


def _turn(rotation: Tensor | None, dim: int) -> Any:
    if rotation is None:
        return None
    signs = address("signs", rotation, torch.float32, len(rotation))
    return ctypes.byref(_Rotation(signs, len(rotation), dim))
