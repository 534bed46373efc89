"""Scales of blocks, and elements rounded in units of them, bit for bit those of quant/scales.py and scaling.py.

``CAST`` is a named tuple of :mod:`lightning_lowbit.kernels.numbers`, in the symbols of quant/scaling.py. A
function takes none of its fields as an argument, which Triton 3.6 does not compile, but a local constant: ``ELEMENTS``.
"""

import triton
import triton.language as tl

from lightning_lowbit.kernels.gpu.device import (
    at_least,
    at_most,
    bits_of,
    drawn_of,
    e4m3_rounded,
    float_of,
    fp8_codes,
    magnitude_bits,
    mixed_halves,
    narrow,
    random_bits,
    round_nearest,
    round_stochastic,
    round_up,
)

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_FLOAT32_TINY = tl.constexpr(2.0**-126)
_LEAST_BITS = tl.constexpr(0x00200001)  # of the smallest x for which 1/x is a finite float32
_MAX_BITS = tl.constexpr(0x7F7FFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def tensor_scales(amax, CAST: tl.constexpr):
    """S and the factor of decoding, 1/S or 1/p, from a pointer to the amax of the tensor."""
    if CAST.two_level:
        return levels_of(tl.load(amax), CAST)
    else:
        one = tl.full((), 1.0, tl.float32)
        return one, tl.div_rn(one, one * CAST.prescale)


@triton.jit
def levels_of(measured, CAST: tl.constexpr):
    """S and 1/S from the amaxes of tensors or rows."""
    scale = at_most(at_least(tl.div_rn(CAST.top, measured), _FLOAT32_TINY), _FLOAT32_MAX)
    bits = bits_of(measured)
    scale = tl.where((bits > 0) & (bits < _INFINITY_BITS), scale, 1.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _round_scale(wanted, CAST: tl.constexpr):
    STORAGE: tl.constexpr = CAST.storage
    if CAST.up:
        return round_up(wanted, STORAGE)
    elif CAST.capability >= 89 and STORAGE.max == 448.0:
        return e4m3_rounded(wanted)
    else:
        return round_nearest(wanted, STORAGE)


@triton.jit
def _e8m0(wanted, CAST: tl.constexpr):
    """Rounds non-negative values to 2^k; powers below 2^-127 become 2^-127."""
    is_small = wanted < 2.0**-100  # subnormal numbers have no leading one
    bits = bits_of(tl.where(is_small, wanted * 2.0**64, wanted))
    exponent = (bits >> 23) - tl.where(is_small, 64, 0) - CAST.exponent
    if CAST.threshold < 2**23:
        exponent += ((bits & 0x7FFFFF) >= CAST.threshold).to(tl.int32)
    exponent = tl.minimum(tl.maximum(tl.where(wanted > 0, exponent, 0), 0), 254)
    return float_of(tl.maximum(exponent << 23, 0x400000))


@triton.jit
def _wanted(amount, encode, CAST: tl.constexpr):
    """Computes s of ExMy formats before it is rounded."""
    if CAST.factor != 1.0:
        amount = amount * CAST.factor
    return amount * (encode * tl.div_rn(1.0, CAST.element_max))


@triton.jit
def _round_drawn(wanted, index, key, CAST: tl.constexpr):
    """Rounds scales stochastically, by random bits (``uniform`` of quant/rounding.py) of the first element of a block,
    whose ``index`` is uint32."""
    STORAGE: tl.constexpr = CAST.storage
    CAPABILITY: tl.constexpr = CAST.capability
    low, high = mixed_halves(key, 0x5363616C)
    word = random_bits(index, low, high)
    return round_stochastic(wanted, drawn_of(word, word == word, STORAGE, CAPABILITY), STORAGE)


@triton.jit
def scales_of(amount, encode, CAST: tl.constexpr):
    """Computes s (e of fp32 scales) from the statistics of blocks, rounded to nearest."""
    STORAGE: tl.constexpr = CAST.storage
    if CAST.scale == "fp32":
        denominator = at_least(amount, CAST.epsilon) * CAST.factor
        bits = bits_of(tl.div_rn(CAST.size, denominator))
        bits = tl.minimum(tl.maximum(bits, _LEAST_BITS), _MAX_BITS)
        if CAST.power_of_two:
            bits = tl.maximum(bits & _INFINITY_BITS, 0x400000)
        scales = tl.where(denominator > 0, float_of(bits), 1.0)
    elif CAST.scale == "e8m0":
        scales = _e8m0(at_most(amount * encode, _FLOAT32_MAX), CAST)
    elif CAST.scale == "bf16":
        bits = bits_of(at_most(tl.div_rn(amount, CAST.element_max) * encode, STORAGE.max))
        scales = float_of((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)
    elif CAST.scale == "fp16":
        scales = round_nearest(tl.div_rn(amount, CAST.element_max) * encode, STORAGE)
        scales = tl.where(amount > 0, at_least(scales, 2.0**-14), scales)
    else:
        scales = _round_scale(_wanted(amount, encode, CAST), CAST)
    return tl.where(magnitude_bits(amount) < _INFINITY_BITS, scales, float("nan"))


@triton.jit
def encode_factor(scales, decode, CAST: tl.constexpr):
    if CAST.scale == "fp32":
        return scales
    else:
        return at_most(tl.div_rn(1.0, scales * decode), _FLOAT32_MAX)


@triton.jit
def stored_scales(scales, CAST: tl.constexpr):
    if CAST.scale == "fp32":
        return tl.div_rn(1.0, scales)
    else:
        return scales


@triton.jit
def span_of(low, high, peak):
    """Clamps ``low``, and computes the span to ``high``; magnitudes in blocks are at most ``peak`` (its bits)."""
    low = tl.maximum(tl.minimum(low, 0.0), -_FLOAT32_MAX / 2)
    high = tl.minimum(tl.maximum(high, 0.0), _FLOAT32_MAX / 2)
    return low, tl.where(peak < _INFINITY_BITS, high - low, float("nan"))


@triton.jit
def zero_points(low, scales, CAST: tl.constexpr):
    ELEMENTS: tl.constexpr = CAST.elements
    return round_nearest(-low * CAST.factor * scales, ELEMENTS)


# --- blocks -----------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_in_halves(values):
    """Sums over the rows of each block, then its columns: the first half plus the second one, again and again."""
    if values.shape[1] > 1:
        halves = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2, values.shape[2], values.shape[3]))
        return _sum_in_halves(tl.sum(halves, 1))
    elif values.shape[3] > 1:
        halves = tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2], 2, values.shape[3] // 2))
        return _sum_in_halves(tl.sum(halves, 3))
    else:
        return values


