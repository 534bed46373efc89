"""Quantisation as it is defined: grids by enumeration, blocks by loops, random bits by integers.

Nothing here comes from the package: the grids follow from the names of the formats.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOAT32_MAX = np.finfo(np.float32).max

# ExMy: exponent bias, and how many of the topmost codes (of one sign) stand for no number.
FLOATS = {
    "e2m1": (1, 0),
    "e1m2": (1, 0),
    "e3m0": (3, 0),
    "e2m3": (1, 0),
    "e3m2": (3, 0),
    "e4m3": (7, 1),
    "e5m2": (15, 4),
    "e1m6": (0, 1),
    "e2m5": (1, 1),
    "e3m4": (3, 1),
    "e6m1": (31, 1),
}


# --- formats ----------------------------------------------------------------------------------------------------------


def magnitudes(name: str) -> np.ndarray:
    """The magnitudes of a format, float64, ascending from 0; the code of a non-negative float is its place here."""
    if name == "ternary":
        return np.arange(2.0)
    if name.startswith("int"):
        return np.arange(2.0 ** (int(name[3:]) - 1))
    if name not in FLOATS:
        raise KeyError(f"No oracle for the format {name!r}: say in tests/references/quantize.py what its values are.")
    bias, not_numbers = FLOATS[name]
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))  # subnormal
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values[: len(values) - not_numbers])


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Nearest value, ties to the even code, saturating (infinities too), NaN kept. Midpoints are exact in float64."""
    grid = magnitudes(name)
    middles = (grid[1:] + grid[:-1]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    place = np.searchsorted(middles, magnitude, side="left")  # how many midpoints are smaller
    tie = magnitude == np.append(middles, np.nan)[np.minimum(place, len(middles))]
    place = np.where(tie & (place % 2 == 1), place + 1, place)
    return np.where(np.isnan(x), np.nan, np.copysign(grid[np.minimum(place, len(grid) - 1)], x))


def up(x: np.ndarray, name: str) -> np.ndarray:
    """Smallest value that is not below ``x >= 0``; the largest one beyond it, NaN kept."""
    grid = magnitudes(name)
    place = np.minimum(np.searchsorted(grid, np.asarray(x, np.float64), side="left"), len(grid) - 1)
    return np.where(np.isnan(x), np.nan, grid[place])


def neighbours(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest value that is not above ``x``, and the smallest not below: the same where ``x`` is on the grid."""
    positive = magnitudes(name)
    grid = np.concatenate([-positive[:0:-1], positive])
    x = np.clip(np.asarray(x, np.float64), grid[0], grid[-1])
    below = np.searchsorted(grid, x, side="right") - 1
    above = np.searchsorted(grid, x, side="left")
    return grid[below], grid[above]


# --- random bits ------------------------------------------------------------------------------------------------------

RANDOM_BITS = 16


def hash32(index: np.ndarray, key: int) -> np.ndarray:
    """32 random bits for every element index under a 64-bit key: three multiplications, uint32."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
    bits = (index.astype(np.uint32) ^ low) * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> np.uint32(16))) + high
    bits = bits * np.uint32(0x21F0AAAD)
    bits = bits ^ (bits >> np.uint32(15))
    bits = bits * np.uint32(0x735A2D97)
    return bits ^ (bits >> np.uint32(15))


def uniform(index: np.ndarray, key: int) -> np.ndarray:
    """The upper bits of the hash as numbers in (0, 1), half a unit away from both ends."""
    return ((hash32(index, key) >> np.uint32(32 - RANDOM_BITS)) + 0.5) / 2.0**RANDOM_BITS


