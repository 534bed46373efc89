"""Functions of the kernels: rounding, scales and random bits, bit for bit those of quant/rounding.py and scaling.py.

Binades are found in the bits of a float, maxima of magnitudes are taken of their bits, where NaN is the largest. Every
division is IEEE's; kernels are launched with ``enable_fp_fusion=False``, so that no product is fused into a sum.
``CAST`` and ``GRID`` are the named tuples of :mod:`lightning_lowbit.kernels.gpu.constants`.
"""

import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_FLOAT32_TINY = tl.constexpr(2.0**-126)
_LEAST_BITS = tl.constexpr(0x00200001)  # of the smallest x for which 1/x is a finite float32
_MAX_BITS = tl.constexpr(0x7F7FFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(value):
    return bits_of(value) & 0x7FFFFFFF


@triton.jit
def at_most(value, limit):
    """As ``Tensor.clamp``: NaN stays."""
    return tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_least(value, limit):
    return tl.maximum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widen(x):
    """float32 from float32, float16, bfloat16 or integers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# --- rounding ---------------------------------------------------------------------------------------------------------


@triton.jit
def _binade(value, GRID: tl.constexpr):
    """Bits of the largest power of two that is at most |value|, but no less than 2^min_exponent."""
    return tl.maximum(bits_of(value) & _INFINITY_BITS, (GRID.min_exponent + 127) << 23)


@triton.jit
def grid_step(value, GRID: tl.constexpr):
    return float_of(_binade(value, GRID) - (GRID.mantissa_bits << 23))


@triton.jit
def _to_multiple(value, near, GRID: tl.constexpr):
    """``value`` to the nearest multiple of the step at ``near``."""
    if GRID.is_uniform:
        magic = 1.5 * 2.0 ** (23 + GRID.min_exponent - GRID.mantissa_bits)
        return (value + magic) - magic
    else:
        magic = float_of((_binade(near, GRID) + ((23 - GRID.mantissa_bits) << 23)) | 0x400000)
        return (value + magic) - magic


@triton.jit
def round_nearest(value, GRID: tl.constexpr):
    value = at_least(at_most(value, GRID.max), -GRID.max)
    near = value
    if GRID.mantissa_bits == 0:  # the even code is not the even multiple: see quant/rounding.py
        above = ((bits_of(value) >> 23) & 0xFF) - (GRID.min_exponent + 127)
        is_tie = ((bits_of(value) & 0x7FFFFF) == 0x400000) & (above > 0) & ((above & 1) == 1)
        value = tl.where(is_tie, value * 0.75, value)
    return _to_multiple(value, near, GRID)


@triton.jit
def round_up(value, GRID: tl.constexpr):
    nearest = round_nearest(value, GRID)
    above = at_most(nearest + grid_step(nearest, GRID), GRID.max)
    return tl.where(nearest < value, above, nearest)


@triton.jit
def round_stochastic(value, index, low, high, GRID: tl.constexpr):
    """``index`` is the element's, uint32; ``low`` and ``high`` are the halves of the key."""
    value = at_least(at_most(value, GRID.max), -GRID.max)
    offset = _centered_uniform(index, low, high)
    if GRID.is_uniform:
        step = tl.full(value.shape, 2.0 ** (GRID.min_exponent - GRID.mantissa_bits), tl.float32)
    else:
        step = grid_step(value, GRID)
    return _to_multiple(tl.fma(offset, step, value), value, GRID)  # the product is exact


@triton.jit
def _centered_uniform(index, low, high):
    """``uniform - 1/2`` of quant/rounding.py, exactly: the 16 random bits are the leading ones of a float in [1, 2)."""
    word = (index ^ low) * 0x9E3779B1
    word = (word ^ (word >> 16)) + high
    word = word * 0x21F0AAAD
    word = word ^ (word >> 15)
    word = word * 0x735A2D97
    word = word ^ (word >> 15)
    return float_of((word >> 9) & 0x7FFF80 | 0x3F800000) - (1.5 - 2.0**-17)


@triton.jit
def key_halves(key):
    """The two halves of a key (pointer to an int64), uint32."""
    word = tl.load(key).to(tl.uint64, bitcast=True)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def place_of(offset, columns):
    """Columns of the global matrix and the global index of the first element, uint32."""
    if offset is None:
        return tl.cast(columns, tl.uint32), tl.cast(0, tl.uint32)
    else:
        return tl.load(offset + 1).to(tl.uint32, bitcast=True), tl.load(offset + 2).to(tl.uint32, bitcast=True)


@triton.jit
def halves(key, CAST: tl.constexpr):
    if CAST.stochastic:
        return key_halves(key)
    else:
        return 0, 0


# --- scales -----------------------------------------------------------------------------------------------------------


@triton.jit
def tensor_scales(amax, CAST: tl.constexpr):
    """S and what decoding multiplies by, 1/S or 1/p, from a pointer to the amax of the tensor."""
    if CAST.two_level:
        measured = tl.load(amax)
        scale = at_most(at_least(tl.div_rn(CAST.top, measured), _FLOAT32_TINY), _FLOAT32_MAX)
        bits = bits_of(measured)
        scale = tl.where((bits > 0) & (bits < _INFINITY_BITS), scale, 1.0)
        return scale, tl.div_rn(1.0, scale)
    else:
        one = tl.full((), 1.0, tl.float32)
        return one, tl.div_rn(one, one * CAST.prescale)


@triton.jit
def _round_scale(wanted, CAST: tl.constexpr):
    if CAST.up:
        return round_up(wanted, CAST.storage)
    else:
        return round_nearest(wanted, CAST.storage)


@triton.jit
def _e8m0(wanted, CAST: tl.constexpr):
    """2^k for non-negative values; powers below 2^-127 become 2^-127."""
    is_small = wanted < 2.0**-100  # subnormal numbers have no leading one
    bits = bits_of(tl.where(is_small, wanted * 2.0**64, wanted))
    exponent = (bits >> 23) - tl.where(is_small, 64, 0) - CAST.exponent
    if CAST.threshold < 2**23:
        exponent += ((bits & 0x7FFFFF) >= CAST.threshold).to(tl.int32)
    exponent = tl.minimum(tl.maximum(tl.where(wanted > 0, exponent, 0), 0), 254)
    return float_of(tl.maximum(exponent << 23, 0x400000))


@triton.jit
def scales_of(amount, encode, CAST: tl.constexpr):
    """s (e of fp32 scales) from the statistics of blocks."""
    if CAST.scale == "fp32":
        denominator = at_least(amount, CAST.epsilon) * CAST.factor
        bits = bits_of(tl.div_rn(CAST.size, denominator))
        bits = tl.minimum(tl.maximum(bits, _LEAST_BITS), _MAX_BITS)
        if CAST.power_of_two:
            bits = tl.maximum(bits & _INFINITY_BITS, 0x400000)
        scales = tl.where(denominator > 0, float_of(bits), 1.0)
    elif CAST.scale == "e8m0":
        scales = _e8m0(at_most(amount * encode, _FLOAT32_MAX), CAST)
    else:
        scales = _round_scale(amount * (encode * tl.div_rn(1.0, CAST.element_max)), CAST)
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
    """``low`` clamped, and the span to ``high``, of blocks whose magnitudes are at most ``peak`` (its bits)."""
    low = tl.maximum(tl.minimum(low, 0.0), -_FLOAT32_MAX / 2)
    high = tl.minimum(tl.maximum(high, 0.0), _FLOAT32_MAX / 2)
    return low, tl.where(peak < _INFINITY_BITS, high - low, float("nan"))


@triton.jit
def zero_points(low, scales, CAST: tl.constexpr):
    return round_nearest(-low * CAST.factor * scales, CAST.elements)


# --- blocks -----------------------------------------------------------------------------------------------------------


@triton.jit
def _peaks(elements):
    """Bits of the largest magnitude in each block."""
    return tl.max(tl.max(magnitude_bits(elements), 3, keep_dims=True), 1, keep_dims=True)


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
    difference = round_nearest(elements * encode, CAST.elements) * (scales * decode) - elements
    if CAST.four_over_six == "mse":
        return difference * difference
    else:
        return tl.abs(difference)


@triton.jit
def block_scales(elements, mask, encode, decode, CAST: tl.constexpr):
    """Scales of blocks along axes 1 and 3 of four, what elements are multiplied by, and zero points. ``elements`` are 0
    outside of ``mask``."""
    peaks = tl.max(tl.max(magnitude_bits(elements), 3, keep_dims=True), 1, keep_dims=True)
    amax = float_of(peaks)
    zeros = 0.0
    if CAST.four_over_six != "":
        wanted = tl.div_rn(amax, CAST.element_max) * encode
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
        else:
            scales = scales_of(amax, encode, CAST)
        factor = encode_factor(scales, decode, CAST)
    return scales, factor, zeros


# --- elements ---------------------------------------------------------------------------------------------------------


@triton.jit
def round_elements(x, scales, factor, zeros, index, low, high, CAST: tl.constexpr):
    """Codes, or codes times block scales, of float32 elements, which are multiplied by ``factor``."""
    if CAST.is_tensor:
        x = x + (x - x)  # makes infinities NaN: an amax from outside does not show them
    values = x * factor
    if CAST.statistic == "minmax":
        values = at_most(at_least(values, -zeros), CAST.elements.max - zeros)
    if CAST.stochastic:
        codes = round_stochastic(values, index, low, high, CAST.elements)
    else:
        codes = round_nearest(values, CAST.elements)
    if CAST.scaled:
        return codes * stored_scales(scales, CAST)
    else:
        return codes


@triton.jit
def stored(values, THROUGH: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``values`` in a dtype, rounded to the dtype ``THROUGH`` on the way."""
    if THROUGH == DTYPE:
        return narrow(values, DTYPE, INTERPRETED)
    else:
        return narrow(widen(narrow(values, THROUGH, INTERPRETED)), DTYPE, INTERPRETED)


@triton.jit
def narrow(values, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``values`` in a dtype, FP8 as bytes. Triton's interpreter truncates to bfloat16, where GPUs round."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        word = values.to(tl.uint32, bitcast=True)
        word = tl.where(values == values, word + 0x7FFF + ((word >> 16) & 1), 0x7FC00000)
        return (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float8e4nv:
        return _fp8(values, 2.0**-120, 20)
    elif DTYPE == tl.float8e5:
        return _fp8(values, 2.0**-112, 21)
    elif DTYPE == tl.int8:
        return tl.where(values == values, values, 0.0).to(tl.int8)
    else:
        return values.to(DTYPE)


@triton.jit
def _fp8(values, LEAST: tl.constexpr, SHIFT: tl.constexpr):
    """Codes of values on the grid. A product with a power of two leaves the exponent of FP8 in that of float32."""
    bits = bits_of(values * LEAST)
    codes = ((bits & 0x7FFFFFFF) >> SHIFT) | ((bits >> 24) & 0x80)
    return tl.where(values == values, codes, 0x7F).to(tl.uint8)
