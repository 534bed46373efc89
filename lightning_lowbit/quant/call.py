"""The recipe for one operand of a GEMM, as one value that plain code and kernels take."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.quant.blocks import ALL, tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.transforms import rotated_shape


class CastCall(NamedTuple):
    """The recipe for making an operand of a GEMM from a matrix.

    ``cast``, ``dim`` (0 or 1), ``key`` and ``amax`` are as in :func:`lightning_lowbit.quantize`. After a rotation
    ``amax`` and ``shard`` describe the rotated matrix.
    """

    cast: Cast
    dim: int
    key: Tensor | None = None
    amax: Tensor | None = None
    dtype: torch.dtype | None = None  # of the values; None takes :func:`operand_dtype`
    shard: Shard | None = None  # the shard that the matrix is, None for a whole matrix
    rotation: Tensor | None = None  # the signs of a Hadamard transform, float32 ``[n]``
    block: int = 0  # the elements for which a native GEMM takes one scale; 0 for other GEMMs

    def values_dtype(self, source: torch.dtype) -> torch.dtype:
        """Returns the dtype of the values that are made from a tensor of the dtype ``source``."""
        return self.dtype or operand_dtype(source, self.cast)

    def is_across(self, x: Tensor) -> bool:
        """Returns whether values lie along the columns in memory: those of one byte on GPUs, whose GEMMs read them
        along the contraction axis."""
        return x.device.type != "cpu" and self.dim % 2 == 0 and self.values_dtype(x.dtype).itemsize == 1

    def shape(self, x: Tensor) -> torch.Size:
        """Returns the shape of the operand of ``x``: a rotation pads it to whole groups."""
        return x.shape if self.rotation is None else rotated_shape(x.shape, self.rotation, self.dim)

    def of_product(self, index: int) -> "CastCall":
        """Returns the recipe of one of the products of a stack, whose key has one number for each, and whose rotation
        may have a row for each."""
        key, rotation = self.key, self.rotation
        if rotation is not None and rotation.dim() == 2:
            rotation = rotation[index]
        return self._replace(key=None if key is None else key[index], rotation=rotation)

    def stack_shape(self, x: Tensor) -> torch.Size:
        """Returns the shape of the operands of a stack: matrices ``[products, rows, columns]``, or the rows of all of
        them in one matrix. A rotation along these pads them product by product, which the shape does not count."""
        call = self.of_product(0)
        if x.dim() == 3:
            return torch.Size([len(x), *call.shape(x[0])])
        return call.shape(x) if self.dim == 1 else x.shape

    def product_rows(self, x: Tensor, ends: tuple[int, ...] | None) -> list[int]:
        """Returns the rows of the operand of each product of a stack: matrices, or rows of ``x`` that end at ``ends``.
        A rotation along rows pads them to whole groups."""
        rows = [x.shape[1]] * len(x) if ends is None else [end - start for start, end in pairwise((0, *ends))]
        group = 1 if self.rotation is None or self.dim == 1 else self.rotation.shape[-1]
        return [-(-count // group) * group for count in rows]

    def offset(self, x: Tensor) -> Tensor | None:
        """:meth:`Shard.offset` of the operand of ``x``; None for a whole matrix, or without random bits."""
        if self.shard is None or self.key is None or not self.cast.draws:
            return None
        return self.shard.offset(self.shape(x), tile_of(self.cast, self.dim, 2), x.device)

    def in_fours(self, x: Tensor) -> bool:
        """Returns whether each row of the operand of ``x`` begins with four elements that share a hash; True for a cast
        whose elements have no random bits. A row is as long as :func:`~.blocks.element_index` counts it."""
        if self.cast.rounding != "stochastic":
            return True
        shape, tile = self.shape(x), tile_of(self.cast, self.dim, 2)
        if self.shard is None:
            return (shape[1] if ALL in tile else shape[1] + -shape[1] % tile[1]) % 4 == 0
        _, columns, first = self.shard.place(shape, tile)
        return columns % 4 == first % 4 == 0

    def is_regular(self, device: torch.device) -> bool:
        """Returns whether kernels take the key and the amax; plain code converts or refuses all others."""
        return are_regular(self.cast.draws, self.cast.scale.needs_amax, self.key, self.amax, device)

    def stands_alone(self) -> bool:
        """Returns whether this process holds whole blocks, and all that decides their scales."""
        if self.shard is None:
            return True
        tile = tile_of(self.cast, self.dim, 2)
        side, scale = tile[self.shard.dim], self.cast.scale
        if self.shard.cuts(tile) or (scale.needs_amax and self.amax is None):
            return False
        if side > 1 and scale.two_level == "row":
            return False
        return not self.shard.splits(scale.correction or side if side > 1 else side)


def are_regular(draws: bool, needs_amax: bool, key: Tensor | None, amax: Tensor | None, device: torch.device) -> bool:
    """:meth:`CastCall.is_regular` of a cast that draws random bits, or needs an amax."""
    if draws and (key is None or key.dtype != torch.int64 or not _is_one(key, device)):
        return False
    return amax is None or (needs_amax and amax.dtype == torch.float32 and _is_one(amax, device))


def _is_one(tensor: Tensor, device: torch.device) -> bool:
    """Returns whether a tensor is one number on a device, whose memory has its sign."""
    return tensor.numel() == 1 and tensor.device == device and not tensor.is_neg()


def operand_dtype(dtype: torch.dtype, cast: Cast) -> torch.dtype:
    """Returns the dtype of an operand's values, given that of the tensor: the same if it holds them exactly, or if the
    cast has ``round_to_bfloat16``; else float32."""
    return _dtype_of_values(dtype, cast) if torch.compiler.is_compiling() else _known_dtype(dtype, cast.spec)


def _dtype_of_values(dtype: torch.dtype, cast: Cast) -> torch.dtype:
    # float16 has the precision but not the range: codes * scales exceed 65504 for some scale formats.
    fits = cast.fits_bfloat16 and dtype != torch.float16
    return dtype if fits or is_rounded(dtype, cast) else torch.float32


@cache
def _known_dtype(dtype: torch.dtype, spec: str) -> torch.dtype:
    return _dtype_of_values(dtype, Cast.from_spec(spec))


def is_rounded(dtype: torch.dtype, cast: Cast) -> bool:
    """Returns whether operands are rounded to the dtype of the tensor that they are made from."""
    return cast.round_to_bfloat16 and cast.scale.per_block and dtype != torch.float16


def has_factor(cast: Cast) -> bool:
    return bool(cast.scale.two_level) or cast.scale.prescale != 1 or not cast.scale.per_block


def factor_shape(shape: torch.Size, cast: Cast, dim: int) -> tuple[int, ...]:
    """Returns the shape of the factor of an operand: that of all scales that are not in its values."""
    if cast.scale.block != "row" and cast.scale.two_level != "row":
        return ()
    return (1, shape[1]) if dim in (0, -2) else (shape[0], 1)
