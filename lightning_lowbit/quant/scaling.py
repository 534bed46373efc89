"""From the largest magnitude of a block to its scale.

For elements up to ``element.max`` and scales up to ``scale.max``, with A the largest magnitude of the tensor and b that
of a block, all in float32 and in this association (it decides the last bit, and is Transformer Engine's):

    S = min(scale.max * element.max / A, FLT_MAX)      encode scale of the tensor; 1 without a second level
    s = round(min(b * (S * fl(1 / element.max)), scale.max))      stored scale of the block
    e = min(1 / (s * (1/S)), FLT_MAX)                  what elements are multiplied by before rounding
    value = code * (s * (1/S))

A block whose s underflows to 0 decodes to 0. A block that holds a NaN or an infinity gets s = NaN and decodes to NaN,
whatever its element format: an overflow never becomes a finite number. Where A is 0 or not finite, S is 1.
"""

import torch
from torch import Tensor

from lightning_lowbit.kernels import compiled
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.rounding import round_nearest, round_up

_FLOAT32_MAX = torch.finfo(torch.float32).max


def absmax(x: Tensor) -> Tensor:
    """Largest magnitude of a tensor: 0-d float32; NaN if there is one, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    smallest, largest = torch.aminmax(x)  # one pass, no temporary, unlike x.abs().amax()
    return torch.maximum(-smallest, largest).float()


def tensor_encode_scale(amax: Tensor, cast: Cast) -> Tensor:
    """S above: 0-d float32, from the tensor's largest magnitude (0-d float32)."""
    target = amax.new_full((), cast.scale.storage.max * cast.format.max)
    # tensor / tensor: torch computes number / tensor as number * (1 / tensor), which is off by one ulp in places
    scale = torch.div(target, amax).clamp(max=_FLOAT32_MAX)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def block_dims(blocks: Tensor) -> tuple[int, ...]:
    """The dimensions of one block in a blocked view: the odd ones, see :func:`quantize.to_blocks`."""
    return tuple(range(1, blocks.dim(), 2))


@compiled
def block_scales(blocks: Tensor, encode_scale: Tensor, *, cast: Cast) -> Tensor:
    """s above.

    Args:
        blocks: floating point, blocked view ``[B, k]``, ``[B, k, I]`` or ``[R, k1, C, k2]``.
        encode_scale: S, 0-d float32.

    Returns:
        float32 values of the stored scales, the shape of ``blocks`` with block dimensions of size 1.
    """
    # The maximum is taken in the input's dtype, exactly, before the few maxima are widened.
    amax = blocks.abs().amax(block_dims(blocks), keepdim=True).float()
    wanted = amax * (encode_scale * (torch.ones_like(encode_scale) / cast.format.max))
    round_scale = round_up if cast.scale.rounding == "up" else round_nearest
    return torch.where(torch.isfinite(amax), round_scale(wanted, cast.scale.storage), torch.nan)


def encode_factor(scales: Tensor, decode_scale: Tensor) -> Tensor:
    """e above, from s (float32, any shape) and 1/S (0-d float32)."""
    return torch.reciprocal(scales * decode_scale).clamp(max=_FLOAT32_MAX)
