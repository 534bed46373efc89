"""Operands as codes and scales, a quarter of their size, for tensors that wait for the backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import current_backend, opaque
from lightning_lowbit.kernels.cpu import codes as cpu
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand, has_factor, operand_dtype
from lightning_lowbit.quant.packed import packed_bytes, plain_pack, unpack_, unpacked_factor
from lightning_lowbit.quant.shard import Shard


class Packed(NamedTuple):
    """An operand as bytes: ``data``, uint8 ``[bytes]``, of :mod:`lightning_lowbit.quant.packed`; ``factor``, float32,
    0-d, is the scale of the matrix."""

    data: Tensor
    factor: Tensor


def pack_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
) -> Packed:
    """Quantizes one operand of a GEMM, as :func:`quantize_operand` with the same arguments, and packs it.

    Examples:
        >>> pack_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).data.numel()
        144
    """
    return Packed(*_pack_operand(x, cast.spec, dim, key, amax, None if shard is None else shard.spec))


def unpack_operand(
    packed: Packed, cast: Cast, dim: int, shape: torch.Size, source: torch.dtype, dtype: torch.dtype | None = None
) -> Operand:
    """What :func:`quantize_operand` returns, to the bit (-0 may be 0), from what :func:`pack_operand` returned.

    Args:
        packed, cast, dim: of the packed operand.
        shape, source: shape and dtype of the tensor that was packed.
        dtype: of the values, as in :func:`quantize_operand`.
    """
    dtype = dtype or operand_dtype(source, cast)
    values, factor = _unpack_operand(packed.data, packed.factor, cast.spec, dim, list(shape), source, dtype)
    return Operand(values, factor if has_factor(cast) else None)


def _fake_pack(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor]:
    size = packed_bytes(x.shape[0], x.shape[1], Cast.from_spec(spec), dim)
    return x.new_empty(size, dtype=torch.uint8), x.new_empty((), dtype=torch.float32)


@opaque(_fake_pack)
def _pack_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor]:
    if x.is_cpu and type(x) in (Tensor, Parameter) and current_backend() in ("auto", "cpp"):
        made = cpu.pack(x, spec, dim, key, amax, None if shard is None else Shard.from_spec(shard))
        if made is not None:
            return made
    return plain_pack(x, spec, dim, key, amax, shard)


def _fake_unpack(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    of_rows = Cast.from_spec(spec).scale.block == "row"
    of_factor = [1, shape[1]] if of_rows and dim == 0 else [shape[0], 1] if of_rows else []
    return data.new_empty(shape, dtype=dtype), factor.new_empty(of_factor)


@opaque(_fake_unpack)
def _unpack_operand(
    data: Tensor, factor: Tensor, spec: str, dim: int, shape: list[int], source: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast, values = Cast.from_spec(spec), data.new_empty(shape, dtype=dtype)
    by_kernel = data.is_cpu and type(data) is Tensor and current_backend() in ("auto", "cpp")
    if by_kernel and cpu.unpack_(values, data, cast, source, dim):
        made = unpacked_factor(data[None], factor, cast, values.numel(), dim)
    else:
        made = unpack_(values, data[None], factor, cast, source, dim)
    return values, factor.new_empty(()) if made is None else made.clone()
