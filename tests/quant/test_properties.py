"""What holds for every tensor: hypothesis looks for one for which it does not.

Elements lie within 2^±10, so that no scale in float32's range over- or underflows: how scales end is tested elsewhere.
"""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from tests.quant.tensors import EXMY, casts, check_against_reference, check_stochastic, same, spread_scales
from tests.tables import deterministic

PROFILE = deterministic(25)

_numbers = st.floats(2.0**-10, 2.0**10, width=32)
_elements = st.one_of(st.just(0.0), _numbers, _numbers.map(lambda number: -number))


@st.composite
def matrices(draw):
    """Up to 6 x 40, many elements alike: ties, zero blocks, parts of blocks."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 40)))
    return torch.from_numpy(draw(arrays.arrays(np.float32, shape, elements=_elements)))


def some_casts(blocks=(4, 16, (4, 16), "row", "tensor")):
    return [cast for element in ELEMENT_FORMATS for block in blocks for cast in casts(element, block)]


def dequantized(x, cast, dim=-1, **given):
    return quantize(x, cast, dim, **given).dequantize()


def exactly_idempotent():
    """Casts whose every value is cast to itself.

    With one level of scales that are powers of two, a block's largest code gives the same scale again, or half of it
    where the codes can double. With ExMy scales that needs a largest code which does not move: among e2m1's 4 and 6
    there is nothing for a scale within 1/8 to reach, and of the two scales of 4/6 the one chosen has no error.
    """
    rules = ("floor", "ceil", "even", "rceil")
    powers = [Scale("e8m0", block, rule) for rule in rules for block in (4, (4, 16), "row")]
    powers += [Scale("fp32", block, "power_of_two") for block in (4, "row", "tensor")]
    exmy = [Scale(name, block) for name in ("e4m3", "e3m4", "e5m2") for block in (4, (4, 16), "row", "tensor")]
    exmy += [Scale("e4m3", 4, rounding) for rounding in ("nearest", "up")]
    exmy += [Scale("e4m3", 4, four_over_six=measure) for measure in ("mse", "mae")]
    casts = [Cast(element, scale) for scale in powers for element in ELEMENT_FORMATS]
    return casts + [Cast("e2m1", scale) for scale in exmy]


@PROFILE
@given(x=matrices(), cast=st.sampled_from(exactly_idempotent()), again=st.sampled_from(("nearest", "stochastic")))
def test_values_of_a_cast_are_cast_to_themselves(x, cast, again):
    """To nearest, and stochastically too: a value on the grid stays where it is."""
    once = quantize(x, cast)
    twice = dequantized(once.dequantize(), replace(cast, rounding=again), key=3)
    # An ExMy scale among the subnormals may be off by more than 1/8.
    counts = spread_scales(once) >= (2.0**cast.scale.storage.min_exponent if cast.scale.format in EXMY else 0)
    same(twice[counts], once.dequantize()[counts], f"{cast} twice")


def scale_invariant():
    """All but one-level ExMy scales, which have subnormals and an end within reach, and those with an epsilon."""
    return [
        cast
        for cast in some_casts()
        if (cast.scale.format not in (*EXMY, "fp16") or cast.scale.two_level) and not cast.scale.epsilon
    ]


@PROFILE
@given(x=matrices(), cast=st.sampled_from(scale_invariant()), power=st.integers(-30, 30), dim=st.integers(0, 1))
def test_powers_of_two_pass_through(x, cast, power, dim):
    """So a loss scale of a power of two does not change a gradient."""
    found, scaled = quantize(x, cast, dim), quantize(x * 2.0**power, cast, dim)
    same(scaled.codes, found.codes, f"codes of {cast} under 2^{power}")
    same(scaled.dequantize(), found.dequantize() * 2.0**power, f"values of {cast} under 2^{power}")


@PROFILE
@given(x=matrices(), cast=st.sampled_from(some_casts()), dim=st.integers(0, 1))
def test_signs_pass_through(x, cast, dim):
    """But to a zero point: its rounding decides which end of a block saturates, and a factor below 1 clips one end."""
    found, other = dequantized(x, cast, dim), -dequantized(-x, cast, dim)
    if cast.scale.statistic == "minmax":
        step, clipped = spread_scales(quantize(x, cast, dim)), (1 - cast.scale.factor) * x.abs()
        near = (found - other).abs() <= (step + clipped) * (1 + 1e-5)
        assert near.all(), f"{cast} of -x along {dim}: more than a step and the clipped part away"
    else:
        same(other, found, f"{cast} of -x along {dim}")


@PROFILE
@given(matrices(), st.sampled_from(some_casts()), st.integers(0, 1), st.integers(0, 5), st.integers(0, 20))
def test_padding_changes_nothing(x, cast, dim, rows, more):
    """But the mean of a block: zeros that somebody else has added are elements."""
    assume(cast.scale.statistic != "absmean")
    padded = torch.nn.functional.pad(x, (0, more, 0, rows))
    found = dequantized(padded, cast, dim)
    same(found[: len(x), : x.shape[1]], dequantized(x, cast, dim), f"{cast} along {dim}, padded by {rows} x {more}")
    assert not found[len(x) :].any(), f"{cast}: zeros became numbers"
    assert not found[:, x.shape[1] :].any(), f"{cast}: zeros became numbers"


@PROFILE
@given(x=matrices(), cast=st.sampled_from(some_casts((16, "row"))), rows=st.integers(0, 5), key=st.integers(0, 2**40))
def test_rows_to_come_do_not_change_random_bits(x, cast, rows, key):
    cast = replace(cast, rounding="stochastic")
    longer = torch.cat([x, torch.zeros(rows, x.shape[1])])
    same(dequantized(longer, cast, key=key)[: len(x)], dequantized(x, cast, key=key), f"{cast}, {rows} more rows")


@PROFILE
@given(x=matrices(), cast=st.sampled_from(some_casts()), key=st.integers(0, 2**40), dim=st.integers(0, 1))
def test_equals_reference(x, cast, key, dim):
    """But of 4/6 with equal errors."""
    assume(cast.scale.four_over_six is None)
    check_against_reference(x, cast, dim)
    check_stochastic(x, replace(cast, rounding="stochastic"), dim, key)
