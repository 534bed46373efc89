"""One tensor in, one quantised tensor out.

:func:`quantize` gives codes and scales, what hardware and exporters store. :func:`quantize_operand` gives the same
numbers as a GEMM wants them: ``codes * scales`` in the GEMM's dtype, and the scale of the tensor as one factor apart.

Both see the tensor as a matrix cut into tiles: 1 x k for blocks along its rows, k x 1 along its columns. The *blocked
view* has the two sides of a tile as dimensions 1 and 3, so that a scale is a reduction over the odd dimensions:

    [R, C]  ->  [R / k1, k1, C / k2, k2]         or, where a side is 1,   [R C / k, k]   and   [R / k, k, C]

A scale that belongs to a whole row, column or tensor is a reduction over an even dimension of [R, 1, C] or [R C, 1]:
the odd ones are constants of compiled code, and sizes of tensors must not be.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.kernels import compiled, opaque
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import round_nearest, round_stochastic, uniform
from lightning_lowbit.quant.scaling import (
    absmax,
    block_scales,
    encode_factor,
    four_over_six_scales,
    scales_of,
    stored_scales,
    tensor_encode_scale,
)

ALL = 0  # as the side of a tile: all there is
Tile = tuple[int, int]


@dataclass(frozen=True)
class Quantized:
    """A quantised tensor.

    Attributes:
        codes: uint8, the shape of the tensor, one code per element (not packed).
        scales: block scales, in torch's dtype where there is one (float8, float32), else as uint8 codes. The shape of
            the tensor with the blocked dimension divided by the block, rounded up (1 for ``"row"``); for tiles both of
            the last two dimensions; for ``"tensor"`` all of them 1.
        tensor_scale: float32, 0-d, what every block scale is multiplied by; None with one level.
        cast: how it was quantised.
        dim: the blocked dimension, counted from the end (for tiles of no consequence).
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    cast: Cast
    dim: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``code * (scale * tensor_scale)``: computed in float32, rounded once to ``dtype``."""
        codes, scales = _as_matrix(self.codes, self.dim), _as_matrix(self.scales, self.dim)
        tile = _tile(self.cast, self.dim, self.codes.dim())
        storage = self.cast.scale.storage
        scales = scales.float() if storage.dtype is not None else storage.decode(scales)
        if self.tensor_scale is not None:
            scales = scales * self.tensor_scale
        blocks = to_blocks(self.cast.format.decode(codes), tile)
        values = from_blocks(blocks * _scales_view(scales, blocks, tile), codes.shape, tile)
        return _from_matrix(values, self.codes.shape, self.dim).to(dtype)


class Operand(NamedTuple):
    """One operand of a GEMM, the matrix ``values * factor``.

    Attributes:
        values: ``[rows, columns]``.
        factor: float32, what does not vary along the contraction axis and therefore multiplies the result: 0-d,
            ``[rows, 1]`` or ``[1, columns]``; None for 1.
    """

    values: Tensor
    factor: Tensor | None = None

    def t(self) -> "Operand":
        """The transposed matrix."""
        return Operand(self.values.t(), None if self.factor is None else self.factor.t())


@torch.no_grad()
def quantize(
    x: Tensor, cast: Cast, dim: int = -1, key: Tensor | int | None = None, amax: Tensor | None = None
) -> Quantized:
    """Quantises a tensor.

    Args:
        x: floating point, any shape. Blocks that its size does not fill are padded inside with zeros.
        cast: how.
        dim: dimension along which blocks lie: the contraction dimension of the GEMM. Of no consequence for tiles.
        key: the key of the random bits of stochastic rounding: an integer or an int64 tensor of one element; see
            :func:`lightning_lowbit.quant.rounding.mix_key`.
        amax: largest magnitude of the tensor, one element, instead of that of ``x``: for scales that are shared or
            delayed.

    Returns:
        Codes and scales. An element that is NaN or infinite decodes to NaN, with its block.

    Raises:
        ValueError: stochastic rounding without a key; ``amax`` for a cast that does not depend on it; tiles of a
            tensor that is not a matrix; a dtype that is not floating point.
    """
    if not x.is_floating_point():
        raise ValueError(f"quantize takes a floating point tensor; got {x.dtype}. Convert it first, e.g. x.float().")
    if x.dim() == 0 or (x.dim() != 2 and isinstance(cast.scale.block, tuple)):
        raise ValueError(
            f"Blocks need a dimension to lie in, and tiles a matrix; got a tensor of shape {tuple(x.shape)} for {cast}."
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"There is no dimension {dim} in a tensor of shape {tuple(x.shape)}.")
    dim = dim if dim < 0 else dim - x.dim()
    matrix, tile = _as_matrix(x.float(), dim), _tile(cast, dim, x.dim())
    blocks, scales, decode = _scale_blocks(matrix, cast, tile, amax)
    codes = _round(blocks, scales, decode, cast, key, scaled=False, dtype=torch.float32)
    stored = stored_scales(scales, cast)
    if cast.scale.block == "tensor":
        stored = torch.where(absmax(matrix).isfinite(), stored, torch.nan)  # some formats of elements have no NaN
        stored = stored.reshape([1] * x.dim())
    else:
        stored = stored.reshape([1 if k == ALL else -(-n // k) for n, k in zip(matrix.shape, tile, strict=True)])
        stored = _from_matrix(stored, x.shape, dim)
    storage = cast.scale.storage
    return Quantized(
        codes=_from_matrix(cast.format.encode(from_blocks(codes, matrix.shape, tile)), x.shape, dim),
        scales=stored.to(storage.dtype) if storage.dtype is not None else storage.encode(stored),
        tensor_scale=decode if cast.scale.two_level or cast.scale.prescale != 1 else None,
        cast=cast,
        dim=dim,
    )


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Operand:
    """Quantises one operand of a GEMM.

    Args:
        x: matrix ``[rows, columns]`` in the GEMM's dtype.
        cast, dim, key, amax: as in :func:`quantize`.
        dtype: of the values, one that holds them exactly: float32, or the elements' own where scales are per row or
            tensor; None for that of ``x``, which in bfloat16 is exact where ``cast.fits_bfloat16``, and float32 else.

    Returns:
        ``codes * scales`` and the tensor's scale; scales per row or tensor are part of the factor.
    """
    values, factor = _quantize_operand(x, cast.spec, dim, key, amax, dtype or _operand_dtype(x, cast))
    return Operand(values, factor if _has_factor(cast) else None)


def scaled_elements(x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None) -> Tensor:
    """The elements of a matrix in units of their scales, before rounding: float32, the shape of ``x``."""
    tile = _tile(cast, dim, x.dim())
    blocks, scales, decode = _scale_blocks(x, cast, tile, amax)
    return from_blocks(blocks.float() * encode_factor(scales, decode, cast), x.shape, tile)


def _has_factor(cast: Cast) -> bool:
    return cast.scale.two_level or cast.scale.prescale != 1 or not cast.scale.per_block


def _factor_shape(x: Tensor, cast: Cast, dim: int) -> tuple[int, ...]:
    if cast.scale.block != "row":
        return ()
    return (1, x.shape[1]) if dim in (0, -2) else (x.shape[0], 1)


def _operand_dtype(x: Tensor, cast: Cast) -> torch.dtype:
    # float16 has the digits but not the range: codes * scales exceed 65504 for some scale formats.
    return x.dtype if cast.fits_bfloat16 and x.dtype != torch.float16 else torch.float32


def _fake_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    factor = x.new_empty(_factor_shape(x, cast, dim), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), factor


@opaque(_fake_operand)
def _quantize_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    tile = _tile(cast, dim, x.dim())
    blocks, scales, factor = _scale_blocks(x, cast, tile, amax)
    rounded = _round(blocks, scales, factor, cast, key, scaled=cast.scale.per_block, dtype=dtype)
    if not cast.scale.per_block:
        factor = (stored_scales(scales, cast) * factor).reshape(_factor_shape(x, cast, dim))
    return from_blocks(rounded, x.shape, tile).contiguous(), factor


@compiled
def _round_blocks(
    blocks: Tensor, scales: Tensor, decode_scale: Tensor, *keys: Tensor, cast: Cast, scaled: bool, dtype: torch.dtype
) -> Tensor:
    """Rounds blocked elements; ``codes * scales`` if ``scaled``, else the codes' values."""
    values = blocks.float()
    if cast.scale.block == "tensor":
        values = values + (values - values)  # an amax from outside does not tell of infinities: this makes them NaN
    values = values * encode_factor(scales, decode_scale, cast)
    if keys:
        codes = round_stochastic(values, cast.format, uniform(_element_index(blocks), keys[0]))
    else:
        codes = round_nearest(values, cast.format)
    return (codes * stored_scales(scales, cast) if scaled else codes).to(dtype)


