"""Quantization as it is defined: grids by enumeration, blocks by loops, random bits by integers.

Nothing here comes from the package: the grids follow from the names of the formats.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

FLOAT32_MAX = np.finfo(np.float32).max
LEAST_INVERTIBLE = np.float32(2.0**-128 + 2.0**-149)  # the reciprocal of the float32 below is infinite

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
    "bf16": (127, 2**7),
    "fp16": (15, 2**10),
}
WIDE = {"bf16": (8, 7), "fp16": (5, 10)}  # exponent and mantissa bits


# --- formats ----------------------------------------------------------------------------------------------------------


@cache
def magnitudes(name):
    """The magnitudes of a format, float64, ascending from 0; the code of a non-negative float is its place here.

    Those of E8M0 begin at 2^-127: it has no 0.
    """
    if name == "e8m0":
        return 2.0 ** np.arange(-127, 128)
    if name == "ternary":
        return np.arange(2.0)
    if name.startswith("int"):
        return np.arange(2.0 ** (int(name[3:]) - 1))
    if name not in FLOATS:
        raise KeyError(f"No oracle for the format {name!r}: say in tests/references/quantize.py what its values are.")
    bias, not_numbers = FLOATS[name]
    exponent_bits, mantissa_bits = WIDE.get(name) or (int(name[1]), int(name[3]))
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))  # subnormal
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values[: len(values) - not_numbers])


def nearest(x, name):
    """Nearest value, ties to the even code, saturating (infinities too), NaN kept. Midpoints are exact in float64."""
    grid = magnitudes(name)
    middles = (grid[1:] + grid[:-1]) / 2
    with np.errstate(invalid="ignore"):  # signaling NaNs
        x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    place = np.searchsorted(middles, magnitude, side="left")  # how many midpoints are smaller
    tie = magnitude == np.append(middles, np.nan)[np.minimum(place, len(middles))]
    place = np.where(tie & (place % 2 == 1), place + 1, place)
    return np.where(np.isnan(x), np.nan, np.copysign(grid[np.minimum(place, len(grid) - 1)], x))


def up(x, name):
    """Smallest value that is not below ``x >= 0``; the largest one beyond it, NaN kept."""
    grid = magnitudes(name)
    place = np.minimum(np.searchsorted(grid, np.asarray(x, np.float64), side="left"), len(grid) - 1)
    return np.where(np.isnan(x), np.nan, grid[place])


def neighbors(x, name):
    """The largest value that is not above ``x``, and the smallest not below: the same where ``x`` is on the grid."""
    positive = magnitudes(name)
    grid = np.concatenate([-positive[:0:-1], positive])
    x = np.clip(np.asarray(x, np.float64), grid[0], grid[-1])
    below = np.searchsorted(grid, x, side="right") - 1
    above = np.searchsorted(grid, x, side="left")
    return grid[below], grid[above]


# --- random bits ------------------------------------------------------------------------------------------------------

RANDOM_BITS = 16


def hash32(index, key):
    """32 random bits for every element index under a 64-bit key: three multiplications, uint32."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
    bits = (index.astype(np.uint32) ^ low) * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> np.uint32(16))) + high
    bits = bits * np.uint32(0x21F0AAAD)
    bits = bits ^ (bits >> np.uint32(15))
    bits = bits * np.uint32(0x735A2D97)
    return bits ^ (bits >> np.uint32(15))


def uniform(index, key):
    """The upper bits of the hash as numbers in (0, 1), half a unit away from both ends."""
    return ((hash32(index, key) >> np.uint32(32 - RANDOM_BITS)) + 0.5) / 2.0**RANDOM_BITS


