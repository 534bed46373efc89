"""Surrogates for the derivative of rounding, which is zero almost everywhere.

The gradient of a quantized tensor passes straight through to the tensor (straight-through estimator), or is multiplied
by a factor that depends on where each v = x · e lies on the grid:

    "trust"   1 where |v| exceeds the largest level by at most half a step, else 0: no gradient through saturated
              values (QuEST, arXiv 2502.05003, section 3.3: trust where the error is at most half a step)
    "dge"     min(|2 r - 1|^(1/k - 1) / k, 3) with r in [0, 1) the place of |v| between its neighbors: the derivative
              of a smooth step, steep in the middle, flat at the levels (arXiv 2501.17116, section 3.1; k = 5)
"""

import torch
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import scaled_elements
from lightning_lowbit.quant.rounding import grid_step
from lightning_lowbit.quant.shard import Shard

SURROGATES = ("trust", "dge")

_SHARPNESS = 5.0  # k
_LIMIT = 3.0  # the derivative is infinite half-way between two levels


def surrogate_factor(kind: str, x: Tensor, cast: Cast, dim: int, amax: Tensor | None = None) -> Tensor:
    """The factor of the gradient of the quantized matrix ``x``: float32, its shape. ``kind`` is one of ``SURROGATES``.

    The other arguments are those of :func:`quantize_operand`. Where a scale is 0, all elements but zeros count as
    saturated.
    """
    return _factor(choose("surrogate", kind, SURROGATES), x, cast.spec, dim, amax, None)


def through_rounding(
    gradient: Tensor,
    kind: str,
    x: Tensor,
    cast: Cast,
    dim: int,
    amax: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """The gradient of ``x`` from that of its quantized values: multiplied in float32, rounded once to its dtype."""
    spec = None if shard is None else shard.spec
    return _through_rounding(gradient, choose("surrogate", kind, SURROGATES), x, cast.spec, dim, amax, spec)


@opaque(lambda gradient, kind, x, spec, dim, amax, shard: torch.empty_like(gradient))
def _through_rounding(
    gradient: Tensor, kind: str, x: Tensor, spec: str, dim: int, amax: Tensor | None, shard: str | None
) -> Tensor:
    return (gradient * _factor(kind, x, spec, dim, amax, shard)).to(gradient.dtype)


@opaque(lambda kind, x, spec, dim, amax, shard: x.new_empty(x.shape, dtype=torch.float32))
def _factor(kind: str, x: Tensor, spec: str, dim: int, amax: Tensor | None, shard: str | None) -> Tensor:
    cast, part = Cast.from_spec(spec), None if shard is None else Shard.from_spec(shard)
    magnitude = scaled_elements(x, cast, dim, amax, part).abs()
    largest = torch.full_like(magnitude, cast.format.max)
    if kind == "trust":
        return (magnitude <= largest + grid_step(largest, cast.format) / 2).float()
    magnitude = torch.minimum(magnitude, largest)
    step = grid_step(magnitude, cast.format)
    place = torch.remainder(magnitude, step) / step
    return ((2 * place - 1).abs() ** (1 / _SHARPNESS - 1) / _SHARPNESS).clamp(max=_LIMIT)
