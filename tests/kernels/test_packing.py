"""Operands that are packed and unpacked, or rotated within the kernel, are those of plain code, to the bit."""

import itertools
import random

import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels import (
    amax_of,
    backend,
    kernel_support,
    pack_operand,
    quantize_operand,
    rotate,
    unpack_operand,
)
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant import quantize_operand as plain
from lightning_lowbit.quant import rotate as plain_rotate
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.packed import pack, packing_obstacle
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.shard import amax_of as plain_amax
from lightning_lowbit.quant.transforms import SIZES
from tests.kernels.test_casts import OF_PRESETS, VALUES, same_bits
from tests.quant.tensors import NVFP4, NVFP4_TILES

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


CASTS = [
    NVFP4,
    NVFP4.replace(rounding="stochastic"),
    NVFP4_TILES,
    LinearCasts.preset("nvfp4-4over6").fprop_x,
    LinearCasts.preset("quartet2").wgrad_g,
    LinearCasts.preset("mxfp4-rht").wgrad_x,
    Cast("e4m3", Scale("e8m0", 24, "floor")),
    Cast("e4m3", Scale("fp32", "row")),
    Cast("e4m3", Scale("fp32", "tensor")),
]
PLAIN = [LinearCasts.preset("nvfp4-row").fprop_x, LinearCasts.preset("ternary").fprop_w]


def signs_of(size):
    return Hadamard(size, "keyed").diagonal(KEY, KEY.device)


def test_the_kernel_rotates_as_plain_code_does():
    torch.manual_seed(0)
    shapes = (33, 47), (1, 130), (260, 17), (128, 64)
    for size, dim, shape, dtype in itertools.product(SIZES, (0, 1), shapes, (torch.float32, torch.bfloat16)):
        for name, change in VALUES.items():
            x, signs = change(torch.randn(shape)).to(dtype), signs_of(size)
            expected, where = plain_rotate(x, signs, dim), f"{name} {dtype} {shape} along {dim} by {size}"
            with backend("cpp"):
                assert same_bits(rotate(x, signs, dim), expected), where
                assert same_bits(amax_of(x, None, signs, dim), plain_amax(expected).abs()), f"amax of {where}"


def test_operands_of_rotated_matrices():
    torch.manual_seed(1)
    number = 0
    for cast, size, dim in itertools.product([*CASTS, *PLAIN], SIZES, (0, 1)):
        for shape in ((33, 47), (140, 70)):
            number += 1
            x, signs = torch.randn(shape).to((torch.float32, torch.bfloat16)[number % 2]), signs_of(size)
            if number % 3 == 0:
                x = VALUES["not finite"](x)
            amax = torch.tensor(3.0) if cast.scale.needs_amax and number % 2 else None
            expected, where = plain_rotate(x, signs, dim), f"{cast} {x.dtype} {shape} along {dim} by {size}"
            with backend("eager"):
                operand = plain(expected, cast, dim, KEY, amax)
            form, call = cpu.cpp_cast(cast.spec, dim, x.dtype, None), CastCall(cast, dim, KEY, amax, rotation=signs)
            assert form is not None and cpu.takes(x, form, call) == (cast not in PLAIN), where
            for name in ("eager", "cpp"):
                with backend(name):
                    found = quantize_operand(x, cast, dim, KEY, amax, rotation=signs)
                assert same_bits(found.values, operand.values), f"values of {where}, {name}"
                assert operand.factor is None or same_bits(found.factor, operand.factor), f"factor of {where}, {name}"


def test_codes_of_rotated_matrices():
    torch.manual_seed(2)
    for cast, size, dim in itertools.product(CASTS, (16, 128), (0, 1)):
        x, signs = torch.randn(70, 34).bfloat16(), signs_of(size)
        with backend("eager"):
            expected = pack(plain_rotate(x, signs, dim), cast, KEY, None, dim=dim)
        with backend("cpp"):
            found = pack_operand(x, cast, dim, KEY, rotation=signs)
        assert all(map(same_bits, found, expected)), f"{cast} along {dim} by {size}"


def test_support_says_what_is_rotated_before():
    assert set(kernel_support(CASTS, rotated_along=1).values()) == {"cpp"}
    assert [*kernel_support(PLAIN, rotated_along=0).values()] == [
        "cpp, rotated before: second levels per row",
        "cpp, rotated before: the mean of a tensor",
    ]
    for cast, dim, why in (
        (NVFP4, 0, None),
        (NVFP4_TILES, 1, None),
        (Cast("int8", Scale("fp32", "row")), 0, "scales of rows or tensors"),
        (LinearCasts.preset("quartet2").wgrad_g, 0, "corrected groups"),
        (Cast("int4", Scale("fp32", 24)), 1, "blocks that are not of 1, 2, 4, ... or 256 elements"),
    ):
        assert gpu.rotation_obstacle(cast, dim) == why, cast
