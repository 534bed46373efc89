"""Operands as codes and scales, a quarter of their size, for tensors that wait for the backward pass."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import backend, opaque, takes_cpp, takes_triton
from lightning_lowbit.kernels.cpu import codes as cpu
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.memory import described, resolved
from lightning_lowbit.kernels.operands import found_equal, rotate, sample_of
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand, are_regular, factor_shape, has_factor, operand_dtype, stands_alone
from lightning_lowbit.quant.packed import packed_bytes, plain_pack, unpack_, unpacked_factor
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.transforms import rotated_shape


class Packed(NamedTuple):
    """An operand as bytes: ``data``, uint8 ``[bytes]``, of :mod:`lightning_lowbit.quant.packed`; ``factor``, float32,
    0-d, is the scale of the matrix, or has those of its rows."""

    data: Tensor
    factor: Tensor


def pack_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
    rotation: Tensor | None = None,
) -> Packed:
    """Quantizes one operand of a GEMM, as :func:`quantize_operand` with the same arguments, and packs it.

    Examples:
        >>> pack_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).data.numel()
        144
    """
    spec = None if shard is None else shard.spec
    return Packed(*_pack_operand(x, cast.spec, dim, key, amax, spec, rotation))


def unpack_operand(
    packed: Packed, cast: Cast, dim: int, shape: torch.Size, source: torch.dtype, dtype: torch.dtype | None = None
) -> Operand:
    """What :func:`quantize_operand` returns, to the bit (-0 may be 0), from what :func:`pack_operand` returned.

    Args:
        packed, cast, dim: of the packed operand.
        shape, source: shape and dtype of the tensor that was packed.
        dtype: of the values, as in :func:`quantize_operand`.

    Raises:
        ValueError: ``packed`` has another number of bytes, or of factors, than a matrix of ``shape`` needs.
    """
    dtype = dtype or operand_dtype(source, cast)
    check_bytes(packed.data, cast, dim, shape)
    factors = shape[1 - dim % 2] if cast.scale.two_level == "row" else 1
    if packed.factor.numel() != factors:
        raise ValueError(
            f"A packed matrix of {tuple(shape)} as {cast} has {factors} float32 scales of its rows or of itself, and "
            f"got {described(packed.factor)}: pack the matrix again."
        )
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


def _fake_pack(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    shard: str | None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    x = x if rotation is None else x.new_empty(rotated_shape(x.shape, rotation, dim))
    data = x.new_empty(packed_bytes(x.shape[0], x.shape[1], cast, dim), dtype=torch.uint8)
    shape = factor_shape(x, cast, dim) if cast.scale.two_level == "row" else ()
    return data, x.new_empty(shape, dtype=torch.float32)


@opaque(_fake_pack)
def _pack_operand(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    shard: str | None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    part, made = None if shard is None else Shard.from_spec(shard), None
    x = resolved(x)
    by_kernel = type(x) in (Tensor, Parameter)
    if by_kernel and takes_cpp(x.device):
        made = cpu.pack(x, spec, dim, key, amax, part, rotation)
    if made is None and rotation is not None:
        return _pack_operand(rotate(x, rotation, dim), spec, dim, key, amax, shard)
    if by_kernel and takes_triton(x.device):
        made = _pack_by_triton(x, Cast.from_spec(spec), dim, key, amax, part)
    return plain_pack(x, spec, dim, key, amax, shard) if made is None else made


def _pack_by_triton(
    x: Tensor, cast: Cast, dim: int, key: Tensor | None, amax: Tensor | None, shard: Shard | None
) -> tuple[Tensor, Tensor] | None:
    if not stands_alone(cast, dim, amax, shard):
        return None
    is_regular = are_regular(cast.draws, cast.scale.needs_amax, key, amax, x.device)
    if not is_regular or not gpu.packs(cast, x, dim) or not _agrees(cast.spec, dim, x.dtype, x.device):
        return None
    offset = None if shard is None or key is None else shard.offset(x.shape, tile_of(cast, dim, 2), x.device)
    return gpu.pack(x, cast, dim, key, amax, offset)


@cache
def _agrees(spec: str, dim: int, source: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernels pack and unpack a sample as the plain code does: asked once per device; warns if
    not."""
    if gpu.obstacle(device) is not None:
        return False
    cast = Cast.from_spec(spec)
    sample, key = sample_of(source, device), torch.tensor(0x5DEECE66D, device=device)
    with torch.no_grad(), backend("eager"):
        expected = plain_pack(sample, spec, dim, key, None, None)
    data, factor = gpu.pack(sample, cast, dim, key, None, None)
    values = sample.new_empty(sample.shape, dtype=operand_dtype(source, cast))
    again = torch.empty_like(values)
    unpack_(values, data[None], factor, cast, source, dim)
    gpu.unpack_(again, data, cast, dim, source)
    return found_equal(cast, device, (*expected, values), (data, factor, again))


def _fake_unpack(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    values = data.new_empty(shape, dtype=dtype)
    return values, factor.new_empty(factor_shape(values, Cast.from_spec(spec), dim))


@opaque(_fake_unpack)
def _unpack_operand(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast, values = Cast.from_spec(spec), data.new_empty(shape, dtype=dtype)
    by_kernel = takes_cpp(data.device) and type(data) is Tensor
    if takes_triton(data.device) and gpu.packs(cast, values, dim) and _agrees(spec, dim, source, data.device):
        gpu.unpack_(values, data, cast, dim, source)
        made: Tensor | None = factor if has_factor(cast) else None
    elif by_kernel and cpu.unpack_(values, data, cast, source, dim):
        made = unpacked_factor(data[None], factor, cast, values.numel(), dim)
    else:
        made = unpack_(values, data[None], factor, cast, source, dim)
    return values, factor.new_empty(()) if made is None else made.clone()
