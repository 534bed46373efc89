"""What is summed of an operand on its way to a GEMM is what the slow metrics say of the tensor and its cast."""

import itertools
import math

import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale, quantize
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.quant import Operand, quantize_operand
from lightning_lowbit.quant.statistics import (
    BINS,
    MAXIMA,
    OF_BLOCKS,
    SUMS,
    merge_statistics_,
    operand_statistics,
    sqnr_db,
)
from tests.nn.operand_sums import Made
from tests.quant.tensors import NVFP4, sample
from tests.tables import each

KEY = torch.tensor(12345)
TERNARY = Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)


BY_NAME = {str(cast): cast for name in PRESETS for cast in vars(LinearCasts.preset(name)).values()}
CASTS = [cast for _, cast in sorted(BY_NAME.items()) if isinstance(cast, Cast)]
OTHERS = [
    Cast("int4", Scale("fp32", 16, statistic="minmax")),
    Cast("int8", Scale("fp32", "row", statistic="minmax", factor=0.8)),
    Cast("int2", Scale("fp32", "tensor", statistic="minmax")),
    Cast("e2m1", Scale("fp32", (4, 16), factor=0.6)),
    Cast("e2m1", Scale("e4m3", 16)),  # whose scales underflow
    Cast("e2m1", Scale("e8m0", 16, "floor", two_level=True)),
    Cast("int8", Scale("fp32", 16, epsilon=1e-5)),  # whose zeros have the scale of an epsilon
]


def of_operand(x, cast, dim, amax=None, dtype=None, **kwargs):
    quantized = quantize_operand(x, cast, dim, KEY, amax, dtype)
    sums = operand_statistics(x, quantized, cast, dim, amax, **kwargs)
    assert (sums.shape, sums.dtype) == ((len(SUMS) + len(MAXIMA),), torch.float64)
    return dict(zip((*SUMS, *MAXIMA), sums.tolist(), strict=True))


def by_metrics(x, cast, dim, amax=None):
    """Sums of the slow reference, and scales of the blocks that hold something."""
    made = Made(x, cast, dim, KEY, amax)
    found, used = made.statistics(), made.scales()
    return {
        **{name: float(getattr(found, name)) for name in SUMS},
        "inverse_scale": 1 / used.min().item() if used.numel() else 0.0,
        "scale": used.max().item() if used.numel() else 0.0,
    }


def assert_same(found, expected, message, of_scales=True):
    """Counts exactly; norms are sums of float32, and elements times scales are rounded once more than there. Scales
    that round stochastically are taken for those to nearest: ``of_scales`` is False."""
    for name in ("elements", "nonzero", "underflowed", *(["saturated"] if of_scales else [])):
        assert found[name] == expected[name], f"{message}, {name}: {found[name]}, not {expected[name]}"
    for name in ("signal", "noise", *(MAXIMA if of_scales else [])):
        near = pytest.approx(expected[name], rel=1e-5, abs=1e-12 * expected["signal"])
        assert found[name] == near, f"{message}, {name}: {found[name]}, not {expected[name]}"


@each("cast", [*CASTS, *OTHERS], fast=13)
def test_sums_are_those_of_the_metrics(cast):
    for shape, dim in itertools.product(((13, 50), (64, 96), (1, 40), (40, 1)), (0, 1)):
        x = sample(*shape, seed=shape[0])
        amax = x.abs().max() * 0.25 if cast.scale.source == "delayed" else None
        found, expected = of_operand(x, cast, dim, amax), by_metrics(x, cast, dim, amax)
        assert_same(found, expected, f"{shape} along {dim}", cast.scale.rounding != "stochastic")
        if not cast.round_to_bfloat16:
            x = x.bfloat16()
            found, expected = of_operand(x, cast, dim, amax, torch.float32), by_metrics(x.float(), cast, dim, amax)
            assert_same(found, expected, f"{shape} along {dim}, bfloat16", cast.scale.rounding != "stochastic")


