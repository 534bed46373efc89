"""What fp32 scales are made from: the mean of a block or its ends instead of its largest magnitude, times a factor."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, Scale, compilation, quantize
from lightning_lowbit.quant import quantize_operand
from tests.quant.tensors import check_against_reference, check_stochastic, float_scales, same, sample
from tests.references import quantize as reference
from tests.tables import each

BLOCKS = (16, (4, 16), "row", "tensor")
INTEGERS = [f"int{bits}" for bits in range(2, 9)]
FLOAT32_MAX = torch.finfo(torch.float32).max


def minmax(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="minmax", **settings))


def absmean(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="absmean", **settings))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_absmean_by_hand():
    """The mean becomes 1; half of it is a tie, to 0; larger elements saturate."""
    x = torch.tensor([[6.0, -2.0, 1.0, -1.0, 0.0]])  # 10 / 5
    for factor, scale, codes in (
        (1.0, 2.0, [1, -1, 0, 0, 0]),
        (0.5, 1.0, [1, -1, 1, -1, 0]),
        (4.0, 8.0, [1, 0, 0, 0, 0]),
    ):
        for block in (5, (1, 5), "row", "tensor"):
            found = quantize(x, absmean("ternary", block, factor=factor))
            assert found.scales.flatten().tolist() == [scale], f"factor {factor}, block {block}: scale"
            assert found.elements().tolist() == [codes], f"factor {factor}, block {block}"
            assert found.zero_points is None
    assert quantize(x, absmean("int4")).elements().tolist() == [[3, -1, 0, 0, 0]], "ties to even: 1/2 of the mean is 0"


def test_minmax_by_hand():
    """2^bits levels from the least element to the largest, 0 among them; codes count from the least."""
    rows = {
        "both signs": ([-1.0, 2.0, 0.0, 1.2], 1.0, 1, [0, 3, 1, 2]),
        "positive": ([3.0, 1.0, 2.0, 6.0], 2.0, 0, [2, 0, 1, 3]),  # 0.5 and 1.5 are ties, to even: 0 and 2
        "negative": ([-3.0, -1.0, -2.0, -6.0], 2.0, 3, [1, 3, 2, 0]),
        "zeros": ([0.0, 0.0, 0.0, 0.0], 1.0, 0, [0, 0, 0, 0]),
    }
    found = quantize(torch.tensor([row for row, *_ in rows.values()]), minmax("int2", "row"))
    for i, (name, (_, scale, zero, codes)) in enumerate(rows.items()):
        assert found.scales[i].item() == scale, f"{name}: scale {found.scales[i].item()}"
        assert found.zero_points[i].item() == zero, f"{name}: zero point {found.zero_points[i].item()}"
        assert found.codes[i].tolist() == codes, f"{name}: codes {found.codes[i].tolist()}"
        values = [(code - zero) * scale for code in codes]
        assert found.dequantize()[i].tolist() == values, f"{name}: values {found.dequantize()[i].tolist()}"
        assert found.elements()[i].tolist() == [code - zero for code in codes], f"{name}: elements"


# --- against the slow reference ---------------------------------------------------------------------------------------

CASTS = [
    absmean("ternary"),
    absmean("ternary", factor=2 / math.sqrt(3), epsilon=1e-5),
    absmean("e2m1", rounding="power_of_two", factor=0.7),
    absmean("int8", epsilon=0.5),
    *[minmax(element) for element in INTEGERS],
    minmax("int4", factor=0.9, epsilon=0.5),
    minmax("int8", rounding="power_of_two"),
    Cast("int4", Scale("fp32", factor=0.8, epsilon=0.5)),
    Cast("e4m3", Scale("fp32", rounding="power_of_two", factor=1.5)),
]


def ragged(dtype):
    """Blocks of one sign and of both, of zeros, and parts of blocks."""
    x = sample(13, 50)
    x[3:5], x[5:7] = x[3:5].abs(), -x[5:7].abs()
    return x.to(dtype)


def in_block(cast, block):
    return cast.replace(scale={"block": block})


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_equals_reference(cast, dtype):
    x = ragged(dtype)
    for block, dim in itertools.product(BLOCKS, (0, -1)):
        mode = in_block(cast, block)
        check_against_reference(x, mode, dim)
        expected = reference.quantize(x, mode, dim, field="dequantized")
        found = quantize_operand(x, mode, dim, dtype=torch.float32)
        values = found.values * (1.0 if found.factor is None else found.factor)
        same(values, expected, f"{mode} along {dim}: operand of {dtype}")


@each("cast", CASTS)
def test_stochastic_equals_reference(cast):
    for block, dim in itertools.product(BLOCKS, (0, -1)):
        check_stochastic(ragged(torch.float32), replace(in_block(cast, block), rounding="stochastic"), dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cast", "dim"),
    [
        (in_block(CASTS[1], "tensor"), -1),
        (minmax("int4"), -1),
        (minmax("int8", "tensor"), -1),
        (replace(minmax("int3", "row"), rounding="stochastic"), 0),
        (Cast("int8", Scale("fp32", (4, 16), factor=0.8, epsilon=0.5), "stochastic"), -1),
    ],
    ids=str,
)
def test_compiled_equals_reference(cast, dim):
    with compilation.backend("compiled"):
        if cast.rounding == "stochastic":
            check_stochastic(ragged(torch.float32), cast, dim)
        else:
            check_against_reference(ragged(torch.float32), cast, dim)


def test_compiled_operands_equal_reference():
    """In bfloat16, rounded to it: what a layer computes with."""
    x, cast = ragged(torch.bfloat16), replace(minmax("int4"), round_to_bfloat16=True)
    with compilation.backend("compiled"):
        found = quantize_operand(x, cast, -1).values
    same(found, reference.quantize(x, cast, field="dequantized").bfloat16(), f"{cast} compiled")


# --- means ------------------------------------------------------------------------------------------------------------


def test_means_do_not_depend_on_order():
    """Of 2^14 magnitudes over 20 powers of two, whose float32 sums do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**14, generator=generator) * torch.rand(2**14, generator=generator).mul(20).exp2()
    orders = [torch.randperm(len(x), generator=generator) for _ in range(8)]
    assert len({np.cumsum(x[order].abs().numpy())[-1] for order in orders}) > 1, "this sample cannot tell"
    for shape in ((1, -1), (128, 128), (-1, 1)):
        found = {quantize(x[order].view(shape), absmean("ternary", "tensor")).scales.item() for order in orders}
        assert len(found) == 1, f"{shape}: {found}"


