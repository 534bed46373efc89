"""A quantized tensor as codes and scales, as hardware and exporters store it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import lacks
from lightning_lowbit.quant.blocks import ALL, as_matrix, from_blocks, from_matrix, scales_view, tile_of, to_blocks
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.scaling import round_matrix
from lightning_lowbit.quant.shard import amax_of


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor.

    Attributes:
        codes: uint8, the shape of the tensor, one code per element (not packed).
        scales: block scales in torch's dtype where the device has one (float8, float32), else uint8 codes. The blocked
            dimension (with tiles, the last two) is divided by the block and rounded up. All sizes are 1 with
            ``"tensor"``.
        tensor_scale: float32, multiplies every block scale: 0-d, or of each row (the shape of ``scales``, with the size
            1 along ``dim``); None with one level.
        cast: the cast.
        dim: the blocked dimension, counted from the end; unused for tiles.
        zero_points: uint8, the shape of ``scales``: the code of 0 with ``statistic="minmax"``, else None.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    cast: Cast
    dim: int
    zero_points: Tensor | None = None

    def elements(self) -> Tensor:
        """Decoded elements in units of their scales: float32, the shape of the tensor."""
        if self.zero_points is None:
            return self.cast.format.decode(self.codes)
        return self._spread(self.codes.float(), self.zero_points.float(), torch.sub)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns ``element * (scale * tensor_scale)``: computed in float32, rounded once to ``dtype``."""
        return self._spread(self.elements(), self.multipliers(), torch.mul).to(dtype)

    def multipliers(self) -> Tensor:
        """Returns the factors of elements, ``scale * tensor_scale``: float32, the shape of ``scales``."""
        storage = self.cast.scale.storage
        scales = storage.decode(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def _spread(self, elements: Tensor, scales: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Applies an operation to each element and the value of its block."""
        matrix, scales = as_matrix(elements, self.dim), as_matrix(scales, self.dim)
        tile = tile_of(self.cast, self.dim, elements.dim())
        blocks = to_blocks(matrix, tile)
        values = from_blocks(operation(blocks, scales_view(scales, blocks, tile)), matrix.shape, tile)
        return from_matrix(values, elements.shape, self.dim)


@torch.no_grad()
def quantize(
    x: Tensor, cast: Cast, dim: int = -1, key: Tensor | int | None = None, amax: Tensor | None = None
) -> Quantized:
    """Quantizes a tensor. A NaN or infinite element makes its whole block decode to NaN.

    Args:
        x: floating point, any shape; incomplete blocks are padded with zeros internally.
        cast: the cast; tiles need a matrix.
        dim: dimension along which blocks lie, the contraction dimension of the GEMM; unused for tiles.
        key: key of stochastic rounding: an integer, or an int64 tensor of one element.
        amax: one element, used instead of max|x|, for scales that are shared or delayed.

    Raises:
        ValueError: stochastic rounding without a key; ``amax`` for a cast that does not use it; a wrong dtype or shape.

    Examples:
        >>> q = quantize(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16, two_level=True)))
        >>> q.codes.shape, q.scales.shape
        (torch.Size([4, 64]), torch.Size([4, 4]))
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"quantize takes a tensor; got {type(x).__name__}.")
    if not isinstance(cast, Cast):
        raise ValueError(f"quantize takes a Cast, such as LinearCasts.preset('nvfp4').fprop_x; got {cast!r}.")
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
    call = CastCall(cast, dim if x.dim() == 2 else 1, key, amax)  # type: ignore[arg-type]
    scaled, elements = round_matrix(matrix, call, scaled=False, dtype=torch.float32)
    stored = scaled.stored(cast)
    if cast.scale.block == "tensor":
        stored = torch.where(amax_of(matrix).isfinite(), stored, torch.nan)  # some formats of elements have no NaN

    def per_block(values: Tensor) -> Tensor:
        if cast.scale.block == "tensor":
            return values.reshape([1] * x.dim())
        shape = [1 if k == ALL else -(-n // k) for n, k in zip(matrix.shape, tile, strict=True)]
        return from_matrix(values.reshape(shape), x.shape, dim)

    if (zeros := scaled.zeros) is None:
        codes = cast.format.encode(elements)
    else:
        codes = from_blocks(to_blocks(elements, tile) + zeros, matrix.shape, tile).nan_to_num(nan=0.0).to(torch.uint8)
    storage, stored, tensor_scale = cast.scale.storage, per_block(stored), None
    if cast.scale.two_level or cast.scale.prescale != 1:
        tensor_scale = scaled.factor(matrix.shape, tile)
        tensor_scale = from_matrix(tensor_scale, x.shape, dim) if tensor_scale.dim() else tensor_scale
    is_code = storage.dtype is None or lacks(x.device, storage.dtype)
    return Quantized(
        codes=from_matrix(codes, x.shape, dim),
        scales=storage.encode(stored) if is_code else stored.to(storage.dtype),
        tensor_scale=tensor_scale,
        cast=cast,
        dim=dim,
        zero_points=None if zeros is None else per_block(zeros).nan_to_num(nan=0.0).to(torch.uint8),
    )
