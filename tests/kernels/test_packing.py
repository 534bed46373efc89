"""An operand that is packed and unpacked is the operand, by plain code and by the C++ kernels."""

import random

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels import backend, pack_operand, quantize_operand, unpack_operand
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.quant.packed import packing_obstacle
from lightning_lowbit.quant.shard import Shard
from tests.kernels.test_casts import OF_PRESETS

KEY = torch.tensor(0x5EED1234ABCD)
OTHERS = [
    Cast(element, Scale(scale, block))
    for element, block in zip(ELEMENT_FORMATS, [16, 32, (16, 16), "row", 24] * 3, strict=True)
    for scale in ("e4m3", "e8m0", "fp32", "e1m6", "e6m1", "bf16", "fp16")
]


def matrix(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    x[:16, 3] = 0
    x[1, 4], x[rows // 2, 5] = torch.nan, torch.inf  # next to each other, in a byte
    return x.to(dtype)


def check(x, cast, dim, shard=None):
    key = KEY if cast.draws else None
    with backend("eager"):
        expected = quantize_operand(x, cast, dim, key, shard=shard)
    for name in ("eager", "cpp"):
        with backend(name):
            packed = pack_operand(x, cast, dim, key, shard=shard)
            found = unpack_operand(packed, cast, dim, x.shape, x.dtype)
        where = f"{cast}, dim {dim}, {x.dtype} {tuple(x.shape)}, {name}"
        assert found.values.dtype == expected.values.dtype, where
        assert (found.factor is None) == (expected.factor is None), where
        # A NaN is in elements or, where they have none, in the scale.
        pairs = [[o.values.float() * (1 if o.factor is None else o.factor) for o in (found, expected)]]
        if x.isfinite().all() and found.factor is not None:
            pairs += [[found.values, expected.values], [found.factor, expected.factor]]
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=where)


@pytest.mark.parametrize("dim", [0, 1])
def test_operands_of_presets(dim):
    for cast in OF_PRESETS:
        for dtype in (torch.bfloat16, torch.float32):
            check(matrix(48, 64, dtype), cast, dim)
            check(matrix(33, 20, dtype).nan_to_num(0, 0), cast, dim)


@pytest.mark.slow
def test_rare_casts_and_shapes():
    draw = random.Random(0)
    for cast in [*OF_PRESETS, *OTHERS]:
        for _ in range(4):
            dtype, dim = draw.choice((torch.bfloat16, torch.float32)), draw.randrange(2)
            check(matrix(draw.randrange(2, 70), draw.randrange(6, 70), dtype), cast, dim)


def test_shards_have_the_random_bits_of_the_whole():
    x, cast = matrix(32, 64, torch.bfloat16), Cast("e2m1", Scale("e4m3", 16), "stochastic")
    whole = quantize_operand(x, cast, 0, KEY).values
    for start in (0, 32):
        part = x[:, start : start + 32].contiguous()
        packed = pack_operand(part, cast, 0, KEY, shard=Shard("", 1, start, 32, 64))
        found = unpack_operand(packed, cast, 0, part.shape, part.dtype).values
        torch.testing.assert_close(found, whole[:, start : start + 32], rtol=0, atol=0, equal_nan=True)


def test_the_kernels_pack_what_presets_need_and_what_has_no_packed_form_says_why():
    assert not any(map(cpu.obstacle, OF_PRESETS))
    assert "zero points" in packing_obstacle(Cast("int4", Scale("fp32", 32, statistic="minmax")))
    assert "NaN" in packing_obstacle(Cast("int8", Scale("fp32", "tensor", source="delayed")))