# --- least and largest ------------------------------------------------------------------------------------------------


@each("element", INTEGERS)
def test_the_largest_numbers_do_not_overflow(element):
    """Where least and largest are further apart than float32 reaches they may saturate, but keep their signs."""
    ends = ((0.0, 3e38), (-3e38, 0.0), (-1.6e38, 1.7e38), (-1e38, 3e38), (-3e38, 3e38), (-FLOAT32_MAX, 3e38))
    for block, (low, high) in itertools.product((8, "row", "tensor"), ends):
        x = torch.tensor([[low, high, low / 3, high / 3, 0.0]])
        found = quantize(x, minmax(element, block))
        values, step = found.dequantize(), float_scales(found).max().item()
        message = f"{element}, block {block}: {x.tolist()} became {values.tolist()}"
        assert math.isfinite(step), f"{message}, scale {step}"
        assert values.isfinite().all(), message
        same(values.sign()[:, [0, 1, 4]], x.sign()[:, [0, 1, 4]], message)
        if max(-low, high) < FLOAT32_MAX / 2:
            assert ((values - x).abs() <= step / 2 * (1 + 1e-5)).all(), message


@each("element", INTEGERS)
def test_the_smallest_numbers_do_not_divide_by_zero(element):
    for size in (2.0**-149, 2.0**-140, 2.0**-126, 1e-37):
        x = torch.tensor([[-size, 3 * size, 0.0, size]])
        found = quantize(x, minmax(element, "row"))
        values, step = found.dequantize(), float_scales(found).item()
        assert math.isfinite(step), f"{element}, {size}: scale {step}"
        assert ((values - x).abs() <= step / 2 * (1 + 1e-5)).all(), f"{element}: {x.tolist()} became {values.tolist()}"


# --- zeros, and what is not finite ------------------------------------------------------------------------------------


@each("cast", CASTS)
def test_zeros(cast):
    for block, rounding in itertools.product(BLOCKS, ("nearest", "stochastic")):
        mode = replace(in_block(cast, block), rounding=rounding)
        found = quantize(torch.zeros(5, 20), mode, key=3)
        assert not found.dequantize().any(), f"{mode}: zeros became numbers"
        assert float_scales(found).isfinite().all(), f"{mode}: a scale of {float_scales(found).max()}"
        assert cast.scale.epsilon or (float_scales(found) == 1).all(), f"{mode}: the scale of zeros is 1"
        assert found.zero_points is None or not found.zero_points.any(), f"{mode}: the zero point of zeros is 0"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_one_bad_element_is_its_whole_block(cast, bad):
    """Scale and values are NaN in the block, and all else is what it is without that element."""
    x = ragged(torch.float32) + 0.01
    broken = x.clone()
    broken[5, 20] = bad
    at = {16: (slice(5, 6), slice(16, 32)), (4, 16): (slice(4, 8), slice(16, 32)), "row": (slice(5, 6), slice(None))}
    for block in BLOCKS:
        mode = in_block(cast, block)
        expected = quantize(x, mode).dequantize()
        expected[at.get(block, (slice(None), slice(None)))] = torch.nan
        same(quantize(broken, mode).dequantize(), expected, f"{mode} with {bad}")
        operand = quantize_operand(broken, mode, -1, dtype=torch.float32)
        values = operand.values * (1.0 if operand.factor is None else operand.factor)
        same(values, expected, f"{mode} with {bad}, operand")
