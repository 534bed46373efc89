"""GEMMs of codes in C++ equal the plain code to the bit, and the emulation up to the order of sums."""

import dataclasses
import itertools

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels import quantize_operand
from lightning_lowbit.kernels.cpu import gemms as cpp
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gemms import code_operand, multiply
from lightning_lowbit.kernels.windows import Pixels, Window
from lightning_lowbit.quant.call import CastCall
from tests.kernels.gemms import products
from tests.kernels.gemms.products import CASTS, INT8, LONG, NVFP4, SHAPES, TERNARY, VALUES, product
from tests.kernels.test_casts import same_bits
from tests.tables import each

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built")


def check(one):
    assert same_bits(one.by_cpp(), one.by_plain_code()), str(one)


def test_a_product_is_that_of_the_plain_code():
    for name, (seed, shape) in itertools.product(CASTS, enumerate(SHAPES)):
        check(product(name, shape, seed))
    for values, (seed, name) in itertools.product(VALUES, enumerate(CASTS)):
        check(product(name, (18, 20, 96), seed, values))
    for name in ("nvfp4", "blocks of two sizes", "int3, drawn", "int8 by ternary"):
        check(product(name, LONG))


def test_sums_of_the_largest_elements_are_those_of_the_plain_code():
    """Where instructions sum in 16 bits these overflow first."""
    for name in ("mxfp4", "e1m2", "int4", "int2", "int8 by ternary", "blocks on the right"):
        check(product(name, LONG, 0, "largest"))


