"""Samples, every setting of a scale, and equality that says what differs."""

import itertools
from functools import cache
from unittest import mock

import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from tests.references import quantize as reference

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
NVFP4_TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))
EXMY = [name for name in SCALE_FORMATS if name not in ("e8m0", "bf16", "fp16", "fp32")]


def scales(block=16, element="e2m1"):
    """Every setting of a Scale that this block and this element allow and whose scales do not depend on a key; of the
    numbers, one each."""
    levels = [{}]
    levels += [] if block == "tensor" else [{"two_level": True}, {"two_level": True, "top": 1.25}]
    levels += [{"two_level": "row"}] if isinstance(block, int) and block > 1 else []
    for name, level in itertools.product(EXMY, levels):
        for rounding in ("nearest", "up"):
            yield Scale(name, block, rounding, **level)
        if element == "e2m1" and block not in ("row", "tensor"):
            yield from (Scale(name, block, four_over_six=measure, **level) for measure in ("mse", "mae"))
    yield from (Scale(name, block, **level) for name, level in itertools.product(("bf16", "fp16"), levels))
    for rounding, level in itertools.product(SCALE_ROUNDINGS["e8m0"], levels):
        yield Scale("e8m0", block, rounding, **level)
    yield Scale("e8m0", block, "floor", prescale=0.75)
    settings = [
        {"margin": 0},
        {"margin": 2},
        {"factor": 0.75, "epsilon": 0.25},
        {"statistic": "absmean", "factor": 1.25},
    ]
    if element.startswith("int"):
        settings += [{"statistic": "minmax"}, {"statistic": "minmax", "factor": 0.9, "epsilon": 0.25}]
    for rounding, setting in itertools.product(SCALE_ROUNDINGS["fp32"], settings):
        yield Scale("fp32", block, rounding, **setting)


@cache  # they are checked as they are made
def casts(element, block=16):
    """The casts of an element format with each of :func:`scales`."""
    return tuple(Cast(element, scale) for scale in scales(block, element))


def some_casts(element, block=16):
    """Every third of :func:`casts`: others for the next element, so that each setting is there with several."""
    return casts(element, block)[list(ELEMENT_FORMATS).index(element) % 3 :: 3]


def sample(*shape, seed=0, dtype=torch.float32):
    """Blocks of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    size = torch.randn((*shape[:-1], 1), generator=generator).mul(3).exp()
    return (x * size * (torch.rand((*shape[:-1], 1), generator=generator) > 0.1)).to(dtype)


def ragged(number=0):
    """Blocks of one sign and of both, of zeros, and parts of blocks; float32 or bfloat16."""
    x = sample(13, 50)
    x[3:5], x[5:7] = x[3:5].abs(), -x[5:7].abs()
    return x.to((torch.float32, torch.bfloat16)[number % 2])


def whole(operand):
    """``values * factor``, float32."""
    return operand.values.float() * (1.0 if operand.factor is None else operand.factor)


def same(found, expected, message):
    """Equal values: NaN equals NaN, and -0 equals 0."""
    assert found.shape == expected.shape, f"{message}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    assert not wrong.any(), (
        f"{message}: {int(wrong.sum())} of {wrong.numel()} differ, e.g. {found[wrong][:4].tolist()} "
        f"instead of {expected[wrong][:4].tolist()}"
    )


def same_bytes(found, expected, message):
    same(found.codes, expected.codes, f"{message}, codes")
    same(found.scales.view(torch.uint8), expected.scales.view(torch.uint8), f"{message}, scales")
    for name in ("tensor_scale", "zero_points"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), f"{message}: one has no {name}"
        if one is not None:
            same(one, other, f"{message}, {name}")


def expected_fields(x, cast, dim, amax, *names):
    """Fields of the slow reference by name, which is asked once for all of them."""
    compute, results = reference.quantize_matrix, []

    def quantize_matrix(*args, **kwargs):
        results.extend([] if results else [compute(*args, **kwargs)])
        return results[0]

    with mock.patch.object(reference, "quantize_matrix", quantize_matrix):
        return {name: reference.quantize(x, cast, dim, amax=amax, field=name) for name in names}


def check_against_reference(x, cast, dim=-1, amax=None):
    """Rounds to nearest as the slow reference does, to the bit."""
    message = f"{cast} along {dim}" + ("" if amax is None else f", amax {amax}")
    found = quantize(x, cast, dim, amax=None if amax is None else torch.tensor(amax))
    expected = expected_fields(x, cast, dim, amax, "scales", "spread", "values", "dequantized", "zeros")
    same(float_scales(found), expected["scales"], f"{message}, scales")
    if found.zero_points is not None:
        assert found.zero_points.dtype == torch.uint8
        same(found.zero_points.float(), expected["zeros"], f"{message}, zero points")
    counts = expected["spread"] != 0  # codes under a zero scale mean nothing
    same(found.elements()[counts], expected["values"][counts], f"{message}, values of codes")
    same(found.dequantize(), expected["dequantized"], f"{message}, values")


def check_stochastic(x, cast, dim=-1, key=12345):
    """Rounds a matrix stochastically as the slow reference does."""
    found, block = quantize(x, cast, dim, key=torch.tensor(key)).elements(), cast.scale.block
    expected = expected_fields(x, cast, dim, None, "lower", "upper", "clipped")
    lower, upper, clipped = (field.double() for field in expected.values())
    # Indices are those of the padded matrix.
    side = block[1] if isinstance(block, tuple) else block if isinstance(block, int) and dim in (1, -1) else 1
    rows, columns = x.shape
    index = torch.arange(rows)[:, None] * (columns + -columns % side) + torch.arange(columns)
    up = torch.from_numpy(reference.uniform_by_fours(index.numpy(), key))
    margin = (clipped - lower) / (upper - lower).clamp(min=1e-30) - (1 - up)
    expected = torch.where((margin > 0) & (upper > lower), upper, lower)
    # float32 adds the random number to a value of up to 127 steps: the last few bits of the comparison are open.
    open_ = (margin.abs() < 2.0**-16) & (upper > lower)
    expected = torch.where(open_ & (found == lower.float()), lower, torch.where(open_, upper, expected))
    same(found, expected.float(), f"{cast} along {dim}")


def float_scales(quantized):
    storage = quantized.cast.scale.storage
    return quantized.scales.float() if storage.dtype is not None else storage.decode(quantized.scales)


def spread_scales(quantized):
    """The scale of each element of a matrix, float32."""
    found, shape, block = float_scales(quantized), quantized.codes.shape, quantized.cast.scale.block
    if isinstance(block, str):
        return found.expand(shape)
    sides = block if isinstance(block, tuple) else (block, 1) if quantized.dim == -2 else (1, block)
    for dimension, side in enumerate(sides):
        found = found.repeat_interleave(side, dimension)
    return found[: shape[0], : shape[1]]
