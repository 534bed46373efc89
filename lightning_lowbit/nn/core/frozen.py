"""The weight of a layer that is not trained, kept as codes and scales instead of a matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels import Packed, pack_operand, unpack_operand
from lightning_lowbit.kernels.packing import check_bytes
from lightning_lowbit.quant import Cast, Operand


class Frozen(NamedTuple):
    """Describes the bytes of a frozen weight: uint8, 1-D, those of :class:`Packed` and the matrix's float32 scale."""

    cast: Cast  # by which the matrix was quantized along its columns
    shape: torch.Size  # [out_features, in_features]
    dtype: torch.dtype  # from which it was quantized

    def pack(self, weight: Tensor) -> Tensor:
        """Packs a weight, which is rounded to ``dtype`` first."""
        return joined(pack_operand(weight.to(self.dtype), self.cast, 1))

    def packed(self, data: Tensor) -> Packed:
        """Returns the bytes as an operand; a ``ValueError`` if they are not as many as the matrix needs."""
        check_bytes(data, self.cast, 1, self.shape, more=4)
        return Packed(data[:-4], data[-4:].clone().view(torch.float32)[0])

    def operand(self, data: Tensor, source: torch.dtype, dtype: torch.dtype | None = None) -> Operand:
        """Decodes the weight for a GEMM that computes in ``source``; ``dtype`` is that of the values."""
        return unpack_operand(self.packed(data), self.cast, 1, self.shape, source, dtype)

    def dense(self, data: Tensor) -> Tensor:
        """Decodes the weight to a matrix, in ``dtype``."""
        values, factor = self.operand(data, torch.float32, torch.float32)
        return (values if factor is None else values * factor).to(self.dtype)


def joined(packed: Packed) -> Tensor:
    """Joins codes, scales of blocks, and the scale of the matrix, as bytes."""
    return torch.cat([packed.data, packed.factor.detach().reshape(1).view(torch.uint8)])
