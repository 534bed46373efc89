"""Rounding to a grid, and the random bits of stochastic rounding.

Both roundings are one addition. With ``step`` the spacing of the grid at v, ``M = 1.5 * 2^23 * step`` is so large that
a float32 sum v + M keeps no digit below ``step``, so

    nearest(v)    = (v + M) - M                            ties to the even multiple of step
    stochastic(v) = nearest(v + (u - 1/2) * step)          u uniform in (0, 1)

The first is exact, signed and free of bit casts, which compilers turn into vector code. The second moves v by less
than half a step either way: it ends on the upper neighbor with probability (v - lower) / step, and a v on the grid
stays where it is. u has 16 random bits and half a unit (u = (r + 1/2) / 2^16), hence no bias towards zero. More bits
would not survive the addition: float32 holds 127 in steps of 2^-17, and a sum rounded to the middle between two values
ends on the even one, which may lie beyond the largest.

Random bits are a pure function of (key, element index): no generator, no state, the same on every device.
"""

import torch
from torch import Tensor

from lightning_lowbit.formats import Format

# A chain of comparisons finds the binade of v without bit casts, which compilers do not turn into vector code. Formats
# with more binades than this take another way.
_MAX_CHAIN = 8


def grid_step(magnitude: Tensor, format: Format) -> Tensor:
    """Spacing of ``format`` at each magnitude.

    Args:
        magnitude: float32, any shape, in [0, format.max].

    Returns:
        float32 powers of two, same shape.
    """
    smallest = 2.0 ** (format.min_exponent - format.mantissa_bits)
    binades = range(format.min_exponent + 1, format.max_exponent + 1)
    if len(binades) <= _MAX_CHAIN:
        step = torch.full_like(magnitude, smallest)
        for exponent in binades:
            step = torch.where(magnitude >= 2.0**exponent, 2.0 ** (exponent - format.mantissa_bits), step)
        return step
    magnitude = magnitude.clamp(min=2.0**format.min_exponent)
    if magnitude.device.type == "cpu":
        # Of a product with 2^23 + 1 the last place is the leading one of the magnitude, and 2^-24 of it is what this
        # difference leaves ("unit in the first place": Rump, Ogita, Oishi, Accurate Floating-Point Summation I, 2008).
        large = magnitude * (2.0**23 + 1)
        return (large - large * (1 - 2.0**-24)) * 2.0**-format.mantissa_bits
    # A GPU's compiler would fuse that product into the difference.
    return torch.ldexp(torch.ones_like(magnitude), torch.frexp(magnitude).exponent - 1 - format.mantissa_bits)


def _to_multiple(value: Tensor, step: Tensor) -> Tensor:
    magic = step * (1.5 * 2.0**23)
    return (value + magic) - magic


def round_nearest(value: Tensor, format: Format) -> Tensor:
    """Nearest value of ``format``, ties to the even code, finite values saturating, NaN kept.

    Args:
        value: float32, any shape.

    Returns:
        float32 values on the grid, same shape. Infinities become +-max: block scales, not elements, carry overflow.
    """
    value = value.clamp(-format.max, format.max)
    # The CPU's own conversion to FP8 is several times slower than the arithmetic below.
    if format.dtype is not None and (value.device.type != "cpu" or format.encoding == "unsigned"):
        return value.to(format.dtype).float()
    step = grid_step(value.abs(), format)
    if format.mantissa_bits == 0:
        # One significant digit: between 2^k and 2^(k+1) the even multiple is always the upper one, the even code is
        # not. Where 2^k has the even code, move the tie below the middle.
        odd_binade = torch.ones_like(step, dtype=torch.bool)
        for exponent in range(format.min_exponent + 1, format.max_exponent + 1, 2):
            odd_binade &= step != 2.0**exponent
        tie = (value.abs() == 1.5 * step) & ~odd_binade
        value = torch.where(tie, value * 0.75, value)
    return _to_multiple(value, step)


def round_up(value: Tensor, format: Format) -> Tensor:
    """Smallest value of ``format`` that is not below ``value`` (float32, >= 0, any shape); above max, max."""
    nearest = round_nearest(value, format)
    above = (nearest + grid_step(nearest, format)).clamp(max=format.max)
    return torch.where(nearest < value, above, nearest)


def round_stochastic(value: Tensor, format: Format, draws: Tensor) -> Tensor:
    """One of the two neighbors of each value, unbiased inside the range, saturating outside, NaN kept.

    Args:
        value: float32, any shape.
        draws: float32, same shape, in (0, 1); from :func:`uniform`.

    Returns:
        float32 values on the grid, same shape.
    """
    value = value.clamp(-format.max, format.max)
    step = grid_step(value.abs(), format)
    return _to_multiple(value + (draws - 0.5) * step, step)


# --- random bits ------------------------------------------------------------------------------------------------------


def int32(number: int) -> int:
    """An integer as int32 arithmetic, which wraps, holds it."""
    return (number + 2**31) % 2**32 - 2**31


# Multipliers of a 3-multiply integer hash: the golden ratio times 2^32, and the last two rounds of "lowbias32"
# (C. Wellons, hash-prospector). Two multiplications are not enough: consecutive keys then correlate strongly.
_MULTIPLIERS = tuple(int32(number) for number in (0x9E3779B1, 0x21F0AAAD, 0x735A2D97))


def uniform(index: Tensor, key: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) with 16 random bits, a pure function of key and index.

    Keys should come from :func:`mix_key` or be as random: with a small number as the key, the bits of the element at
    the index of that number are 0.

    Args:
        index: int32 element indices, any shape (beyond 2^32 elements they repeat).
        key: int64, 0-d.

    Returns:
        float32 of the shape of ``index``.
    """
    low = key.to(torch.int32)
    high = (key >> 32).to(torch.int32)
    bits = (index ^ low) * _MULTIPLIERS[0]
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) + high
    bits = bits * _MULTIPLIERS[1]
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _MULTIPLIERS[2]
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    return ((bits >> 16) & 0xFFFF).to(torch.float32) * 2.0**-16 + 2.0**-17


def mix_key(key: Tensor) -> Tensor:
    """splitmix64's finalizer: spreads neighboring int64 keys over all 64 bits. Any shape; wraps as int64 does."""
    key = key + _int64(0x9E3779B97F4A7C15)
    key = (key ^ ((key >> 30) & (2**34 - 1))) * _int64(0xBF58476D1CE4E5B9)
    key = (key ^ ((key >> 27) & (2**37 - 1))) * _int64(0x94D049BB133111EB)
    return key ^ ((key >> 31) & (2**33 - 1))


def _int64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
