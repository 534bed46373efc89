"""An operand of a block-scaled native GEMM: codes and scales, not yet multiplied."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.compilation import compiled, opaque
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.nn.native.layout import round_up
from lightning_lowbit.nn.native.table import NATIVE, block_shape
from lightning_lowbit.quant import Cast, Operand
from lightning_lowbit.quant.blocks import from_blocks, tile_of
from lightning_lowbit.quant.operand import has_factor
from lightning_lowbit.quant.packed import unpacked_codes
from lightning_lowbit.quant.scaling import make_scales, round_blocks, rounding_key
from lightning_lowbit.quant.shard import Shard


class BlockOperand(NamedTuple):
    """One operand of a block-scaled native GEMM, with the contraction axis in its columns.

    Attributes:
        values: ``[rows, k]``: codes of E2M1, uint8, one per element; or elements in float8.
        scales: of blocks, in their storage dtype: ``[rows, k / block]``, rounded up. In FP8 with blocks of 128 also
            ``[rows / 128, k / 128]``, rounded up, for tiles.
        factor: float32, 0-d, multiplies the result; None for 1.
        kind: of the GEMM, a key of ``NATIVE``.
    """

    values: Tensor
    scales: Tensor
    factor: Tensor | None
    kind: str

    def t(self) -> "BlockOperand":
        """Itself: native GEMMs take both operands with the contraction axis in the columns."""
        return self

    def decoded(self, dtype: torch.dtype, dim: int = 1) -> Operand:
        """The operand of the emulation for a computation in ``dtype``, with contraction axis ``dim``, to the bit."""
        native = NATIVE[self.kind]
        assert native.block is not None
        elements = self.values.float()
        if self.values.dtype == torch.uint8:
            elements = ELEMENT_FORMATS[native.elements[0]].decode(self.values)
        scales = repeated(self.scales.float(), len(elements), elements.shape[1], _side(self), native.block)
        exact = dtype if native.scale != "fp32" and dtype != torch.float16 else torch.float32
        values = (elements * scales).to(exact)
        return Operand(values if dim == 1 else values.t().contiguous(), self.factor)


def repeated(scales: Tensor, rows: int, columns: int, down: int, across: int) -> Tensor:
    """Repeats each scale ``down`` x ``across`` times, to ``[rows, columns]``."""
    if down > 1:
        scales = scales.repeat_interleave(down, 0)
    if across > 1:
        scales = scales.repeat_interleave(across, 1)
    return scales[:rows, :columns]


def has_tiles(operand: BlockOperand) -> bool:
    """Whether the scales of an operand are those of tiles of 128 x 128."""
    return len(operand.scales) < len(operand.values)


def _side(operand: BlockOperand) -> int:
    return 128 if has_tiles(operand) else 1


def block_operand(
    x: Tensor,
    cast: Cast,
    kind: str,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
) -> BlockOperand:
    """Quantizes one operand of a block-scaled native GEMM, to the elements and scales of
    :func:`lightning_lowbit.quant.quantize_operand`, whose arguments and errors are the same.

    Examples:
        >>> x = torch.randn(4, 64)
        >>> operand = block_operand(x, Cast("e2m1", Scale("e4m3", 16, two_level=True)), "nvfp4", dim=1)
        >>> operand.values.shape, operand.scales.shape
        (torch.Size([4, 64]), torch.Size([4, 4]))
    """
    block = NATIVE[kind].block
    assert block is not None
    spec = None if shard is None else shard.spec
    values, scales, factor = _block_operand(x, cast.spec, block, dim, key, amax, spec)
    return BlockOperand(values, scales, factor if has_factor(cast) else None, kind)


def _fake_operand(
    x: Tensor, spec: str, block: int, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    cast, (inner, rows) = Cast.from_spec(spec), (x.shape[dim], x.shape[1 - dim])
    down = 128 if _keeps_tiles(cast, block, dim) else 1
    codes = x.new_empty((rows, inner), dtype=cast.format.dtype or torch.uint8)
    shape = (-(-rows // down), -(-inner // block))
    return codes, x.new_empty(shape, dtype=cast.scale.storage.dtype), x.new_empty((), dtype=torch.float32)


@compiled
def round_codes(
    blocks: Tensor,
    scales: Tensor,
    decode: Tensor,
    zeros: Tensor | None = None,
    corrected: Tensor | None = None,
    key: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    cast: Cast,
) -> Tensor:
    """Rounds a blocked view to codes of E2M1, or to elements in float8; arguments as of :func:`round_blocks`."""
    elements = round_blocks(
        blocks, scales, decode, zeros, corrected, key, offset, cast=cast, scaled=False, dtype=torch.float32
    )
    if cast.format.dtype is not None:
        return elements.to(cast.format.dtype)
    magnitude = elements.abs()
    code = (elements < 0).to(torch.uint8) * 8
    for level in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):  # comparisons alone, which are exact in generated code
        code = code + (magnitude >= level).to(torch.uint8)
    return code


def _keeps_tiles(cast: Cast, block: int, dim: int) -> bool:
    return block == 128 and block_shape(cast, dim) == (128, 128)


@opaque(_fake_operand)
def _block_operand(
    x: Tensor, spec: str, block: int, dim: int, key: Tensor | None, amax: Tensor | None, shard: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    cast, of_global = Cast.from_spec(spec), None if shard is None else Shard.from_spec(shard)
    tile = tile_of(cast, dim, 2)
    key = rounding_key(cast, key, x.device)
    scaled = make_scales(x, cast, tile, amax, of_global, key=key)
    offset = None if of_global is None or key is None else of_global.offset(x.shape, tile, x.device)
    codes = from_blocks(round_codes(*scaled, key, offset, cast=cast), x.shape, tile)
    sizes = [round_up(size, side) // side for size, side in zip(x.shape, tile, strict=True)]
    scales = scaled.stored(cast).reshape(sizes)
    # Results of an operator share no memory: decode may be a view.
    return *_laid_out(codes, scales, cast, block, dim), scaled.decode.reshape(()).clone()


def _laid_out(codes: Tensor, scales: Tensor, cast: Cast, block: int, dim: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in the order of the matrix, with the contraction axis in the columns, one scale per block."""
    if dim == 0:  # physically transposed
        codes, scales = codes.t(), scales.t()
    rows, inner = codes.shape
    down, along = (1, 1) if _keeps_tiles(cast, block, dim) else block_shape(cast, dim)
    if (down, along) != (1, 1):
        scales = repeated(scales, rows, -(-inner // block), down, along // block)
    assert cast.scale.storage.dtype is not None
    return codes.contiguous(), scales.to(cast.scale.storage.dtype).contiguous()


def unpacked_block_operand(
    data: Tensor, factor: Tensor, cast: Cast, kind: str, dim: int, shape: torch.Size
) -> BlockOperand:
    """:func:`block_operand` from what :func:`lightning_lowbit.kernels.pack_operand` made of a matrix of ``shape``."""
    block = NATIVE[kind].block
    assert block is not None
    values, scales = _unpacked_block_operand(data, cast.spec, block, dim, shape[0], shape[1])
    return BlockOperand(values, scales, factor if has_factor(cast) else None, kind)


def _fake_unpacked(data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    x = data.new_empty((rows, columns))
    return _fake_operand(x, spec, block, dim, None, None, None)[:2]


@opaque(_fake_unpacked)
def _unpacked_block_operand(
    data: Tensor, spec: str, block: int, dim: int, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    codes, scales = unpacked_codes(data, cast, rows * columns)
    tile = tile_of(cast, dim, 2)
    sizes = [round_up(size, side) // side for size, side in zip((rows, columns), tile, strict=True)]
    return _laid_out(codes.view(rows, columns), scales.view(sizes), cast, block, dim)