@triton.jit
def _error(elements, scales, encode, decode, CAST: tl.constexpr):
    ELEMENTS: tl.constexpr = CAST.elements
    difference = round_nearest(elements * encode, ELEMENTS, False) * (scales * decode) - elements
    if CAST.four_over_six == "mse":
        return difference * difference
    else:
        return tl.abs(difference)


@triton.jit
def block_scales(elements, mask, encode, decode, index, key, CAST: tl.constexpr):
    """Computes scales of blocks along axes 1 and 3 of four, factors of elements, and zero points. ``elements`` are 0
    outside of ``mask``. Stochastic scales need ``index`` and ``key``, as :func:`_round_drawn`."""
    doubled = bits_of(elements).to(tl.uint32, bitcast=True) << 1  # without a sign; NaN is the largest
    peaks = (tl.max(tl.max(doubled, 3, keep_dims=True), 1, keep_dims=True) >> 1).to(tl.int32, bitcast=True)
    amax = float_of(peaks)
    zeros = 0.0
    if CAST.four_over_six != "":
        amount = amax * CAST.factor if CAST.factor != 1.0 else amax
        wanted = tl.div_rn(amount, CAST.element_max) * encode
        six = _round_scale(wanted, CAST)
        four = _round_scale(wanted * 1.5, CAST)
        by_six = encode_factor(six, decode, CAST)
        by_four = encode_factor(four, decode, CAST)
        gain = _error(elements, four, by_four, decode, CAST) - _error(elements, six, by_six, decode, CAST)
        is_four = _sum_in_halves(gain) < 0
        is_finite = peaks < _INFINITY_BITS
        scales = tl.where(is_finite, tl.where(is_four, four, six), float("nan"))
        factor = tl.where(is_finite, tl.where(is_four, by_four, by_six), float("nan"))
    else:
        if CAST.statistic == "absmean":
            total = tl.sum(tl.sum(tl.abs(elements).to(tl.float64), 3, keep_dims=True), 1, keep_dims=True)
            count = tl.sum(tl.sum(mask.to(tl.int32), 3, keep_dims=True), 1, keep_dims=True)
            scales = scales_of((total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32), encode, CAST)
        elif CAST.statistic == "minmax":
            least = tl.min(tl.min(elements, 3, keep_dims=True), 1, keep_dims=True)
            most = tl.max(tl.max(elements, 3, keep_dims=True), 1, keep_dims=True)
            least, span = span_of(least, most, peaks)
            scales = scales_of(span, encode, CAST)
            zeros = zero_points(least, scales, CAST)
        elif CAST.drawn and CAST.group == 0:
            scales = _round_drawn(_wanted(amax, encode, CAST), index, key, CAST)
            scales = tl.where(peaks < _INFINITY_BITS, scales, float("nan"))
        else:
            scales = scales_of(amax, encode, CAST)
        factor = encode_factor(scales, decode, CAST)
    if CAST.group > 0:
        scales = tl.where(scales == 0, 1.0, scales)
        factor = encode_factor(scales, decode, CAST)
        scales = _corrected(elements, scales, factor, index, key, CAST)
    return scales, factor, zeros


