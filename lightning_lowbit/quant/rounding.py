"""Rounding to a grid, and the random bits of stochastic rounding, a pure function of (key, element index).

Both roundings are one addition. With ``step`` the spacing of the grid at v, ``M = 1.5 * 2^23 * step`` is so large that
a float32 sum v + M keeps no digit below ``step``, so

    nearest(v)    = (v + M) - M                            ties to the even multiple of step
    stochastic(v) = nearest(v + (u - 1/2) * step)          u uniform in (0, 1)

The second gives the upper neighbor with probability (v - lower) / step, and keeps values on the grid. u has 16 random
bits r, as (r + 1/2) / 2^16; the half unit avoids a bias towards zero. More bits would not survive the addition: float32
holds 127 in steps of 2^-17, and a tie would round to the even value, which may lie beyond the largest one.
"""

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import lacks
from lightning_lowbit.formats import Format

# A chain of comparisons finds the binade of v without bit casts, which compilers do not vectorize. Formats with more
# binades than this use other arithmetic.
_MAX_CHAIN = 8

# The remedy where a key is missing.
KEYS = (
    "In a layer, keys are set by the plugin, as in Trainer(plugins=[FP4Precision()]), or by lightning_lowbit.nn."
    "LayerKeys in a loop of your own."
)


def grid_step(magnitude: Tensor, format: Format) -> Tensor:
    """Spacing of ``format`` at float32 magnitudes in [0, format.max]: float32 powers of two, the same shape."""
    smallest = 2.0 ** (format.min_exponent - format.mantissa_bits)
    binades = range(format.min_exponent + 1, format.max_exponent + 1)
    if len(binades) <= _MAX_CHAIN:
        step = torch.full_like(magnitude, smallest)
        for exponent in binades:
            step = torch.where(magnitude >= 2.0**exponent, 2.0 ** (exponent - format.mantissa_bits), step)
        return step
    magnitude = magnitude.clamp(min=2.0**format.min_exponent)
    if magnitude.device.type == "cpu":
        # "Unit in the first place" (Rump, Ogita, Oishi, Accurate Floating-Point Summation I, 2008): the last place of
        # the product with 2^23 + 1 is the leading power of two of the magnitude, which the difference leaves.
        large = magnitude * (2.0**23 + 1)
        return (large - large * (1 - 2.0**-24)) * 2.0**-format.mantissa_bits
    return _step_by_bits(magnitude, format)  # on GPUs the compiler would fuse the product above into the difference


def _step_by_bits(magnitude: Tensor, format: Format) -> Tensor:
    """Spacing at normal magnitudes: the exponent's bits alone are the leading power of two."""
    return ((magnitude.view(torch.int32) & 0x7F800000) - (format.mantissa_bits << 23)).view(torch.float32)


def _to_multiple(value: Tensor, step: Tensor) -> Tensor:
    magic = step * (1.5 * 2.0**23)
    return (value + magic) - magic


