"""Changes of a matrix before it is quantized, which are undone elsewhere in its GEMM.

Mean      Activations and gradients often share one direction over all tokens, which holds most of their outliers
          (Averis, arXiv 2603.10444). Without it, quantized values resolve the differences between tokens.
Smoothing One outlier channel enlarges the scale of the whole tensor, and all others underflow. Powers of two, which are
          divided out elsewhere in the GEMM, give every channel (or token) an amax between 1/2 and 1 without rounding
          (Smooth-SwiGLU, arXiv 2409.12517, section 4.4).
Hadamard  A random rotation spreads an outlier over its group. It is a property of a GEMM, not of a tensor:

              A · B  =  (A T) (Tᵀ B)      T = diag(±1) · H / √n, orthogonal, for each n along the contraction axis

          H is Sylvester's matrix, [[H, H], [H, -H]] recursively from [[1]]. :func:`rotate` sums in an order of its own,
          which a matrix product would leave to the library, so that all devices get the same bits.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit._torch.devices import power_of_two
from lightning_lowbit.checks import choose
from lightning_lowbit.compilation import opaque
from lightning_lowbit.quant.rounding import KEYS, mix_key, uniform
from lightning_lowbit.quant.scales import binary_exponent, block_amax

# Factors and products stay far from the ends of float32's and bfloat16's range. In float16 the factors and their
# reciprocals are just normal numbers.
_LIMIT, _FLOAT16_LIMIT = 64, 14


@opaque(lambda x: (torch.empty_like(x), x.new_empty((1, x.shape[1]), dtype=torch.float32)))
def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ``[tokens, features]`` into ``X - 1 μᵀ``, in the dtype of ``x``, and ``μᵀ``, float32 ``[1, features]``."""
    mean = x.sum(0, keepdim=True, dtype=torch.float32) / max(len(x), 1)
    return (x.float() - mean).to(x.dtype), mean


@opaque(lambda x, dim: x.new_empty([*x.shape[:dim], 1, *x.shape[dim:][1:]], dtype=torch.float32))
def amax_along(x: Tensor, dim: int) -> Tensor:
    """Returns max|x| along a dimension, which keeps the size 1: float32, 0 without elements."""
    return block_amax(x, (dim % x.dim(),))