@triton.jit
def _corrected(elements, scales, factor, index, key, CAST: tl.constexpr):
    """Scales for decoding, with which the errors of ``CAST.group`` blocks cancel."""
    ELEMENTS: tl.constexpr = CAST.elements
    y, square = elements * factor, scales * scales
    norm = _group_sums(_sum_in_halves(y * y * square), elements.shape[3] > 1, CAST)
    product = _group_sums(_sum_in_halves(y * round_nearest(y, ELEMENTS) * square), elements.shape[3] > 1, CAST)
    wanted = scales * tl.where(product == 0, 1.0, tl.div_rn(norm, product))
    return _round_drawn(wanted, index, key, CAST)


@triton.jit
def _group_sums(values, IN_ROWS: tl.constexpr, CAST: tl.constexpr):
    """Sums over groups of blocks, for each block of the group."""
    down: tl.constexpr = values.shape[0]
    across: tl.constexpr = values.shape[2]
    if IN_ROWS:
        shape: tl.constexpr = (down, 1, across // CAST.group, CAST.group)
    else:
        shape: tl.constexpr = (down // CAST.group, CAST.group, across, 1)
    sums = tl.broadcast_to(_sum_in_halves(tl.reshape(values, shape)), shape)
    return tl.reshape(sums, (down, 1, across, 1))


# --- elements ---------------------------------------------------------------------------------------------------------


@triton.jit
def round_elements(x, scales, factor, zeros, random, CAST: tl.constexpr):
    """Rounds float32 elements times ``factor`` to codes, or to codes times block scales, by ``random`` bits of each."""
    ELEMENTS: tl.constexpr = CAST.elements
    if CAST.is_tensor:
        x = x + (x - x)  # makes infinities NaN: an amax from outside does not show them
    values = x * factor
    if CAST.statistic == "minmax":
        values = at_most(at_least(values, -zeros), CAST.elements.max - zeros)
    KEEPS_NAN: tl.constexpr = not CAST.per_block
    if CAST.stochastic:
        codes = round_stochastic(values, random, ELEMENTS, KEEPS_NAN)
    else:
        codes = round_nearest(values, ELEMENTS, KEEPS_NAN)
    if CAST.scaled:
        return codes * stored_scales(scales, CAST)
    else:
        return codes


@triton.jit
def elements_in(x, scales, factor, zeros, random, CAST: tl.constexpr, DTYPE: tl.constexpr):
    """Does :func:`round_elements` to a dtype; to FP8 by the instruction of a GPU that has one."""
    E5M2: tl.constexpr = DTYPE == tl.float8e5
    if CAST.capability >= 89 and (E5M2 or DTYPE == tl.float8e4nv) and not CAST.stochastic:
        if CAST.is_tensor:
            x = x + (x - x)
        return fp8_codes(x * factor, E5M2)
    else:
        return narrow(round_elements(x, scales, factor, zeros, random, CAST), DTYPE)
