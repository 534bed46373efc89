"""Operands that are rotated within the kernel equal those of a matrix that was rotated before, to the bit."""

import itertools

import torch

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.kernels import amax_of, backend, kernel_support, pack_operand, quantize_operand, rotate
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant import quantize_operand as plain
from lightning_lowbit.quant import rotate as plain_rotate
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.packed import pack
from lightning_lowbit.quant.shard import amax_of as plain_amax
from lightning_lowbit.quant.transforms import SIZES
from tests.kernels.test_casts import VALUES, same_bits
from tests.quant.tensors import NVFP4, NVFP4_TILES

KEY = torch.tensor(2**50 + 7)
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
