"""The layouts in which native GEMMs take codes and scales.

Two 4-bit codes share a byte, the first of them in the low bits. Scales of blocks of 16 or 32 lie as tensor cores read
them (cuBLAS: "1D block scaling factors layout"): tiles of 128 rows and 4 blocks, 512 bytes each; in a tile, the four
scales of a row together, and rows r, r + 32, r + 64, r + 96 side by side. The scale of row r and block c, of C' blocks:

    ((r // 128) * (C' / 4) + c // 4) * 512  +  (r % 32) * 16  +  (r % 128) // 32 * 4  +  c % 4
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import compiled


def round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A contiguous matrix of one-byte elements, with zeros below and to the right."""
    if rows or columns:
        return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)
    return matrix.contiguous().flatten().view(matrix.shape)  # gives a single row, too, the strides that the GEMM needs


def pack_codes(codes: Tensor) -> Tensor:
    """Packs 4-bit codes, uint8 ``[rows, k]`` with an even k, to ``float4_e2m1fn_x2`` ``[rows, k / 2]``."""
    return join_pairs(codes.view(-1, 2)).view(len(codes), -1).view(torch.float4_e2m1fn_x2)


@compiled
def join_pairs(codes: Tensor) -> Tensor:
    """Bytes of pairs of codes, uint8 ``[n, 2]``."""
    return codes[:, 0] | codes[:, 1] << 4


def swizzle(scales: Tensor) -> Tensor:
    """Scales ``[rows, blocks]`` of one byte in the layout above, with zeros for what is missing: ``[R' * C']``."""
    padded = pad(scales, -len(scales) % 128, -scales.shape[1] % 4).view(torch.uint8)
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def outer_major(scales: Tensor) -> Tensor:
    """A copy of ``[rows, blocks]`` with strides ``(1, rows)``."""
    return scales.t().contiguous().flatten().view(scales.shape[1], len(scales)).t()
