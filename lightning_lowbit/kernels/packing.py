"""Operands as codes and scales: packed, for tensors that wait for the backward pass, and laid out for native GEMMs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.kernels import layout
from lightning_lowbit.kernels.cpu import codes as cpp
from lightning_lowbit.kernels.forms import (
    cast_form,
    layout_sample,
    layouts_sample,
    pack_form,
    pack_sample,
    pair_form,
    unpack_form,
    unpack_sample,
)
from lightning_lowbit.kernels.gpu import casts as triton
from lightning_lowbit.kernels.memory import described
from lightning_lowbit.kernels.operands import rotate
from lightning_lowbit.kernels.ops import Operation, run, run_in_graph
from lightning_lowbit.quant.call import CastCall, factor_shape, has_factor, operand_dtype
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand
from lightning_lowbit.quant.packed import Packed, empty_packed, pack, packed_bytes, unpack_
from lightning_lowbit.quant.shard import Shard


def _plain_pack(x: Tensor, call: CastCall) -> Packed:
    if call.rotation is None:
        return pack(x, call.cast, call.key, call.amax, None, call.shard, call.dim)
    return run(PACK, rotate(x, call.rotation, call.dim), call._replace(rotation=None))


def _plain_unpack(data: Tensor, factor: Tensor, call: CastCall, shape: torch.Size, source: torch.dtype) -> Operand:
    values = data.new_empty(shape, dtype=call.values_dtype(source))
    return Operand(values, unpack_(values, data[None], factor, call.cast, source, call.dim))


PACK = Operation("packed operands", _plain_pack, cpp.pack, triton.pack, pack_form, pack_sample, empty_packed)
UNPACK = Operation("unpacked operands", _plain_unpack, cpp.unpack, triton.unpack, unpack_form, unpack_sample)
LAY_OUT = Operation(
    "operands of native GEMMs",
    layout.make_laid_out,
    None,
    triton.lay_out,
    cast_form,
    layout_sample,
    layout.empty_laid_out,
)

LAY_OUT_BOTH = Operation(
    "pairs of operands of native GEMMs",
    lambda x, row, column: (run(LAY_OUT, x, row), run(LAY_OUT, x, column)),
    triton=triton.lay_out_both,
    form=pair_form,
    sample=layouts_sample,
)


def pack_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
    rotation: Tensor | None = None,
) -> Packed:
    """Quantizes one operand of a GEMM, as ``quantize_operand`` with the same arguments, and packs it.

    Examples:
        >>> pack_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).data.numel()
        144
    """
    call = CastCall(cast, dim, key, amax, None, shard, rotation)
    if torch.compiler.is_compiling():
        return Packed(*run_in_graph(PACK, x, call))
    return run(PACK, x, call)


def unpack_operand(
    packed: Packed, cast: Cast, dim: int, shape: torch.Size, source: torch.dtype, dtype: torch.dtype | None = None
) -> Operand:
    """Returns the operand of ``quantize_operand``, to the bit (-0 may be 0), from the bytes of :func:`pack_operand`.

    Args:
        packed, cast, dim: of the packed operand.
        shape, source: shape and dtype of the tensor that was packed.
        dtype: of the values, as in ``quantize_operand``.

    Raises:
        ValueError: ``packed`` has another number of bytes, or of factors, than a matrix of ``shape`` needs.
    """
    check_bytes(packed.data, cast, dim, shape)
    factors = shape[1 - dim % 2] if cast.scale.two_level == "row" else 1
    if packed.factor.numel() != factors:
        raise ValueError(
            f"A packed matrix of {tuple(shape)} as {cast} has {factors} float32 scales of its rows or of itself, and "
            f"got {described(packed.factor)}: pack the matrix again."
        )
    dtype = dtype or operand_dtype(source, cast)
    values, factor = _unpack_operand(packed.data, packed.factor, cast.spec, dim, list(shape), source, dtype)
    return Operand(values, factor if has_factor(cast) else None)


def check_bytes(data: Tensor, cast: Cast, dim: int, shape: Sequence[int], more: int = 0) -> None:
    """Raises a ``ValueError`` if a packed matrix of ``shape``, with ``more`` bytes behind it, has another size."""
    size = packed_bytes(shape[0], shape[1], cast, dim) + more
    if data.dtype != torch.uint8 or data.shape != (size,):
        raise ValueError(
            f"A packed matrix of {tuple(shape)} as {cast} is {size} bytes, torch.uint8, and got {described(data)}. The "
            "bytes are those of another matrix or cast, or were cut: load the file from its source, or pack the matrix "
            "again."
        )


def _empty_unpacked(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    values = data.new_empty(shape, dtype=dtype)
    return values, factor.new_empty(factor_shape(values.shape, Cast.from_spec(spec), dim))


@opaque(_empty_unpacked)
def _unpack_operand(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    call = CastCall(Cast.from_spec(spec), dim, dtype=dtype)
    values, scales = run(UNPACK, data, factor, call, torch.Size(shape), source)
    return values, factor.new_ones(()) if scales is None else scales.clone()


def lay_out_operand(
    x: Tensor,
    cast: Cast,
    block: int,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes one operand of a native GEMM that takes a scale for each ``block`` (16, 32 or 128) elements.

    The other arguments are as in ``quantize_operand``. Returns codes and scales in the GEMM's layout
    (:mod:`lightning_lowbit.kernels.layout`), and the scale of the matrix, float32, 0-d.

    Examples:
        >>> codes, scales, _ = lay_out_operand(torch.randn(16, 64), Cast("e2m1", Scale("e4m3", 16)), 16, dim=1)
        >>> codes.shape, scales.shape
        (torch.Size([16, 32]), torch.Size([512]))
    """
    call = CastCall(cast, dim, key, amax, shard=shard, block=block)
    if torch.compiler.is_compiling():
        codes, scales, factor = run_in_graph(LAY_OUT, x, call)
        return codes, scales, factor
    return run(LAY_OUT, x, call)


def lay_out_both(
    x: Tensor, casts: tuple[Cast, Cast], block: int, keys: tuple[Tensor | None, Tensor | None], amax: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Does :func:`lay_out_operand` along rows (dim 1) and along columns (dim 0) of a matrix, with a cast and a key for
    each; a kernel makes both from one read of a tensor of :func:`~lightning_lowbit.kernels.operands.reads_once`."""
    calls = [
        CastCall(cast, dim, key, amax if cast.scale.needs_amax else None, block=block)
        for cast, dim, key in zip(casts, (1, 0), keys, strict=True)
    ]
    return run(LAY_OUT_BOTH, x, *calls)


def lay_out_packed(data: Tensor, cast: Cast, block: int, dim: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Does :func:`lay_out_operand` from the bytes of :func:`pack_operand` for a matrix of ``shape``."""
    check_bytes(data, cast, dim, shape)
    return _lay_out_packed(data, cast.spec, block, dim, shape[0], shape[1])


def _empty_laid_out(data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    call = CastCall(Cast.from_spec(spec), dim, block=block)
    return layout.empty_laid_out(data.new_empty((rows, columns)), call)[:2]


@opaque(_empty_laid_out)
def _lay_out_packed(data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return layout.lay_out_bytes(data, Cast.from_spec(spec), block, dim, torch.Size((rows, columns)))
