"""Codes as they lie in files: nibbles, streams of bits, and the scales of blocks by row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.quant import Quantized


def nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two in a byte, the first one in the low bits: ``[rows, columns / 2]``."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def by_row(quantized: Quantized, values: Tensor) -> Tensor:
    """Values of blocks, such as their scales, as ``[rows, blocks]``, repeated in tiles; ``[1, 1]`` of the tensor."""
    block, rows = quantized.cast.scale.block, len(quantized.codes)
    if not isinstance(block, tuple):
        return values
    numbers = values.view(torch.uint8) if values.element_size() == 1 else values  # torch repeats no FP8
    return numbers.repeat_interleave(block[0], 0)[:rows].view(values.dtype)


def stream(codes: Tensor, bits: int) -> Tensor:
    """Codes of each row as a little-endian stream of bits, in whole bytes: uint8 ``[rows, columns * bits / 8]``."""
    bits_of_rows = (codes.to(torch.int16)[..., None] >> torch.arange(bits) & 1).flatten(1)
    padded = F.pad(bits_of_rows, (0, -bits_of_rows.shape[1] % 8)).view(len(codes), -1, 8)
    return (padded << torch.arange(8)).sum(-1).to(torch.uint8)


def words(codes: Tensor, bits: int) -> Tensor:
    """:func:`stream` in whole int32: ``[rows, words]``."""
    bytes_of_rows = stream(codes, bits)
    return F.pad(bytes_of_rows, (0, -bytes_of_rows.shape[1] % 4)).contiguous().view(torch.int32)