@each("element", ["int8", "ternary"])
def test_sums_of_what_a_native_gemm_takes(element):
    x, block = sample(24, 64, dtype=torch.bfloat16), "row" if element == "int8" else "tensor"
    cast = Cast(element, Scale("fp32", block, statistic="absmax" if element == "int8" else "absmean"))
    for dim in (0, 1):
        assert_same(of_operand(x, cast, dim, dtype=torch.int8), by_metrics(x.float(), cast, dim), f"along {dim}")


def test_noise_is_that_of_what_the_gemm_takes():
    """With `round_to_bfloat16` it is rounded to bfloat16 once more."""
    cast, x = Cast("int8", Scale("fp32", 16), round_to_bfloat16=True), sample(16, 64, dtype=torch.bfloat16)
    taken = quantize(x.float(), cast).dequantize(torch.bfloat16).double()
    found = of_operand(x, cast, 1)
    assert found["noise"] == pytest.approx((x.double() - taken).square().sum().item(), rel=1e-5)
    assert found["noise"] > 1.1 * by_metrics(x.float(), cast, 1)["noise"], "the sample cannot tell"


@each("cast", [*CASTS, *OTHERS])
def test_of_zeros_and_of_nothing(cast):
    for shape, dim in itertools.product(((4, 32), (0, 32), (4, 0)), (0, 1)):
        found = of_operand(torch.zeros(shape), cast, dim)
        expected = {**dict.fromkeys((*SUMS, *MAXIMA), 0.0), "elements": float(math.prod(shape))}
        assert found == expected, f"{shape} along {dim}"