def splitmix64(key: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    mask = 2**64 - 1
    key = (key + 0x9E3779B97F4A7C15) & mask
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & mask
    key = (key ^ key >> 27) * 0x94D049BB133111EB & mask
    return key ^ key >> 31


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """``values`` are those of the codes; the tensor is ``values * (scales * decode)``. All float32, but ``scaled``."""

    scaled: np.ndarray  # [R, C] what was rounded, to values
    values: np.ndarray  # [R, C]
    scales: np.ndarray  # [ceil(R / k1), ceil(C / k2)]
    spread: np.ndarray  # [R, C] the scale of each element
    decode: np.float32

    @property
    def dequantized(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.values * (self.spread * self.decode)


def quantize_matrix(
    x: np.ndarray,
    element: str,
    scale_format: str,
    tile: tuple[int, int],
    *,
    two_level: bool = False,
    scale_up: bool = False,
    amax: float | None = None,
    key: int | None = None,
) -> Result:
    """Quantises ``x`` (float32 ``[R, C]``) tile by tile; stochastically if there is a key."""
    one, element_max = np.float32(1), np.float32(magnitudes(element)[-1])
    scale_max = np.float32(magnitudes(scale_format)[-1])
    (rows, columns), (k1, k2) = x.shape, tile
    padded_columns = -(-columns // k2) * k2
    scaled, values, spread = (np.zeros((rows, columns), np.float32) for _ in range(3))
    scales = np.zeros((-(-rows // k1), -(-columns // k2)), np.float32)
    with np.errstate(all="ignore"):
        encode = one
        if two_level:
            largest = np.float32(np.abs(x).max(initial=0) if amax is None else amax)
            if np.isfinite(largest) and largest > 0:
                encode = np.minimum(scale_max * element_max / largest, FLOAT32_MAX)
        decode = one / encode
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * k1, (i + 1) * k1), slice(j * k2, (j + 1) * k2)
                block = x[at]
                largest = np.abs(block).max()
                wanted = np.minimum(largest * (encode * (one / element_max)), scale_max)
                scale = np.float32((up if scale_up else nearest)(wanted, scale_format))
                if not np.isfinite(largest):
                    scale = np.float32(np.nan)
                factor = np.minimum(one / (scale * decode), FLOAT32_MAX)
                scaled[at] = block * factor
                scales[i, j] = spread[at] = scale
        if key is None:
            values[:] = nearest(scaled, element)
        else:
            index = np.arange(rows)[:, None] * padded_columns + np.arange(columns)
            lower, upper = neighbours(scaled, element)
            goes_up = np.clip(scaled, -element_max, element_max) - lower > (upper - lower) * (1 - uniform(index, key))
            values[:] = np.where(np.isnan(scaled), np.nan, np.where(goes_up, upper, lower))
    return Result(scaled, values, scales, spread, decode)


def quantize(
    x: Tensor, cast: Any, dim: int = -1, key: int | None = None, amax: float | None = None, *, field: str
) -> Tensor:
    """One field of :class:`Result` for a tensor of any shape and a ``Cast``, as float32; blocks lie along ``dim``."""
    block = cast.scale.block
    if isinstance(block, tuple):
        matrix, tile = x, block
    elif x.dim() == 2 and dim in (0, -2):
        matrix, tile = x, (block, 1)
    else:
        moved = x.movedim(dim, -1)
        matrix, tile = moved.reshape(-1, moved.shape[-1]), (1, block)
    result = quantize_matrix(
        matrix.detach().float().numpy(),
        cast.element,
        cast.scale.format,
        tile,
        two_level=cast.scale.two_level,
        scale_up=cast.scale.rounding == "up",
        amax=amax,
        key=key if cast.rounding == "stochastic" else None,
    )
    found = torch.from_numpy(getattr(result, field))
    return found if x.dim() == 2 else found.reshape(*moved.shape[:-1], found.shape[-1]).movedim(-1, dim)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Any, dim: int) -> Tensor:
        return quantize(x, cast, dim, field="dequantized").to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def fake_quantize(x: Tensor, cast: Any, dim: int = -1) -> Tensor:
    """Quantised and dequantised; the gradient passes straight through."""
    return _FakeQuantize.apply(x, cast, dim)
