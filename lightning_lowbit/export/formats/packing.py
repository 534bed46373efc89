"""Codes as they lie in files: nibbles, streams of bits, and the scales of blocks by row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.quant import Quantized


def nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two in a byte, the first one in the low bits: ``[rows, columns / 2]``."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def scales_by_row(quantized: Quantized) -> Tensor:
    """Returns the scales of blocks as ``[rows, blocks]``, repeated in tiles."""
    scales, rows = quantized.scales, len(quantized.codes)
    if len(scales) == rows:
        return scales
    block = quantized.cast.scale.block
    height = block[0] if isinstance(block, tuple) else rows
    return scales.view(torch.uint8).repeat_interleave(height, 0)[:rows].view(scales.dtype)


def stream(codes: Tensor, bits: int) -> Tensor:
    """Codes of each row as a little-endian stream of bits, in whole bytes: uint8 ``[rows, columns * bits / 8]``."""
    bits_of_rows = (codes.to(torch.int16)[..., None] >> torch.arange(bits) & 1).flatten(1)
    padded = F.pad(bits_of_rows, (0, -bits_of_rows.shape[1] % 8)).view(len(codes), -1, 8)
    return (padded << torch.arange(8)).sum(-1).to(torch.uint8)


def words(codes: Tensor, bits: int) -> Tensor:
    """:func:`stream` in whole int32: ``[rows, words]``."""
    bytes_of_rows = stream(codes, bits)
    return F.pad(bytes_of_rows, (0, -bytes_of_rows.shape[1] % 4)).contiguous().view(torch.int32)