def _round(
    blocks: Tensor,
    scales: Tensor,
    decode: Tensor,
    cast: Cast,
    key: Tensor | int | None,
    scaled: bool,
    dtype: torch.dtype,
) -> Tensor:
    if cast.rounding == "nearest":
        return _round_blocks(blocks, scales, decode, cast=cast, scaled=scaled, dtype=dtype)
    if key is None:
        raise ValueError(
            f"{cast} rounds stochastically and needs a key: quantize(x, cast, key=...). In a layer, keys are set by "
            "the precision plugin, or by lightning_lowbit.nn.LayerKeys where there is no Trainer."
        )
    if not isinstance(key, Tensor):
        key = torch.tensor(key, device=blocks.device)
    if key.dtype != torch.int64 or key.numel() != 1:
        raise ValueError(f"A key is an integer or an int64 tensor of one element; got {key!r}.")
    key = key.reshape(())
    return _round_blocks(blocks, scales, decode, key, cast=cast, scaled=scaled, dtype=dtype)


def _scale_blocks(x: Tensor, cast: Cast, tile: Tile, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The blocked view of a matrix, its scales as :func:`block_scales` gives them, and 1/S of :mod:`scaling`."""
    blocks = to_blocks(x, tile)
    if amax is not None and not cast.scale.needs_amax:
        raise ValueError(
            f"amax was given, but {cast} has no scale of the whole tensor: use Scale(two_level=True) or block='tensor'."
        )
    if amax is None and cast.scale.needs_amax:
        amax = absmax(x)
    elif amax is not None and (not isinstance(amax, Tensor) or amax.numel() != 1):
        raise ValueError(f"amax is a tensor of one element, the largest magnitude; got {amax!r}.")
    encode = torch.ones((), device=x.device)
    if amax is not None:
        amax = amax.float().reshape(())
        if cast.scale.two_level:
            encode = tensor_encode_scale(amax, cast)
    dims = _block_dims(blocks, tile)
    if cast.scale.block == "tensor":
        assert amax is not None
        scales = scales_of(amax.reshape(1, 1), encode, cast)
    elif cast.scale.four_over_six is not None:
        scales = four_over_six_scales(blocks, encode, cast, dims)
    else:
        scales = block_scales(blocks, encode, cast=cast, dims=dims)
    # The prescale comes after the scales are made: made of smaller elements, they would be smaller themselves.
    return blocks, scales, torch.reciprocal(encode * cast.scale.prescale)


def _element_index(blocks: Tensor) -> Tensor:
    """Row-major index of every element, int32: that of the matrix, padded to whole blocks."""
    index: Tensor | int = 0
    stride = 1
    for dimension in reversed(range(blocks.dim())):
        shape = [1] * blocks.dim()
        shape[dimension] = blocks.shape[dimension]
        index = index + torch.arange(shape[dimension], dtype=torch.int32, device=blocks.device).view(shape) * stride
        stride = stride * shape[dimension]
    assert isinstance(index, Tensor)
    return index


# --- the blocked view -------------------------------------------------------------------------------------------------


def _tile(cast: Cast, dim: int, dimensions: int) -> Tile:
    block = cast.scale.block
    if isinstance(block, tuple):
        return block
    if block == "tensor":
        return (ALL, ALL)
    size = ALL if block == "row" else int(block)
    return (size, 1) if dimensions == 2 and dim in (0, -2) else (1, size)


def to_blocks(matrix: Tensor, tile: Tile) -> Tensor:
    """Blocked view of a matrix ``[R, C]``, zero-padded to whole tiles (zeros change no maximum and round to zero)."""
    matrix = matrix.contiguous()
    (rows, columns), (k1, k2) = matrix.shape, tile
    if tile == (ALL, ALL):
        return matrix.reshape(rows * columns, 1)
    if ALL in tile:
        return matrix.reshape(rows, 1, columns)
    if rows % k1 or columns % k2:
        matrix = F.pad(matrix, (0, -columns % k2, 0, -rows % k1))
        rows, columns = matrix.shape
    if k1 == 1:
        return matrix.reshape(rows * columns // k2, k2)
    if k2 == 1:
        return matrix.reshape(rows // k1, k1, columns)
    return matrix.reshape(rows // k1, k1, columns // k2, k2)


def _block_dims(blocks: Tensor, tile: Tile) -> tuple[int, ...]:
    """The dimensions of one block in its view."""
    if ALL not in tile:
        return tuple(range(1, blocks.dim(), 2))
    return (2,) if tile == (1, ALL) else (0,)


def _scales_view(scales: Tensor, blocks: Tensor, tile: Tile) -> Tensor:
    """Scales, in the order of a matrix, as they multiply a blocked view."""
    dims = _block_dims(blocks, tile)
    return scales.reshape([1 if i in dims or i % 2 else size for i, size in enumerate(blocks.shape)])


def from_blocks(blocks: Tensor, shape: torch.Size, tile: Tile) -> Tensor:
    """Inverse of :func:`to_blocks`: the matrix of the given shape, without padding."""
    rows, columns = shape
    if ALL in tile:
        return blocks.reshape(shape)
    padded = blocks.reshape(rows + -rows % tile[0], columns + -columns % tile[1])
    return padded if padded.shape == shape else padded[:rows, :columns]


def _as_matrix(x: Tensor, dim: int) -> Tensor:
    """A matrix is itself; any other tensor has the blocked dimension moved to the columns."""
    if x.dim() == 2:
        return x
    return x.movedim(dim, -1).flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def _from_matrix(matrix: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Inverse of :func:`_as_matrix` for a tensor of ``shape``, whose size along ``dim`` may have changed."""
    if len(shape) == 2:
        return matrix
    leading = [size for i, size in enumerate(shape) if i != len(shape) + dim]
    return matrix.reshape(*leading, matrix.shape[-1]).movedim(-1, dim)
