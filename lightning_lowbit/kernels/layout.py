"""The layouts in which native GEMMs take codes and scales, and operands in them.

The contraction axis lies in the columns. Two 4-bit codes share a byte, the first of them in the low bits. Scales of
blocks of 16 or 32 lie as tensor cores read them (cuBLAS: "1D block scaling factors layout"): tiles of 128 rows and 4
blocks, 512 bytes each; in a tile, the four scales of a row together, and rows r, r + 32, r + 64, r + 96 side by side.
The scale of row r and block c, of C' blocks:

    ((r // 128) * (C' / 4) + c // 4) * 512  +  (r % 32) * 16  +  (r % 128) // 32 * 4  +  c % 4

Tiles are filled up with zeros, as are codes up to the multiples that GEMMs ask for. AMD's GPUs take scales
row by row. GEMMs of blocks of 128 take codes as they are, and scales of rows one block after the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import compiled
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.packed import unpacked_codes
from lightning_lowbit.quant.scaling import round_blocks, round_matrix

_LARGE = 128  # elements of the blocks whose GEMMs take codes and scales as they are


def multiples() -> tuple[int, int]:
    """Returns the multiples to which a matrix of codes is padded: of its rows, and of the contraction axis."""
    return (32, 128) if torch.version.hip is not None else (16, 32)


def round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a contiguous matrix of one-byte elements, with zeros below and to the right."""
    if rows or columns:
        return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)
    return matrix.contiguous().flatten().view(matrix.shape)  # gives a single row, too, the strides that the GEMM needs