def smoothing_factor(amax: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns ``1 / amax``, rounded down to a power of two from 2^-64 to 2^64, in float16 from 2^-14 to 2^14.

    Where ``amax`` (float32, any shape, 0 or more) is 0 or not finite, the factor is 1.
    """
    limit = _FLOAT16_LIMIT if dtype == torch.float16 else _LIMIT
    exponent, mantissa = binary_exponent(amax)
    factor = power_of_two((-exponent - (mantissa > 1).to(torch.int32)).clamp(-limit, limit))
    return torch.where(torch.isfinite(amax) & (amax > 0), factor, 1.0).to(dtype)


SIZES = (16, 32, 64, 128)

# Transformer Engine's signs for groups of 16; larger groups repeat them.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

_SALT = 0x48616461  # separates the bits of signs from those of stochastic rounding, which share the key


@dataclass(frozen=True)
class Hadamard:
    """The rotation of the operands of a GEMM along its contraction axis.

    Args:
        size: of the groups: 16, 32, 64 or 128.
        signs: ``"fixed"``, Transformer Engine's vector of 16, repeated (arXiv 2509.25149, appendix C); or ``"keyed"``,
            drawn for each layer, step and micro-batch from the keys of stochastic rounding.

    Raises:
        ValueError: an argument is not one of these.

    Examples:
        >>> LinearCasts.preset("nvfp4").replace(hadamard={"wgrad": Hadamard(32, signs="keyed")})
    """

    size: int = 16
    signs: Literal["fixed", "keyed"] = "fixed"

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size not in SIZES:
            raise ValueError(f"Hadamard.size is one of {', '.join(map(str, SIZES))}; got {self.size!r}.")
        choose("signs of a Hadamard transform", self.signs, ("fixed", "keyed"))

    def diagonal(self, key: Tensor | None, device: torch.device) -> Tensor:
        """Returns the signs of T: float32 ``[size]``; keyed ones need ``key``, int64 of one element."""
        return self.diagonals(None if key is None else key.reshape(()), device)

    def diagonals(self, keys: Tensor | None, device: torch.device) -> Tensor:
        """Returns the signs of several products: float32 ``[products, size]``, from a key of each, int64
        ``[products]``; or the fixed signs of all of them, ``[size]``."""
        if self.signs == "keyed" and keys is None:
            raise ValueError(f"Keyed signs of a Hadamard transform need a key. {KEYS}")
        return _signs(keys if self.signs == "keyed" else None, self.size, device)

    def __str__(self) -> str:
        return f"{self.size}{'~' if self.signs == 'keyed' else ''}"


@cache
def _fixed_signs(size: int, device: torch.device) -> Tensor:  # cached, because a copy to the device waits for it
    return torch.tensor(_SIGNS, dtype=torch.float32, device=device).repeat(size // len(_SIGNS))


@opaque(
    lambda key, size, device: torch.empty(
        [*(() if key is None else key.shape), size], dtype=torch.float32, device=device
    )
)
def _signs(key: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Copies the signs: compiled code may reuse its memory."""
    if key is None:
        return _fixed_signs(size, device).clone()
    index = torch.arange(size, dtype=torch.int32, device=device)
    key = mix_key((key if key.dim() == 0 else key[:, None]) ^ _SALT)
    return torch.where(uniform(index, key) < 0.5, -1.0, 1.0).float()


def rotated_shape(shape: torch.Size, signs: Tensor, dim: int) -> torch.Size:
    """Returns the shape of a matrix that :func:`rotate` has padded to whole groups."""
    return torch.Size(n + -n % len(signs) if i == dim else n for i, n in enumerate(shape))


def rotation_factors(size: int) -> tuple[float, float]:
    """Returns the factors of elements before and after the sums of :func:`rotate`; their product is 1/√size."""
    exponent = size.bit_length() - 1
    return 2.0 ** -(exponent // 2), math.sqrt(0.5) if exponent % 2 else 1.0


@opaque(lambda x, signs, dim, inverse=False: x.new_empty(rotated_shape(x.shape, signs, dim)))
def rotate(x: Tensor, signs: Tensor, dim: int, inverse: bool = False) -> Tensor:
    """Multiplies each group along ``dim`` (0 or 1) of a matrix by T, or by its inverse, the transpose.

    Computed in float32, in an order that decides the last bit, and rounded once to the dtype of ``x``:

        x = x * (sign * 2^-e)               e = floor(log2(n) / 2): exact, but for subnormal numbers
        a, b = a + b, a - b                 of elements 1 apart, then 2, 4, ... and n/2 apart
        x = x * fl(√½)                      where n is 32 or 128

    The inverse multiplies by the signs after that. The result is zero-padded along ``dim`` to whole groups, because
    padding takes part in the rotation.

    Args:
        x: ``[rows, columns]``.
        signs: ±1, float32 ``[n]``, those of :meth:`Hadamard.diagonal`.

    Examples:
        >>> rotate(torch.eye(16)[:1], torch.ones(16), dim=1).unique()
        tensor([0.2500])
    """
    size, shape = len(signs), rotated_shape(x.shape, signs, dim)
    if shape != x.shape:
        x = F.pad(x, (0, shape[1] - x.shape[1], 0, shape[0] - x.shape[0]))
    before, after = rotation_factors(size)
    by = signs.unsqueeze(1)
    # Elements of a group lie along the second last axis, and along the last one elements with the same sign.
    groups = x.detach().reshape(-1, size).t() if dim == 1 else x.detach().reshape(shape[0] // size, size, shape[1])
    groups = (groups.float() * (before if inverse else by * before)).contiguous()
    other, apart = torch.empty_like(groups), 1
    while apart < size:
        pairs = (*groups.shape[:-2], size // (2 * apart), 2, apart * groups.shape[-1])
        (a, b), (total, difference) = groups.view(pairs).unbind(-2), other.view(pairs).unbind(-2)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        groups, other, apart = other, groups, 2 * apart
    if after != 1:
        groups *= after
    if inverse:
        groups *= by
    return (groups.t() if dim == 1 else groups).to(x.dtype).reshape(shape)
