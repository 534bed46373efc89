"""One tensor in, one quantized tensor out.

:func:`quantize` gives codes and scales, what hardware and exporters store. :func:`quantize_operand` gives the same
numbers as a GEMM wants them: ``codes * scales`` in the GEMM's dtype, and the scale of the tensor as one factor apart.

Both see the tensor as a matrix cut into tiles, see :mod:`lightning_lowbit.quant.blocks`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_lowbit.compilation import compiled, opaque
from lightning_lowbit.quant.blocks import (
    ALL,
    Tile,
    as_matrix,
    block_dims,
    element_index,
    elements_per_block,
    from_blocks,
    from_matrix,
    scales_view,
    tile_of,
    to_blocks,
)
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.part import Part, absmax_of
from lightning_lowbit.quant.rounding import round_nearest, round_stochastic, uniform
from lightning_lowbit.quant.scaling import (
    absmax,
    block_amax,
    block_ends,
    block_range,
    block_scales,
    block_sum,
    encode_factor,
    four_over_six_scales,
    scales_of,
    stored_scales,
    tensor_encode_scale,
    zero_points,
)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor.

    Attributes:
        codes: uint8, the shape of the tensor, one code per element (not packed).
        scales: block scales, in torch's dtype where there is one (float8, float32), else as uint8 codes. The shape of
            the tensor with the blocked dimension divided by the block, rounded up (1 for ``"row"``); for tiles both of
            the last two dimensions; for ``"tensor"`` all of them 1.
        tensor_scale: float32, 0-d, what every block scale is multiplied by; None with one level.
        cast: how it was quantized.
        dim: the blocked dimension, counted from the end (for tiles of no consequence).
        zero_points: uint8, the shape of ``scales``: the code of 0 with ``statistic="minmax"``, else None.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    cast: Cast
    dim: int
    zero_points: Tensor | None = None

    def elements(self) -> Tensor:
        """What the codes stand for, in units of their scales: float32, the shape of the tensor."""
        if self.zero_points is None:
            return self.cast.format.decode(self.codes)
        return self._spread(self.codes.float(), self.zero_points.float(), torch.sub)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``element * (scale * tensor_scale)``: computed in float32, rounded once to ``dtype``."""
        storage = self.cast.scale.storage
        scales = self.scales.float() if storage.dtype is not None else storage.decode(self.scales)
        if self.tensor_scale is not None:
            scales = scales * self.tensor_scale
        return self._spread(self.elements(), scales, torch.mul).to(dtype)

    def _spread(self, elements: Tensor, scales: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """An operation on each element and what its block has."""
        matrix, scales = as_matrix(elements, self.dim), as_matrix(scales, self.dim)
        tile = tile_of(self.cast, self.dim, elements.dim())
        blocks = to_blocks(matrix, tile)
        values = from_blocks(operation(blocks, scales_view(scales, blocks, tile)), matrix.shape, tile)
        return from_matrix(values, elements.shape, self.dim)


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
    """Quantizes a tensor.

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
    matrix, tile = as_matrix(x.float(), dim), tile_of(cast, dim, x.dim())
    scaled = scale_blocks(matrix, cast, tile, amax)
    elements = _round(scaled, cast, key, multiplied=False, dtype=torch.float32)
    stored = stored_scales(scaled.scales, cast)
    if cast.scale.block == "tensor":
        stored = torch.where(absmax(matrix).isfinite(), stored, torch.nan)  # some formats of elements have no NaN

    def per_block(values: Tensor) -> Tensor:
        if cast.scale.block == "tensor":
            return values.reshape([1] * x.dim())
        shape = [1 if k == ALL else -(-n // k) for n, k in zip(matrix.shape, tile, strict=True)]
        return from_matrix(values.reshape(shape), x.shape, dim)

    if (zeros := scaled.zeros) is None:
        codes = cast.format.encode(from_blocks(elements, matrix.shape, tile))
    else:
        codes = from_blocks(elements + zeros, matrix.shape, tile).nan_to_num(nan=0.0).to(torch.uint8)
    storage, stored = cast.scale.storage, per_block(stored)
    return Quantized(
        codes=from_matrix(codes, x.shape, dim),
        scales=stored.to(storage.dtype) if storage.dtype is not None else storage.encode(stored),
        tensor_scale=scaled.decode if cast.scale.two_level or cast.scale.prescale != 1 else None,
        cast=cast,
        dim=dim,
        zero_points=None if zeros is None else per_block(zeros).nan_to_num(nan=0.0).to(torch.uint8),
    )


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    part: Part | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM.

    Args:
        x: matrix ``[rows, columns]`` in the GEMM's dtype.
        cast, dim, key, amax: as in :func:`quantize`.
        dtype: of the values, one that holds them exactly: float32, or ``cast.grid.gemm_dtype`` where scales are per
            row or tensor; None for that of ``x``, if it is exact in bfloat16 or the cast is ``rounded``, and float32
            else.
        part: which one of a larger matrix ``x`` is, whose scales and random bits it gets; None: it is whole. All
            processes that hold one must call this together.

    Returns:
        ``codes * scales`` and the tensor's scale; scales per row or tensor are part of the factor.

    Raises:
        ValueError: a block lies on several processes.
    """
    spec = None if part is None else part.spec
    values, factor = _quantize_operand(x, cast.spec, dim, key, amax, dtype or operand_dtype(x.dtype, cast), spec)
    return Operand(values, factor if has_factor(cast) else None)


def blend(x: Tensor, quantized: Operand, share: Tensor, exact: bool = False) -> Operand:
    """``x + λ (q - x)``: an operand on its way from high precision to few bits (progressive quantization).

    Args:
        x: matrix ``[rows, columns]``.
        quantized: q, of the same shape.
        share: λ in [0, 1], 0-d float32. 0 gives ``x`` to the bit where q is finite, and 1 gives q, rounded once.
        exact: values are float32 instead of being rounded to a narrower dtype of ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if exact else x.dtype
    return Operand(_blend(x, quantized.values, quantized.factor, share, dtype))


@opaque(lambda x, values, factor, share, dtype: x.new_empty(x.shape, dtype=dtype))
def _blend(x: Tensor, values: Tensor, factor: Tensor | None, share: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, values = x.to(wide), values.to(wide)
    return torch.lerp(x, values if factor is None else values * factor, share.to(wide)).to(dtype).contiguous()


def scaled_elements(x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None, part: Part | None = None) -> Tensor:
    """The elements of a matrix in units of their scales, before rounding: float32, the shape of ``x``."""
    tile = tile_of(cast, dim, x.dim())
    blocks, scales, decode, _ = scale_blocks(x, cast, tile, amax, part)
    return from_blocks(blocks.float() * encode_factor(scales, decode, cast), x.shape, tile)


def has_factor(cast: Cast) -> bool:
    """Whether operands of a cast have a factor."""
    return cast.scale.two_level or cast.scale.prescale != 1 or not cast.scale.per_block


def _factor_shape(x: Tensor, cast: Cast, dim: int) -> tuple[int, ...]:
    if cast.scale.block != "row":
        return ()
    return (1, x.shape[1]) if dim in (0, -2) else (x.shape[0], 1)


def operand_dtype(dtype: torch.dtype, cast: Cast) -> torch.dtype:
    """The dtype of the values of an operand, from that of the tensor it is made of; see :func:`quantize_operand`."""
    # float16 has the digits but not the range: codes * scales exceed 65504 for some scale formats.
    fits = cast.fits_bfloat16 and dtype != torch.float16
    return dtype if fits or is_rounded(dtype, cast) else torch.float32


def is_rounded(dtype: torch.dtype, cast: Cast) -> bool:
    """Whether what enters the GEMM is rounded to the dtype of the tensor it is made of."""
    return cast.rounded and cast.scale.per_block and dtype != torch.float16


def _fake_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, part: str | None
) -> tuple[Tensor, Tensor]:
    cast = Cast.from_spec(spec)
    factor = x.new_empty(_factor_shape(x, cast, dim), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), factor


@opaque(_fake_operand)
def _quantize_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, part: str | None
) -> tuple[Tensor, Tensor]:
    cast, known = Cast.from_spec(spec), Part.from_spec(part)
    tile = tile_of(cast, dim, x.dim())
    scaled = scale_blocks(x, cast, tile, amax, known)
    rounded = x.dtype if is_rounded(x.dtype, cast) else dtype  # also where float32 is asked for
    place = None if known is None else known.place(x.shape, tile, x.device)
    values = _round(scaled, cast, key, cast.scale.per_block, rounded, place)
    factor = scaled.decode
    if not cast.scale.per_block:
        factor = (stored_scales(scaled.scales, cast) * factor).reshape(_factor_shape(x, cast, dim))
    return from_blocks(values.to(dtype), x.shape, tile).contiguous(), factor


class Scaled(NamedTuple):
    """The blocked view of a matrix, its scales as :func:`block_scales` gives them, 1/S and z of :mod:`scaling`."""

    blocks: Tensor
    scales: Tensor
    decode: Tensor
    zeros: Tensor | None = None

    def tensors(self, cast: Cast, key: Tensor | int | None, place: Tensor | None = None) -> list[Tensor]:
        """What :func:`round_blocks` takes."""
        tensors = [tensor for tensor in self if tensor is not None]
        if cast.rounding == "nearest":
            return tensors
        return [*tensors, _key_of(cast, key, self.blocks.device), *([] if place is None else [place])]


@compiled
def _round_blocks(
    blocks: Tensor,
    scales: Tensor,
    decode_scale: Tensor,
    *rest: Tensor,
    cast: Cast,
    multiplied: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Rounds blocked elements; ``elements * scales`` if ``multiplied``, else the elements."""
    elements = round_blocks(blocks, scales, decode_scale, *rest, cast=cast)
    return (elements * stored_scales(scales, cast) if multiplied else elements).to(dtype)


def round_blocks(blocks: Tensor, scales: Tensor, decode_scale: Tensor, *rest: Tensor, cast: Cast) -> Tensor:
    """Rounds blocked elements to float32 elements of the cast, in units of their scales.

    ``rest``: the zero points of casts that have them; then, of those that round stochastically, the key, and the place
    of the matrix in a larger one that it is part of.
    """
    values = blocks.float()
    if cast.scale.block == "tensor":
        values = values + (values - values)  # an amax from outside does not tell of infinities: this makes them NaN
    values = values * encode_factor(scales, decode_scale, cast)
    if cast.scale.statistic == "minmax":  # the levels of the block are those from -z on
        values = torch.minimum(torch.maximum(values, -rest[0]), cast.grid.max - rest[0])
    if cast.rounding == "stochastic":
        key, *place = rest[1:] if cast.scale.statistic == "minmax" else rest
        return round_stochastic(values, cast.grid, uniform(element_index(blocks, *place), key))
    return round_nearest(values, cast.grid)


def _round(
    scaled: Scaled,
    cast: Cast,
    key: Tensor | int | None,
    multiplied: bool,
    dtype: torch.dtype,
    place: Tensor | None = None,
) -> Tensor:
    return _round_blocks(*scaled.tensors(cast, key, place), cast=cast, multiplied=multiplied, dtype=dtype)


def round_scaled(scaled: Scaled, cast: Cast, key: Tensor | None, place: Tensor) -> Tensor:
    """The elements of a part of a matrix, rounded, in units of their scales: float32, in the blocked view."""
    return _round(scaled, cast, key, multiplied=False, dtype=torch.float32, place=place)


def _key_of(cast: Cast, key: Tensor | int | None, device: torch.device) -> Tensor:
    if key is None:
        raise ValueError(
            f"{cast} rounds stochastically and needs a key: quantize(x, cast, key=...). In a layer, keys are "
            "set by the plugin, as in Trainer(plugins=[FP4Precision()]), or by lightning_lowbit.nn.LayerKeys in a loop "
            "of your own."
        )
    if not isinstance(key, Tensor):
        key = torch.tensor(key, device=device)
    if key.dtype != torch.int64 or key.numel() != 1:
        raise ValueError(f"A key is an integer or an int64 tensor of one element; got {key!r}.")
    return key.reshape(())


def scale_blocks(
    x: Tensor, cast: Cast, tile: Tile, amax: Tensor | None, part: Part | None = None, mean: Tensor | None = None
) -> Scaled:
    """Cuts a matrix, or a part of one, into blocks, and makes their scales.

    ``mean``: mean magnitude of the whole, where the one scale of it is made of that, if it is known.
    """
    blocks = to_blocks(x, tile)
    if part is not None and not part.cuts(tile):
        part.check(x.shape, tile[part.dim], "blocks of")
    if amax is not None and not cast.scale.needs_amax:
        raise ValueError(
            f"amax was given, but {cast} has no scale of the whole tensor's largest magnitude: use "
            "Scale(two_level=True), or block='tensor' with statistic='absmax'."
        )
    if amax is None and cast.scale.needs_amax:
        amax = absmax_of(x, part)
    elif amax is not None and (not isinstance(amax, Tensor) or amax.numel() != 1):
        raise ValueError(f"amax is a tensor of one element, the largest magnitude; got {amax!r}.")
    encode = torch.ones((), device=x.device)
    if amax is not None:
        amax = amax.float().reshape(())
        if cast.scale.two_level:
            encode = tensor_encode_scale(amax, cast)
    dims = block_dims(blocks, tile)
    shared = part if part is not None and part.cuts(tile) else None
    zeros = None
    if mean is not None:
        scales = scales_of(mean.reshape(1, 1), encode, cast)
    elif cast.scale.statistic == "absmean":
        total = block_sum(blocks, dims) if shared is None else shared.reduce(block_sum(blocks, dims), ReduceOp.SUM)
        counts = elements_per_block(x, blocks, tile, x.shape if part is None else part.whole(x.shape))
        scales = scales_of((total / counts).float(), encode, cast)
    elif cast.scale.statistic == "minmax":
        low, high = block_ends(blocks, dims)
        if shared is not None:
            low, high = shared.reduce(low, ReduceOp.MIN), shared.reduce(high, ReduceOp.MAX)
        low, span = block_range(low, high)
        scales = scales_of(span, encode, cast)
        zeros = zero_points(low, scales, cast)
    elif cast.scale.block == "tensor":
        assert amax is not None
        scales = scales_of(amax.reshape(1, 1), encode, cast)
    elif shared is not None:
        scales = scales_of(shared.reduce(block_amax(blocks, dims), ReduceOp.MAX), encode, cast)
    elif cast.scale.four_over_six is not None:
        scales = four_over_six_scales(blocks, encode, cast, dims)
    else:
        scales = block_scales(blocks, encode, cast=cast, dims=dims)
    # The prescale comes after the scales are made: made of smaller elements, they would be smaller themselves.
    return Scaled(blocks, scales, torch.reciprocal(encode * cast.scale.prescale), zeros)
