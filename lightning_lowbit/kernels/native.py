"""Operands of native GEMMs: codes and scales in the layouts of :mod:`lightning_lowbit.kernels.layout`."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import backend, opaque, takes_triton
from lightning_lowbit.kernels import layout
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.layout import laid_out_shapes, plain_lay_out
from lightning_lowbit.kernels.memory import resolved
from lightning_lowbit.kernels.operands import found_equal, sample_of
from lightning_lowbit.kernels.packing import check_bytes
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import are_regular, stands_alone
from lightning_lowbit.quant.shard import Shard


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

    The other arguments are those of :func:`lightning_lowbit.kernels.quantize_operand`. Returns codes and scales in the
    GEMM's layout, and the scale of the matrix, float32, 0-d.

    Examples:
        >>> codes, scales, _ = lay_out_operand(torch.randn(16, 64), Cast("e2m1", Scale("e4m3", 16)), 16, dim=1)
        >>> codes.shape, scales.shape
        (torch.Size([16, 32]), torch.Size([512]))
    """
    return _lay_out_operand(x, cast.spec, block, dim, key, amax, None if shard is None else shard.spec)


def lay_out_packed(data: Tensor, cast: Cast, block: int, dim: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The same from the bytes that :func:`lightning_lowbit.kernels.pack_operand` made of a matrix of ``shape``."""
    check_bytes(data, cast, dim, shape)
    return _lay_out_packed(data, cast.spec, block, dim, shape[0], shape[1])


def _fake_operand(
    x: Tensor, spec: str, block: int, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    codes, scales = laid_out_shapes(cast, block, dim, x.shape[1 - dim], x.shape[dim])
    values = x.new_empty(codes, dtype=cast.format.dtype or torch.uint8)
    return values, x.new_empty(scales, dtype=cast.scale.storage.dtype), x.new_empty((), dtype=torch.float32)


@opaque(_fake_operand)
def _lay_out_operand(
    x: Tensor, spec: str, block: int, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    x = resolved(x)
    if takes_triton(x.device) and type(x) in (Tensor, Parameter):
        part = None if shard is None else Shard.from_spec(shard)
        if (made := _by_triton(x, Cast.from_spec(spec), block, dim, key, amax, part)) is not None:
            return made
    return plain_lay_out(x, spec, block, dim, key, amax, shard)


def _by_triton(
    x: Tensor, cast: Cast, block: int, dim: int, key: Tensor | None, amax: Tensor | None, shard: Shard | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    is_regular = x.dim() == 2 and are_regular(cast.draws, cast.scale.needs_amax, key, amax, x.device)
    if not is_regular or not stands_alone(cast, dim, amax, shard):
        return None
    if not gpu.lays_out(cast, x, block, dim) or not _agrees(cast.spec, block, dim, x.dtype, x.device):
        return None
    offset = None if shard is None or key is None else shard.offset(x.shape, tile_of(cast, dim, 2), x.device)
    return gpu.lay_out(x, cast, block, dim, key, amax, offset)


@cache
def _agrees(spec: str, block: int, dim: int, source: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernel lays a sample out as the plain code does: asked once per device; warns if not."""
    cast = Cast.from_spec(spec)
    sample, key = sample_of(source, device, rows=72), torch.tensor(0x5DEECE66D, device=device)
    with torch.no_grad(), backend("eager"):
        expected = plain_lay_out(sample, spec, block, dim, key, None, None)
    found = gpu.lay_out(sample, cast, block, dim, key, None, None)
    return found_equal(cast, device, _bytes(expected), _bytes(found))


def _bytes(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return made[0].view(torch.uint8), made[1].view(torch.uint8), made[2]


def _fake_packed(data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return _fake_operand(data.new_empty((rows, columns)), spec, block, dim, None, None, None)[:2]


@opaque(_fake_packed)
def _lay_out_packed(data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return layout.lay_out_packed(data, spec, block, dim, rows, columns)
