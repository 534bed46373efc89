"""The random Hadamard transform of a GEMM's operands. It spreads an outlier over its group before quantization.

    A · B  =  (A T) (Tᵀ B)      T = diag(±1) · H / √n, orthogonal, for each group of n along the contraction axis

H is Sylvester's matrix, [[H, H], [H, -H]] recursively from [[1]]. T is a property of a GEMM, not of a tensor.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.compilation import opaque, within_cast
from lightning_lowbit.quant.rounding import mix_key, uniform

SIZES = (16, 32, 64, 128)

# Transformer Engine's signs for groups of 16; larger groups repeat them.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

_SALT = 0x48616461  # separates the bits of signs from those of stochastic rounding, which share the key


@dataclass(frozen=True)
class Hadamard:
    """How the operands of a GEMM are rotated along its contraction axis.

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

    def matrix(self, key: Tensor | None, device: torch.device) -> Tensor:
        """T: float32 ``[size, size]``; a ValueError for keyed signs without ``key`` (int64, one element)."""
        if self.signs == "fixed":
            return _matrix(None, self.size, device)
        if key is None:
            raise ValueError(
                "Keyed signs of a Hadamard transform need a key. In a layer, keys are set by the plugin, as in "
                "Trainer(plugins=[FP4Precision()]), or by lightning_lowbit.nn.LayerKeys in a loop of your own."
            )
        return _matrix(key, self.size, device)

    def __str__(self) -> str:
        return f"{self.size}" + ("~" if self.signs == "keyed" else "")


@cache
def _sylvester(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


@cache
def _fixed_signs(size: int, device: torch.device) -> Tensor:  # cached, because a copy to the device waits for it
    return torch.tensor(_SIGNS, dtype=torch.float32, device=device).repeat(size // len(_SIGNS))


@opaque(lambda key, size, device: torch.empty(size, size, device=device))
def _matrix(key: Tensor | None, size: int, device: torch.device) -> Tensor:
    """T as a new tensor: compiled code may reuse its memory."""
    if key is None:
        signs = _fixed_signs(size, device)
    else:
        index = torch.arange(size, dtype=torch.int32, device=device)
        signs = torch.where(uniform(index, mix_key(key.reshape(()) ^ _SALT)) < 0.5, -1.0, 1.0)
    return signs[:, None] * _sylvester(size, device)


def _padded(x: Tensor, transform: Tensor, dim: int) -> Tensor:
    padding = -x.shape[dim] % len(transform)
    return F.pad(x, (0, padding) if dim == 1 else (0, 0, 0, padding))


@opaque(lambda x, transform, dim: x.new_empty(_padded(x, transform, dim).shape))
def rotate(x: Tensor, transform: Tensor, dim: int) -> Tensor:
    """Multiplies each group along ``dim`` (0 or 1) of a matrix by T, float32 ``[n, n]``; its transpose rotates back.

    Computed in float32 and rounded once to the dtype of ``x``. The result is zero-padded along ``dim`` to whole groups,
    because padding takes part in the rotation.
    """
    x, size = _padded(x, transform, dim).contiguous(), len(transform)
    with within_cast():
        if dim == 1:
            return (x.float().reshape(-1, size) @ transform).to(x.dtype).reshape(x.shape)
        return (transform.t() @ x.float().reshape(len(x) // size, size, x.shape[1])).to(x.dtype).reshape(x.shape)