def uniform_by_fours(index, key):
    """Indices 4i to 4i + 3 have the halves of two words, lower halves first: the hash of 4i, and one that it makes."""
    index = index.astype(np.uint32)
    first = hash32(index - index % 4, key)
    second = first * np.uint32(0x2C1B3C6D)
    words = np.stack([first, second ^ (second >> np.uint32(16))])
    halves = np.stack([words[0] % 2**16, words[0] // 2**16, words[1] % 2**16, words[1] // 2**16])
    return (np.choose(index % 4, halves) + 0.5) / 2.0**RANDOM_BITS


def splitmix64(key):
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    mask = 2**64 - 1
    key = (key + 0x9E3779B97F4A7C15) & mask
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & mask
    key = (key ^ key >> 27) * 0x94D049BB133111EB & mask
    return key ^ key >> 31


# --- scales -----------------------------------------------------------------------------------------------------------


def significand_bits(element):
    """Binary digits after the leading one of a format's largest value."""
    if element.startswith("int"):
        return int(element[3:]) - 2  # 1.11..1 * 2^(bits - 2)
    return 0 if element == "ternary" else int(element[3])


def power_of_two_scale(largest, element, rounding):
    """E8M0: the power of two for a block whose largest magnitude is this, by the words of each rule."""
    if largest == 0:
        return 2.0**-127
    largest, top = float(largest), float(magnitudes(element)[-1])
    exponent, top_exponent = math.frexp(largest)[1] - 1, math.frexp(top)[1] - 1  # floor(log2)
    if rounding == "ceil" and largest > 2.0**exponent:
        exponent += 1
    if rounding == "even":
        digits = significand_bits(element)
        if np.rint(largest / 2.0**exponent * 2**digits) == 2 ** (digits + 1):
            exponent += 1
    scale = exponent - top_exponent
    if rounding == "rceil":
        scale = next(k for k in range(exponent - top_exponent - 1, 400) if largest <= top * 2.0**k)
    return 2.0 ** min(max(scale, -127), 127)


def statistic(block, scale):
    """What the scale of a block is made from; of its elements alone, for nothing pads them."""
    if scale.statistic == "absmean":
        return np.float32(math.fsum(np.abs(block).ravel().tolist()) / block.size)
    if scale.statistic == "minmax":
        low, high = ends(block)
        return high - low
    return np.abs(block).max()


def ends(block):
    """Least and largest element, with 0 in between; as far apart as float32 reaches, at most."""
    reach = FLOAT32_MAX / np.float32(2)
    return np.clip(block.min(), -reach, np.float32(0)), np.clip(block.max(), np.float32(0), reach)


def levels(element):
    """Steps from the least to the largest code of an integer with a zero point."""
    return 2 ** int(element[3:]) - 1


def zero_point(block, factor, scale, element):
    """The code of 0 where codes count from the least element; 0 where they do not."""
    if scale.statistic != "minmax":
        return np.float32(0)
    return np.clip(np.rint(-ends(block)[0] * np.float32(scale.factor) * factor), 0, levels(element))


def scale_and_factor(block, amount, encode, decode, element, scale):
    """The scale of a block whose statistic this is, and what its elements are multiplied by."""
    one, top = np.float32(1), np.float32(magnitudes(element)[-1])
    if not (np.isfinite(amount) and np.isfinite(block).all()):
        return np.float32(np.nan), np.float32(np.nan)
    if scale.format == "fp32":
        wanted = top * np.float32(2.0**-scale.margin)
        if scale.statistic != "absmax":
            wanted = one if scale.statistic == "absmean" else np.float32(levels(element))
        amount = np.maximum(amount, np.float32(scale.epsilon)) * np.float32(scale.factor)
        factor = np.clip(wanted / amount, LEAST_INVERTIBLE, FLOAT32_MAX) if amount > 0 else one
        if scale.rounding == "power_of_two":
            factor = np.float32(2.0 ** max(math.frexp(factor)[1] - 1, -127))
        return one / factor, factor
    if scale.format == "e8m0":
        found = np.float32(power_of_two_scale(amount * encode, element, scale.rounding))
        return found, encode_factor(found, decode)
    limit = np.float32(magnitudes(scale.format)[-1])
    if scale.format in WIDE:
        found = np.float32(nearest(np.minimum(amount / top * encode, limit), scale.format))
        if scale.format == "fp16" and amount > 0:
            found = np.maximum(found, np.float32(2.0**-14))  # its smallest normal number
        return found, encode_factor(found, decode)
    rounded = {"nearest": nearest, "up": up}[scale.rounding]
    if scale.four_over_six is None:
        found = np.float32(rounded(np.minimum(amount * (encode * (one / top)), limit), scale.format))
        return found, encode_factor(found, decode)
    wanted = amount / top * encode
    choices = [np.float32(rounded(np.minimum(wanted * np.float32(m), limit), scale.format)) for m in (1, 1.5)]
    errors = []
    for choice in choices:
        codes = nearest(block * encode_factor(choice, decode), element).astype(np.float32)
        difference = np.abs(codes * (choice * decode) - block).astype(np.float64)
        errors.append((difference**2 if scale.four_over_six == "mse" else difference).sum())
    found = choices[1] if errors[1] < errors[0] else choices[0]
    return found, encode_factor(found, decode)


def encode_factor(scale, decode):
    return np.minimum(np.float32(1) / (scale * decode), FLOAT32_MAX)


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """``values`` are those of the codes; the tensor is ``values * (scales * decode)``. All float32, but ``scaled``."""

    scaled: np.ndarray  # [R, C] what was rounded, to values
    values: np.ndarray  # [R, C]
    scales: np.ndarray  # [ceil(R / k1), ceil(C / k2)]
    spread: np.ndarray  # [R, C] the scale of each element
    zeros: np.ndarray  # the shape of scales: zero points
    spread_zeros: np.ndarray  # [R, C] the zero point of each element
    decode: np.ndarray  # 0-d, or [R, C]
    cast: Any

    @property
    def dequantized(self):
        with np.errstate(all="ignore"):
            return self.values * (self.spread * self.decode)

    @property
    def clipped(self):
        """``scaled`` within the values that there are, float64."""
        least = largest = magnitudes(self.cast.element)[-1]
        if self.cast.scale.statistic == "minmax":
            least, largest = self.spread_zeros, levels(self.cast.element) - self.spread_zeros
        with np.errstate(invalid="ignore"):  # signaling NaNs
            return np.clip(self.scaled.astype(np.float64), -least, largest)

    @property
    def lower(self):
        """The largest value that is not above each element, float64."""
        return neighbors(self.clipped, self.grid)[0]

    @property
    def upper(self):
        """The smallest value that is not below each element, float64."""
        return neighbors(self.clipped, self.grid)[1]

    @property
    def grid(self):
        """The format that holds the values: those of a zero point reach from it to either side."""
        element = self.cast.element
        return f"int{int(element[3:]) + 1}" if self.cast.scale.statistic == "minmax" else element


def quantize_matrix(x, cast, tile, *, amax=None, key=None):
    """Quantizes ``x`` (float32 ``[R, C]``) tile by tile; stochastically if there is a key."""
    scale, one, top = cast.scale, np.float32(1), magnitudes(cast.element)[-1]
    (rows, columns), (k1, k2) = x.shape, tile
    padded_columns = -(-columns // k2) * k2
    scaled, values, spread, spread_zeros = (np.zeros((rows, columns), np.float32) for _ in range(4))
    scales, zeros = (np.zeros((-(-rows // k1), -(-columns // k2)), np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        encode = np.ones_like(x)  # alike for the elements of a block
        if scale.two_level:
            largest_scale = scale.top or (1.0 if scale.format in ("e8m0", "bf16") else magnitudes(scale.format)[-1])
            if scale.four_over_six and not scale.top:
                largest_scale = max(2.0**k for k in range(-20, 128) if 1.5 * 2.0**k <= largest_scale)
            along = None if scale.two_level is True else int(k2 > 1)
            largest = np.abs(x).max(axis=along, initial=0, keepdims=True) if amax is None else np.float32([[amax]])
            wanted = np.minimum(np.float32(largest_scale * top) / largest, FLOAT32_MAX)
            encode = np.where(np.isfinite(largest) & (largest > 0), wanted, one) + np.zeros_like(x)
        decode = one / (encode * np.float32(scale.prescale))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * k1, (i + 1) * k1), slice(j * k2, (j + 1) * k2)
                given = amax is not None and scale.block == "tensor"
                amount = np.float32(amax) if given else statistic(x[at], scale)
                of_tile = encode[at].flat[0], decode[at].flat[0]
                scales[i, j], factor = scale_and_factor(x[at], amount, *of_tile, cast.element, scale)
                zeros[i, j] = zero_point(x[at], factor, scale, cast.element)
                spread[at], scaled[at], spread_zeros[at] = scales[i, j], x[at] * factor, zeros[i, j]
        result = Result(scaled, values, scales, spread, zeros, spread_zeros, decode, cast)
        if key is not None:
            index = np.arange(rows)[:, None] * padded_columns + np.arange(columns)
            lower, upper = result.lower, result.upper
            goes_up = result.clipped - lower > (upper - lower) * (1 - uniform_by_fours(index, key))
            values[:] = np.where(np.isnan(scaled), np.nan, np.where(goes_up, upper, lower))
        elif scale.statistic == "minmax":  # Jacob et al., equation 1: codes are unsigned, and 0 has the code z
            codes = np.clip(np.rint(scaled) + spread_zeros, 0, levels(cast.element))
            values[:] = codes - spread_zeros
        else:
            values[:] = nearest(scaled, cast.element)
    return result


def quantize(x, cast, dim=-1, key=None, amax=None, *, field):
    """One field of :class:`Result` for a tensor of any shape and a ``Cast``, as float32; blocks lie along ``dim``."""
    block = cast.scale.block
    columns = x.dim() == 2 and dim in (0, -2)
    if isinstance(block, tuple) or x.dim() == 2:
        matrix = x
    else:
        moved = x.movedim(dim, -1)
        matrix = moved.reshape(-1, moved.shape[-1])
    side = matrix.shape[0 if columns else 1] if block == "row" else block
    tile = (side, 1) if columns else (1, side)
    if isinstance(block, tuple):
        tile = block
    if block == "tensor":
        tile = tuple(matrix.shape)
    result = quantize_matrix(
        matrix.detach().float().numpy(), cast, tile, amax=amax, key=key if cast.rounding == "stochastic" else None
    )
    found = torch.from_numpy(getattr(result, field))
    if field in ("scales", "zeros") and block == "tensor":
        return found.reshape([1] * x.dim())
    return found if x.dim() == 2 else found.reshape(*moved.shape[:-1], found.shape[-1]).movedim(-1, dim)