@each("cast", [NVFP4, Cast("int8", Scale("fp32", "row")), Cast("e2m1", Scale("e8m0", 16))])
@each("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_noise(cast, bad):
    x = sample(8, 64)
    x[3, 5] = bad
    assert math.isnan(of_operand(x, cast, 1)["noise"])


def picked(count, stride):
    """One of each ``stride`` numbers, that a hash chooses."""
    places = range(-(-count // stride))
    return [min(i * stride + (i * 2654435761 % 2**32) * stride // 2**32, count - 1) for i in places]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("cast", [*CASTS, *OTHERS], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sample_is_of_whole_blocks(cast, dim):
    """One of n rows, columns or rows of tiles, with what scales them: that of the whole tensor, where there is one."""
    x = sample(96, 96, seed=3).t().contiguous() if dim == 0 else sample(96, 96, seed=3)
    amax = x.abs().max() if cast.scale.needs_amax else None
    found, again = (of_operand(x, cast, dim, most=96 * 96 // 3) for _ in range(2))
    assert found == again, "another sample"
    if cast.scale.block == "tensor" and not cast.scale.needs_amax:
        assert found["elements"] == x.numel(), "a mean of some"
        return
    quantized = quantize_operand(x, cast, dim, KEY)
    if isinstance(cast.scale.block, tuple) and cast.scale.block[0] > 96 // 2:
        assert found["elements"] == x.numel(), "a part of a tile"
        return
    if isinstance(cast.scale.block, tuple):
        rows = torch.arange(96).view(-1, cast.scale.block[0])
        rows = rows[picked(len(rows), 3)].flatten()
    else:
        rows = torch.tensor(picked(96, 3))
    across = 0 if dim == 1 or isinstance(cast.scale.block, tuple) else 1
    assert found["elements"] == len(rows) * 96
    part, values = x.index_select(across, rows), quantized.values.index_select(across, rows)
    factor = quantized.factor
    if factor is not None and factor.dim():
        factor = factor.index_select(across, rows)
    taken = operand_statistics(part, Operand(values, factor), cast, dim, amax)
    assert_same(found, dict(zip((*SUMS, *MAXIMA), taken.tolist(), strict=True)), "of these rows alone")


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 256, 512])
def test_a_sample_is_no_choice_of_places_in_sequences(length):
    """First tokens are far larger than others, as attention makes them."""
    x = torch.randn(8192 // length, length, 64)
    x[:, 0] *= 30
    x = x.flatten(0, 1)
    ratios = []
    for most in (x.numel(), x.numel() // 8):
        found = of_operand(x, NVFP4, 1, most=most)
        ratios.append(10 * math.log10(found["signal"] / found["noise"]))
    assert ratios[1] == pytest.approx(ratios[0], abs=1.5), "of every eighth token all would be such, or none"


def test_two_elements_more_than_the_most():
    x = sample(3, 6)
    assert [of_operand(x, NVFP4, 1, most=most)["elements"] for most in (18, 17, 9, 6, 1)] == [18, 12, 12, 6, 6]


def test_merging():
    """Of two tensors it is what it is of both together, where blocks know of no others."""
    cast, x = Cast("e2m1", Scale("e8m0", 32)), sample(16, 64)
    parts = [operand_statistics(part, quantize_operand(part, cast, 1), cast, 1) for part in x.split([5, 11])]
    into = torch.zeros(2, 8, dtype=torch.float64)
    for part in parts:
        merge_statistics_(into[1], part)
    assert not into[0].any()
    assert_same(dict(zip((*SUMS, *MAXIMA), into[1].tolist(), strict=True)), of_operand(x, cast, 1), "merged")


@pytest.mark.usefixtures("compiler")
@pytest.mark.fast("e2m1/e4m3:1x16+fp32-1")
@pytest.mark.parametrize(
    ("cast", "dim"), [(NVFP4, 1), (Cast("int8", Scale("fp32", "row")), 0), (Cast("ternary", TERNARY), 1)], ids=str
)
def test_compiled(cast, dim):

    def look(x, into):
        amax = x.abs().amax() if cast.scale.needs_amax else None
        seen = operand_statistics(x, quantize_operand(x, cast, dim, KEY, amax), cast, dim, amax)
        merge_statistics_(into, seen)
        return x * 2

    compiled = torch.compile(look, fullgraph=True, backend="aot_eager")
    for shape in ((16, 48), (13, 50)):
        x, found, expected = sample(*shape), *torch.zeros(2, 8, dtype=torch.float64)
        for _ in range(2):
            compiled(x, found)
            look(x, expected)
        assert torch.equal(found, expected), f"{shape}: {found}, not {expected}"


@each(
    ("signal", "noise", "expected"),
    [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 1.0, -math.inf), (0.0, 0.0, math.inf), (1.0, math.nan, math.nan)],
)
def test_sqnr_of_numbers_and_tensors(signal, noise, expected):
    assert sqnr_db(signal, noise) == pytest.approx(expected, nan_ok=True)
    assert sqnr_db(torch.tensor(signal), torch.tensor(noise)).item() == pytest.approx(expected, nan_ok=True)


def test_statistics_of_blocks():
    """Scales of 1, 1/2 and 1/8 times a power of two, one block without error, and one of zeros."""
    x = torch.zeros(4, 32)
    x[0], x[1], x[2] = 6.0, torch.linspace(-3, 3, 32), 0.75
    cast = Cast("e2m1", Scale("e8m0", 32))
    for dim, matrix in ((1, x), (0, x.t().contiguous())):
        quantized = quantize_operand(matrix, cast, dim)
        found = operand_statistics(matrix, quantized, cast, dim, of_blocks=True)
        assert torch.equal(found[: len(SUMS) + len(MAXIMA)], operand_statistics(matrix, quantized, cast, dim))
        blocks, total, squares, *bins = found[-OF_BLOCKS:].tolist()
        assert (blocks, total, squares) == (3, 1 + 1 / 2 + 1 / 8, 1 + 1 / 4 + 1 / 64)
        below, errors = bins[:BINS], bins[BINS:]
        assert [i for i, count in enumerate(below) for _ in range(int(count))] == [0, 1, 3]
        noise = (x[1] - quantize(x[1][None], cast).dequantize()[0]).square().sum()
        place = int(10 * torch.log10(x[1].square().sum() / noise) / 3)
        assert sorted([place, BINS - 1, BINS - 1]) == [i for i, n in enumerate(errors) for _ in range(int(n))]
    twice = found.clone()
    merge_statistics_(twice, found)
    assert torch.equal(twice[-OF_BLOCKS:], 2 * found[-OF_BLOCKS:])
