"""What fp32 scales are made from: the mean of a block or its ends instead of its largest magnitude, times a factor."""

import itertools
import math
from dataclasses import replace

import numpy as np
import torch

from lightning_lowbit import Cast, Scale, compilation, quantize
from lightning_lowbit.quant import quantize_operand
from tests.quant.tensors import check_against_reference, check_stochastic, float_scales, same, sample, whole
from tests.references import quantize as reference
from tests.tables import each

BLOCKS = (16, (4, 16), "row", "tensor")
INTEGERS = [f"int{bits}" for bits in range(2, 9)]
FLOAT32_MAX = torch.finfo(torch.float32).max


def minmax(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="minmax", **settings))


def absmean(element, block=16, **settings):
    return Cast(element, Scale("fp32", block, statistic="absmean", **settings))


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


CASTS = [
    absmean("ternary", factor=2 / math.sqrt(3), epsilon=1e-5),
    absmean("e2m1", rounding="power_of_two", factor=0.7),
    *[minmax(element) for element in ("int2", "int4", "int8")],
    minmax("int4", factor=0.9, epsilon=0.5),
    minmax("int8", rounding="power_of_two"),
    Cast("int4", Scale("fp32", factor=0.8, epsilon=0.5)),
    Cast("e4m3", Scale("fp32", rounding="power_of_two", factor=1.5)),
]


def ragged():
    """Blocks of one sign and of both, of zeros, and parts of blocks."""
    x = sample(13, 50)
    x[3:5], x[5:7] = x[3:5].abs(), -x[5:7].abs()
    return x


def in_block(cast, block):
    return cast.replace(scale={"block": block})


@each("cast", CASTS)
def test_equals_reference(cast):
    for block, dim in itertools.product(BLOCKS, (0, -1)):
        mode = in_block(cast, block)
        for x in (ragged(), ragged().bfloat16(), torch.zeros(5, 20)):
            check_against_reference(x, mode, dim)
            expected = reference.quantize(x, mode, dim, field="dequantized")
            same(whole(quantize_operand(x, mode, dim, dtype=torch.float32)), expected, f"{mode} along {dim}: operand")
            check_stochastic(x.float(), replace(mode, rounding="stochastic"), dim)


def test_compiled_operands_equal_reference():
    """In bfloat16, rounded to it: what a layer computes with."""
    x, cast = ragged().bfloat16(), replace(minmax("int4"), round_to_bfloat16=True)
    with compilation.backend("compiled"):
        found = quantize_operand(x, cast, -1).values
    same(found, reference.quantize(x, cast, field="dequantized").bfloat16(), f"{cast} compiled")


def test_means_do_not_depend_on_order():
    """Of 2^14 magnitudes over 20 powers of two, whose float32 sums do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**14, generator=generator) * torch.rand(2**14, generator=generator).mul(20).exp2()
    orders = [torch.randperm(len(x), generator=generator) for _ in range(8)]
    assert len({np.cumsum(x[order].abs().numpy())[-1] for order in orders}) > 1, "this sample cannot tell"
    for shape in ((1, -1), (128, 128), (-1, 1)):
        found = {quantize(x[order].view(shape), absmean("ternary", "tensor")).scales.item() for order in orders}
        assert len(found) == 1, f"{shape}: {found}"


@each("element", INTEGERS)
def test_the_largest_and_the_smallest_numbers(element):
    """Where least and largest are further apart than float32 reaches they may saturate, but keep their signs; where
    they are hardly numbers, none is divided by zero."""
    ends = [(0.0, 3e38), (-3e38, 0.0), (-1.6e38, 1.7e38), (-1e38, 3e38), (-3e38, 3e38), (-FLOAT32_MAX, 3e38)]
    ends += [(-size, 3 * size) for size in (2.0**-149, 2.0**-140, 2.0**-126, 1e-37)]
    for block, (low, high) in itertools.product((8, "row", "tensor"), ends):
        x = torch.tensor([[low, high, low / 3, high / 3, 0.0]])
        found = quantize(x, minmax(element, block))
        values, step = found.dequantize(), float_scales(found).max().item()
        message = f"{element}, block {block}: {x.tolist()} became {values.tolist()}"
        assert math.isfinite(step), f"{message}, scale {step}"
        assert values.isfinite().all(), message
        if high > 1:
            same(values.sign()[:, [0, 1, 4]], x.sign()[:, [0, 1, 4]], message)
        if max(-low, high) < FLOAT32_MAX / 2:
            assert ((values - x).abs() <= step / 2 * (1 + 1e-5)).all(), message