def round_nearest(value: Tensor, format: Format) -> Tensor:
    """Nearest value of ``format``, ties to the even code: float32, the shape of ``value``. Finite values saturate and
    NaN stays. Infinities become ±max, because block scales carry overflow, not elements."""
    value = value.clamp(-format.max, format.max)
    if format.dtype == torch.bfloat16:  # the compiler would drop a conversion and back, and the sums below overflow
        bits = value.view(torch.int32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    # The CPU's own conversion to FP8 is several times slower than the arithmetic below.
    is_faster = value.device.type != "cpu" or format.encoding == "unsigned"
    if is_faster and format.dtype not in (None, torch.float16) and not lacks(value.device, format.dtype):
        return _converted(value, format)
    step = grid_step(value.abs(), format)
    if format.mantissa_bits == 0:
        # With one significant digit, the even multiple between 2^k and 2^(k+1) is always the upper one, but the even
        # code is not. Where 2^k has the even code, move the tie below the middle.
        odd_binade = torch.ones_like(step, dtype=torch.bool)
        for exponent in range(format.min_exponent + 1, format.max_exponent + 1, 2):
            odd_binade &= step != 2.0**exponent
        tie = (value.abs() == 1.5 * step) & ~odd_binade
        value = torch.where(tie, value * 0.75, value)
    return _to_multiple(value, step)


def _converted(value: Tensor, format: Format) -> Tensor:
    """Nearest value by torch's conversion, with +0 for -0, as the sums give."""
    rounded = value.to(format.dtype).float()
    return torch.where(rounded == 0, 0.0, rounded)


def round_up(value: Tensor, format: Format) -> Tensor:
    """Smallest value of ``format`` that is not below ``value`` (float32, >= 0, any shape); above max, max."""
    nearest = round_nearest(value, format)
    above = (nearest + grid_step(nearest, format)).clamp(max=format.max)
    return torch.where(nearest < value, above, nearest)


def round_stochastic(value: Tensor, format: Format, draws: Tensor) -> Tensor:
    """Rounds each value to one of its two neighbors, unbiased inside the range and saturating outside; NaN stays.
    ``value`` and ``draws``, in (0, 1) from :func:`uniform`, are float32 of one shape, and so is the result."""
    value = value.clamp(-format.max, format.max)
    step = grid_step(value.abs(), format)
    return _to_multiple(value + (draws - 0.5) * step, step)


def int32(number: int) -> int:
    """Wraps an integer as int32 arithmetic does."""
    return (number + 2**31) % 2**32 - 2**31


# Multipliers of an integer hash: the golden ratio times 2^32, the last two rounds of "lowbias32" (C. Wellons,
# hash-prospector), and a round for the second word. With two multiplications consecutive keys correlate strongly.
_MULTIPLIERS = tuple(int32(number) for number in (0x9E3779B1, 0x21F0AAAD, 0x735A2D97, 0x2C1B3C6D))


def uniform(index: Tensor, key: Tensor) -> Tensor:
    """Uniform float32 numbers in (0, 1) with 16 of :func:`random_bits`, of the same arguments."""
    return _centered(random_bits(index, key) >> 16)


def uniform_by_fours(index: Tensor, key: Tensor) -> Tensor:
    """As :func:`uniform`, for less: the indices 4i to 4i + 3 share the hash of 4i and a second word that it makes. Each
    has 16 bits: the lower and the upper half of the first word, then those of the second."""
    first = random_bits(index & -4, key)
    second = first * _MULTIPLIERS[3]
    second = second ^ ((second >> 16) & 0xFFFF)
    word = torch.where((index & 2) == 0, first, second)
    return _centered(torch.where((index & 1) == 0, word, word >> 16))


def random_bits(index: Tensor, key: Tensor) -> Tensor:
    """Returns 32 random bits as int32, a pure function of an int32 index (any shape) and an int64 key (0-d). Beyond
    2^32 elements they repeat. Keys should be as random as those of :func:`mix_key`: with a small one, the bits of the
    element whose index equals the key are 0."""
    low = key.to(torch.int32)
    high = (key >> 32).to(torch.int32)
    bits = (index ^ low) * _MULTIPLIERS[0]
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) + high
    bits = bits * _MULTIPLIERS[1]
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _MULTIPLIERS[2]
    return bits ^ ((bits >> 15) & 0x1FFFF)


def _centered(bits: Tensor) -> Tensor:
    """Numbers (r + 1/2) / 2^16, float32, of the lower 16 bits r."""
    return (bits & 0xFFFF).to(torch.float32) * 2.0**-16 + 2.0**-17


def mix_key(key: Tensor) -> Tensor:
    """Spreads neighboring int64 keys over all 64 bits (splitmix64's finalizer). Any shape; wraps as int64 does."""
    key = key + _int64(0x9E3779B97F4A7C15)
    key = (key ^ ((key >> 30) & (2**34 - 1))) * _int64(0xBF58476D1CE4E5B9)
    key = (key ^ ((key >> 27) & (2**37 - 1))) * _int64(0x94D049BB133111EB)
    return key ^ ((key >> 31) & (2**33 - 1))


def _int64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
