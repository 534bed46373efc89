"""What travels of a quantized matrix makes the operand that the whole would have been, to the bit."""

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.compilation import backend
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.quant import quantize_operand
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.packed import pack, unpack_
from lightning_lowbit.quant.shard import Shard, amax_of
from tests.tables import each

KEY = torch.tensor(12345)

CASTS = {
    **{element: Cast(element, Scale("e4m3", 16, two_level=True)) for element in ELEMENT_FORMATS},
    **{f"scales in {name}": Cast("e2m1", Scale(name, 16)) for name in SCALE_FORMATS},
    "tiles": Cast("e2m1", Scale("e4m3", (8, 16), two_level=True)),
    "stochastic": Cast("e2m1", Scale("e8m0", 32), "stochastic"),
    "prescale": Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75)),
    "prescale of rows": Cast("e2m1", Scale("e8m0", "row", "floor", prescale=0.75)),
    "4/6": Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse")),
    "groups": Cast("int4", Scale("fp32", 128), round_to_bfloat16=True),
    "groups, not rounded": Cast("int8", Scale("fp32", 128)),
    "rows": Cast("e4m3", Scale("fp32", "row")),
    "mean of rows": Cast("int2", Scale("fp32", "row", statistic="absmean")),
    "tensor": Cast("e4m3", Scale("fp32", "tensor")),
    "tensor, stochastic": Cast("e5m2", Scale("fp32", "tensor"), "stochastic"),
    "mean": Cast("ternary", Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)),
}


def packed(x, cast, parts):
    """Bytes of all parts of a matrix, and its scale; a last part that is smaller is padded."""
    step = -(-len(x) // parts)
    padded = torch.cat([x, x.new_zeros(parts * step - len(x), x.shape[1])])
    amax = amax_of(x) if cast.scale.needs_amax else None
    mean = None
    if cast.scale.block == "tensor" and cast.scale.statistic == "absmean":
        mean = x.double().abs().mean().float()
    rows = [
        pack(own, cast, KEY, amax, mean, Shard("", 0, number * step, step, len(x)))
        for number, own in enumerate(padded.split(step))
    ]
    data, factors = zip(*rows, strict=True)
    assert len({float(factor) for factor in factors}) == 1
    return torch.stack(data), factors[0]


def check(x, cast, parts):
    step = -(-len(x) // parts)
    with backend("eager"):
        data, factor = packed(x, cast, parts)
        expected = quantize_operand(x, cast, 1, KEY if cast.rounding == "stochastic" else None)
        out = torch.empty(parts * step, x.shape[1], dtype=operand_dtype(x.dtype, cast))
        found = unpack_(out, data, factor, cast, x.dtype)
    assert out.dtype == expected.values.dtype
    torch.testing.assert_close(out[: len(x)], expected.values, rtol=0, atol=0, equal_nan=True)
    assert (found is None) == (expected.factor is None)
    if found is not None:
        found = found if found.dim() == 0 else found[: len(x)]
        torch.testing.assert_close(found, expected.factor, rtol=0, atol=0, equal_nan=True)
    return data


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASTS)
def test_the_operand_of_the_whole(name, dtype):
    check(torch.randn(48, 256).to(dtype), CASTS[name], 3)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 5), (31, 33), (16, 200)])
@pytest.mark.parametrize("name", [name for name in CASTS if name != "tiles"])
def test_odd_sizes(name, rows, columns):
    check(torch.randn(rows, columns), CASTS[name], 2)


@each("value", [torch.nan, torch.inf, 0.0, -0.0])
@each("name", ["e2m1", "e4m3", "tiles", "groups", "scales in e8m0", "scales in e1m6"])
def test_blocks_that_are_special(name, value):
    x = torch.randn(16, 256)
    x[:8, 128:] = value
    check(x, CASTS[name], 2)


@each("name", ["e2m1", "ternary", "int8", "tiles", "groups", "rows", "tensor", "mean"])
def test_no_more_than_the_bits_of_a_cast(name):
    x, cast = torch.randn(32, 1024), CASTS[name]
    of_rows = 32 / 1024 if cast.scale.block == "row" else 0
    assert check(x, cast, 2).numel() * 8 / x.numel() == cast.bits + of_rows


def test_tiles_that_are_cut():
    with pytest.raises(ValueError, match="in the middle of blocks of 8"):
        packed(torch.randn(24, 32), CASTS["tiles"], 2)