@pytest.mark.parametrize("count", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_a_product_of_pixels_is_that_of_their_patches(count):
    for one in map(products.of_patches, range(count)):
        assert cpp.takes_pixels(one.left, one.right), str(one)
        patches = dataclasses.replace(one, left=one.left.gathered())
        assert same_bits(one.by_cpp(), patches.by_cpp()), str(one)
        if one.left.rows < 50:
            check(one)


def test_pixels_that_the_kernels_do_not_find_are_gathered():
    pixels = Pixels(Window((3, 3), *[(1, 1)] * 4), torch.Size([2, 48, 5, 5]))
    for cast, dtype in (
        (NVFP4.replace(scale={"block": 32}), torch.float32),
        (NVFP4, torch.float16),
        (TERNARY, torch.float32),
    ):
        x = torch.randn(pixels.matrix_shape).to(dtype)
        a, b = code_operand(x, CastCall(cast, 1), pixels), code_operand(torch.randn(7, 432), CastCall(NVFP4, 1))
        assert not cpp.takes_pixels(a, b)
        assert torch.equal(multiply(a, b, None, torch.float32), multiply(a.gathered(), b, None, torch.float32))
        assert cpp.multiply(x, a, b, None, torch.float32) is None
    for changes in ({"rotation": torch.ones(16)}, {"dim": 0}, {"cast": NVFP4.replace(rounding="stochastic")}):
        x = torch.randn(pixels.matrix_shape)
        assert not cpp.takes_pixels(code_operand(x, CastCall(NVFP4, 1)._replace(**changes), pixels), b), changes


@pytest.mark.slow
def test_random_products_are_those_of_the_plain_code():
    for one in products.products(1000, 1000):
        check(one)


@each("element", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_the_numbers_that_it_does_in_the_emulation(element):
    for name, (left, right) in CASTS.items():
        for is_left in (True, False):
            x, w, key = torch.randn(20, 96), torch.randn(20, 96), torch.tensor(5)
            (x if is_left else w)[3, 40] = element
            a, b = (code_operand(m, CastCall(cast, 1, key)) for m, cast in ((x, left), (w, right)))
            result = cpp.multiply(x, a, b, None, torch.float32)
            expected = emulated(a, b)
            assert torch.equal(result.isfinite(), expected.isfinite()), f"{name}, {element} on the left: {is_left}"
            line = result[3] if is_left else result[:, 3]
            assert line.isnan().all(), f"{name}: {element} vanished from {line}"


def emulated(left, right):
    """The product of the emulation's operands, float64."""
    sides = []
    for x, call, *_ in (left, right):
        operand = quantize_operand(x, call.cast, call.dim, call.key, call.amax, torch.float32, None, call.rotation)
        values = operand.values.double() * (1 if operand.factor is None else operand.factor.double())
        sides.append(values if call.dim == 1 else values.t())
    return sides[0] @ sides[1].t()


@each("name", CASTS)
def test_a_product_is_the_emulations_up_to_the_order_of_sums(name):
    left, right = CASTS[name]
    for dims in ((1, 1), (1, 0), (0, 0)):
        x, w = torch.randn(40, 160), torch.randn(48, 160)
        pair = [m if dim == 1 else m.t().contiguous() for m, dim in zip((x, w), dims, strict=True)]
        calls = [CastCall(cast, dim, torch.tensor(9)) for cast, dim in zip((left, right), dims, strict=True)]
        a, b = map(code_operand, pair, calls)
        expected = emulated(a, b)
        error = (cpp.multiply(a.x, a, b, None, torch.float32) - expected).abs().max() / expected.abs().max()
        assert error <= 2 * torch.finfo(torch.float32).eps, f"along {dims}: {error:.2e}"


def test_an_amax_from_outside_scales_both_operands():
    x, w = torch.randn(18, 64), torch.randn(20, 64)
    for amax in (0.5, 100.0, 0.0, torch.inf, torch.nan):
        a, b = (code_operand(m, CastCall(NVFP4, 1, None, torch.tensor(amax))) for m in (x, w))
        check(products.Product("nvfp4", a, b, None, torch.float32))


def test_sizes_of_zero_give_zeros_or_the_bias():
    bias = torch.randn(5)
    for rows, columns, inner in ((0, 5, 32), (4, 0, 32), (4, 5, 0)):
        a, b = (code_operand(torch.randn(size, inner), CastCall(NVFP4, 1)) for size in (rows, columns))
        assert torch.equal(multiply(a, b, None, torch.bfloat16), torch.zeros(rows, columns, dtype=torch.bfloat16))
        if columns == 5:
            assert torch.equal(multiply(a, b, bias, torch.float32), bias.expand(rows, 5))


SOME = ("stochastic", "tiles", "levels of rows", "ms-eden", "int8 by ternary")
MANY = pytest.param(CASTS, [(130, 90, 160), (400, 300, 512)], 20, marks=pytest.mark.slow)


@pytest.mark.parametrize("names, shapes, times", [(SOME, [(130, 90, 160)], 10), MANY])
def test_threads_do_not_change_bits(threads, names, shapes, times):
    for name, shape in itertools.product(names, shapes):
        threads(1)
        expected = (one := product(name, shape, 3)).by_cpp()
        for number in [2, 4] * times:
            threads(number)
            result = one.by_cpp()
            threads(1)
            assert same_bits(result, expected), f"{one} with {number} threads"


def test_operands_that_do_not_fit_each_other_or_their_matrix_are_refused():
    """Kernels would read the memory behind the smaller one."""
    x, w = (code_operand(torch.randn(4, features), CastCall(NVFP4, 1)) for features in (64, 48))
    for left, right in ((x, w), (w, x)):
        with pytest.raises(ValueError, match=r"contracts axes of one length, and got \(4, .*fit each other"):
            multiply(left, right, None, torch.float32)
    pixels = Pixels(Window((2,), *[(1,)] * 2, (0,), (0,)), torch.Size([1, 16, 5]))
    patches, others = code_operand(torch.randn(4, 16), CastCall(NVFP4, 1), pixels), code_operand(x.x[:, :32], w.call)
    with pytest.raises(ValueError, match=r"whose operand is \(4, 32\), and got .*\(4, 16\)"):
        multiply(patches, others, None, torch.float32)
    stretched = w._replace(shape=torch.Size((4, 64)))
    with pytest.raises(ValueError, match=r"whose operand is \(4, 64\), and got .*\(4, 48\).* by code_operand"):
        multiply(x, stretched, None, torch.float32)


def test_sums_beyond_int32_are_left_to_the_plain_code():
    inner = 2**21
    x = torch.full((1, inner), 127.0)
    wide = Cast("int4", Scale("fp32", "row"))
    a, b = code_operand(x, CastCall(INT8, 1)), code_operand(x, CastCall(wide, 1))
    assert cpp.multiply(x, a, b, None, torch.float32) is None
    expected = inner * 127.0**2
    with backend("cpp"):  # which compiles no casts
        assert abs(multiply(a, b, None, torch.float32).item() / expected - 1) < 1e-5


@each(
    ("left", "right", "block"),
    [
        (NVFP4, NVFP4, 16),
        (NVFP4, Cast("int4", Scale("fp32", 128)), 16),
        (INT8, NVFP4.replace(scale={"block": 48}), 48),
        (INT8, TERNARY, 0),
        (NVFP4.replace(scale={"block": 24}), NVFP4, None),
        (NVFP4.replace(scale={"block": 32}), NVFP4.replace(scale={"block": 48}), None),
        (NVFP4, INT8, None),  # of 127 steps on the right
        (Cast("e4m3", Scale("e8m0", 32)), NVFP4, None),
        (Cast("e3m0", Scale("e8m0", 32)), NVFP4, None),
        (NVFP4, Cast("int4", Scale("fp32", 32, statistic="minmax")), None),
        (NVFP4, Cast("int4", Scale("fp32", "tensor", source="delayed")), None),  # which does not show a NaN
    ],
)
def test_casts_that_the_kernels_multiply(left, right, block):
    assert cpp.shared_block(left.spec, 1, right.spec, 1) == block
    if block is None and right.scale.statistic != "minmax" and right.scale.source != "delayed":
        a, b = (code_operand(torch.randn(4, 96), CastCall(cast, 1)) for cast in (left, right))
        assert cpp.multiply(a.x, a, b, None, torch.float32) is None


def test_views_with_another_sign_are_read_as_torch_reads_them():
    x, w, bias = (torch.randn(size, 64, dtype=torch.complex64).conj().imag for size in (6, 7, 1))
    assert x.is_neg() and w.is_neg() and bias.is_neg()
    a, b, c, d = (code_operand(m, CastCall(NVFP4, 1)) for m in (x, w, x.resolve_neg(), w.resolve_neg()))
    bias = bias[0, :7]
    assert torch.equal(multiply(a, b, bias, torch.float32), multiply(c, d, bias.resolve_neg(), torch.float32))


def test_what_the_kernels_do_not_cast_is_cast_by_plain_code():
    x, w = torch.randn(6, 64), torch.randn(7, 64)
    expected = multiply(*(code_operand(m, CastCall(NVFP4, 1)) for m in (x, w)), None, torch.float32)
    left = code_operand(x.double(), CastCall(NVFP4, 1))
    right = code_operand(w, CastCall(NVFP4, 1, None, w.abs().max().double()))
    assert torch.equal(cpp.multiply(left.x, left, right, None, torch.float32), expected)