def pack_codes(codes: Tensor) -> Tensor:
    """Packs 4-bit codes, uint8 ``[rows, k]`` with an even k, to uint8 ``[rows, k / 2]``."""
    return _join_pairs(codes.view(-1, 2)).view(len(codes), codes.shape[1] // 2)


@compiled
def _join_pairs(codes: Tensor) -> Tensor:
    return codes[:, 0] | codes[:, 1] << 4


def swizzle(scales: Tensor) -> Tensor:
    """Brings scales ``[rows, blocks]`` of one byte into the layout above, padded with zeros: ``[R' * C']``."""
    padded = pad(scales, -len(scales) % 128, -scales.shape[1] % 4).view(torch.uint8)
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """Inverts :func:`swizzle`."""
    down, across = -(-rows // 128), -(-blocks // 4)
    tiles = flat.view(torch.uint8).view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :blocks].contiguous().view(flat.dtype)


def outer_major(scales: Tensor) -> Tensor:
    """Returns ``[rows, blocks]`` with strides ``(1, rows)``, itself if it has them."""
    return scales.t().contiguous().flatten().view(scales.shape[1], len(scales)).t()


def repeated(scales: Tensor, rows: int, columns: int, down: int, across: int) -> Tensor:
    """Repeats each scale ``down`` x ``across`` times, to ``[rows, columns]``."""
    if down > 1:
        scales = scales.repeat_interleave(down, 0)
    if across > 1:
        scales = scales.repeat_interleave(across, 1)
    return scales[:rows, :columns]


def block_shape(cast: Cast, dim: int) -> tuple[int, int]:
    """Returns the sides of a block across and along dimension ``dim`` of a matrix."""
    block = cast.scale.block
    if isinstance(block, tuple):
        return block[1 - dim], block[dim]
    assert isinstance(block, int)
    return 1, block


def keeps_tiles(cast: Cast, block: int, dim: int) -> bool:
    """Returns whether a GEMM of blocks of this size takes the scales of a cast's tiles of 128 x 128."""
    return block == _LARGE and block_shape(cast, dim) == (_LARGE, _LARGE)


def laid_out_shapes(cast: Cast, block: int, dim: int, rows: int, inner: int) -> tuple[list[int], list[int]]:
    """Returns the shapes of codes and scales of :func:`lay_out`; the GEMM takes the matrix as ``[rows, inner]``."""
    if block == _LARGE:
        return [rows, inner], [-(-rows // _LARGE) if keeps_tiles(cast, block, dim) else rows, -(-inner // block)]
    down, along = multiples()
    rows, inner = round_up(rows, down), round_up(inner, along)
    per_byte = 2 if cast.format.dtype is None else 1
    blocks = inner // block
    count = rows * blocks if torch.version.hip is not None else round_up(rows, 128) * round_up(blocks, 4)
    return [rows, inner // per_byte], [count]


def lay_out(codes: Tensor, scales: Tensor, cast: Cast, block: int, dim: int) -> tuple[Tensor, Tensor]:
    """Brings codes and scales into the layout of a GEMM.

    Args:
        codes: uint8 or float8 ``[rows, columns]``.
        scales: float32 ``[rows, columns]`` of blocks or tiles.
        cast: by which the matrix was quantized.
        block: elements with a common scale in the GEMM.
        dim: which the GEMM contracts.
    """
    if dim == 0:  # physically transposed
        codes, scales = codes.t(), scales.t()
    rows, inner = codes.shape
    down, along = (1, 1) if keeps_tiles(cast, block, dim) else block_shape(cast, dim)
    if (down, along) != (1, 1):
        scales = repeated(scales, rows, -(-inner // block), down, along // block)
    assert cast.scale.storage.dtype is not None
    scales = scales.to(cast.scale.storage.dtype).contiguous()
    if block == _LARGE:
        return codes.contiguous(), scales if keeps_tiles(cast, block, dim) else outer_major(scales)
    values = pad(codes, -rows % multiples()[0], -inner % multiples()[1])
    scales = pad(scales, len(values) - rows, values.shape[1] // block - scales.shape[1])
    flat = scales.flatten() if torch.version.hip is not None else swizzle(scales)
    return pack_codes(values) if values.dtype == torch.uint8 else values, flat


def taken_apart(values: Tensor, scales: Tensor, block: int, rows: int, inner: int) -> tuple[Tensor, Tensor]:
    """Inverts :func:`lay_out`: codes ``[rows, inner]``, and scales with the contraction axis in their columns."""
    if block == _LARGE:
        return values, scales
    codes = torch.stack([values & 15, values >> 4], -1).flatten(1) if values.dtype == torch.uint8 else values
    blocks = codes.shape[1] // block
    if torch.version.hip is not None:
        scales = scales.view(len(values), blocks)
    else:
        scales = unswizzle(scales, len(values), blocks)
    return codes[:rows, :inner], scales[:rows, : -(-inner // block)]


@compiled
def _round_codes(blocks: Tensor, scales: Tensor, *others: Tensor | None, cast: Cast) -> Tensor:
    """Rounds a blocked view to codes of E2M1, or to elements in float8; arguments as of :func:`round_blocks`."""
    elements = round_blocks(blocks, scales, *others, cast=cast, scaled=False, dtype=torch.float32)
    if cast.format.dtype is not None:
        return elements.to(cast.format.dtype)
    magnitude = elements.abs()
    code = (elements < 0).to(torch.uint8) * 8
    for level in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):  # comparisons alone, which are exact in generated code
        code = code + (magnitude >= level).to(torch.uint8)
    return code


def empty_laid_out(x: Tensor, call: CastCall) -> tuple[Tensor, Tensor, Tensor]:
    """Returns memory for codes, scales and the scale of a matrix in the layout of its GEMM."""
    codes, shape = laid_out_shapes(call.cast, call.block, call.dim, x.shape[1 - call.dim], x.shape[call.dim])
    if call.block == _LARGE and not keeps_tiles(call.cast, call.block, call.dim):
        scales = x.new_empty(shape[::-1], dtype=torch.float32).t()
    else:
        scales = x.new_empty(shape, dtype=call.cast.scale.storage.dtype)
    return x.new_empty(codes, dtype=call.cast.format.dtype or torch.uint8), scales, x.new_empty((), dtype=torch.float32)


def make_laid_out(x: Tensor, call: CastCall) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes a matrix ``[rows, columns]`` into the layout of a GEMM with a scale for each ``call.block`` elements.
    Returns codes, scales, and the scale of the matrix, float32, 0-d (1 for none)."""
    scaled, codes = round_matrix(x, call, rounding=_round_codes)
    scales = scaled.stored(call.cast).reshape(blocks_of(call.cast, call.dim, x.shape))
    # Results of an operator share no memory: decode may be a view.
    return *lay_out(codes, scales, call.cast, call.block, call.dim), scaled.decode.reshape(()).clone()


def lay_out_bytes(data: Tensor, cast: Cast, block: int, dim: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Brings bytes of :func:`lightning_lowbit.quant.packed.pack` for a matrix of ``shape`` into the layout."""
    codes, scales = unpacked_codes(data, cast, shape.numel())
    return lay_out(codes.view(shape), scales.view(blocks_of(cast, dim, shape)), cast, block, dim)


def blocks_of(cast: Cast, dim: int, shape: torch.Size) -> list[int]:
    """Returns the numbers of blocks along the rows and columns of a matrix."""
    return [-(-size // side) for size, side in zip(shape, tile_of(cast, dim, 2), strict=True)]
