"""Changes before quantization: means, smoothing by powers of two, the Hadamard transform and its signs."""

import itertools
import math

import numpy as np
import pytest
import torch

from lightning_lowbit.quant import Hadamard, amax_along, rotate, smoothing_factor, split_mean
from lightning_lowbit.quant.rounding import mix_key, uniform
from lightning_lowbit.quant.transforms import SIZES
from tests.nn.layers import rotation
from tests.quant.tensors import same
from tests.tables import each

LIMITS = {torch.float32: 64, torch.bfloat16: 64, torch.float16: 14}  # of the exponents of factors


# --- the mean over rows -----------------------------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape", [(1, 5), (64, 48), (4097, 3)])
def test_split_mean(shape, dtype):
    x = (torch.randn(shape) + torch.linspace(-3, 3, shape[1])).to(dtype)
    before = x.clone()
    rest, mean = split_mean(x)
    assert (rest.dtype, mean.dtype) == (dtype, torch.float32)
    assert (rest.shape, mean.shape) == (x.shape, (1, shape[1]))
    torch.testing.assert_close(mean.double(), x.double().mean(0, keepdim=True), rtol=1e-5, atol=1e-6)
    unit = torch.finfo(dtype).eps * float(x.abs().max())
    assert (rest.double() + mean - x.double()).abs().max() <= unit, "rest + mean is not x"
    # Each of n roundings is off by half a unit at most, as good as independently; that of the mean counts n times.
    bound = 4 * unit * shape[0] ** 0.5 + shape[0] * torch.finfo(torch.float32).eps * float(x.abs().max())
    assert (rest.double().sum(0).abs() <= bound).all(), "the rest has a mean"
    same(x, before, "the input was changed")


@each("shape", [(0, 5), (3, 0), (0, 0)])
def test_the_mean_of_nothing(shape):
    rest, mean = split_mean(torch.empty(shape))
    assert rest.shape == shape
    same(mean, torch.zeros(1, shape[1]), "the mean of no rows")


def test_a_mean_of_what_is_not_finite():
    x = torch.ones(4, 3)
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    rest, mean = split_mean(x)
    assert rest[:, 2].isfinite().all(), "the damage leaves its column"
    assert not rest[1, 0].isfinite(), "an infinity became finite"
    assert not mean[0, :2].isfinite().any(), "the mean hides what is not finite"


# --- smoothing --------------------------------------------------------------------------------------------------------


def definition(amax, limit):
    """The largest power of two within 2^±limit with s * amax <= 1."""
    if not 0 < amax < math.inf:  # NaN too
        return 1.0
    return next((2.0**k for k in range(limit, -limit, -1) if 2.0**k * amax <= 1), 2.0**-limit)


@each("dtype", LIMITS)
def test_factors_by_definition(dtype):
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    beside = [torch.nextafter(powers, torch.full_like(powers, towards)) for towards in (0.0, torch.inf)]
    drawn, ends = torch.randn(1000).mul(30).exp2(), [0.0, torch.finfo(torch.float32).max, torch.inf, torch.nan]
    amax = torch.cat([powers, *beside, drawn, torch.tensor(ends)])
    found = smoothing_factor(amax, dtype)
    assert found.dtype == dtype
    same(found.float(), torch.tensor([definition(one, LIMITS[dtype]) for one in amax.tolist()]), f"factors in {dtype}")


@each("shape", [(), (0,), (7,), (3, 1), (2, 3, 4)])
def test_factors_of_any_shape(shape):
    amax = torch.rand(shape) + 0.1
    before, found = amax.clone(), smoothing_factor(amax)
    assert (found.shape, found.dtype) == (shape, torch.float32)
    assert torch.equal(found.flatten(), smoothing_factor(amax.flatten()))
    assert torch.equal(amax, before), "amax was changed"


# --- the largest magnitude --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's words on NaN
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("shape", [(5,), (1, 6), (6, 1), (4, 7), (2, 3, 4), (1, 1), (0,), (0, 4), (4, 0), (2, 0, 3), (0, 0)])
def test_largest_along_a_dimension(shape, dtype):
    x = torch.randn(shape).to(dtype)
    damaged = torch.where(x > 0.5, torch.nan, torch.where(x < -0.5, -torch.inf, x))
    for values in (x, damaged, x.mT.contiguous().mT if x.dim() > 1 else x):
        before = values.clone()
        for dim in range(-x.dim(), x.dim()):
            found = amax_along(values, dim)
            expected = np.abs(values.float().numpy()).max(axis=dim, initial=0, keepdims=True)
            assert found.dtype == torch.float32
            same(found, torch.from_numpy(expected), f"along {dim}")
            found.zero_()  # which leaves the argument alone
        same(values, before, "the input was changed")


# --- the Hadamard transform -------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
KEYS = mix_key(torch.arange(2000))
SIGNS = Hadamard(16, "keyed").diagonals(KEYS, CPU)


def signs_of(size, key=None):
    keyed = {} if key is None else {"signs": "keyed"}
    return Hadamard(size, **keyed).diagonal(None if key is None else torch.tensor(key), CPU)


def matrix(size, key=None):
    """T: what the unit vectors are rotated to."""
    return rotate(torch.eye(size), signs_of(size, key), 1)


@each("key", [None, 5])
@each("size", SIZES)
def test_matrix(size, key):
    transform, signs = matrix(size, key), signs_of(size, key)
    assert signs.dtype == transform.dtype == torch.float32
    expected = rotation(Hadamard(size, "fixed" if key is None else "keyed"), key)
    torch.testing.assert_close(transform.double(), expected, rtol=1e-7, atol=0)
    unsigned = transform * signs[:, None]
    same(unsigned, unsigned.t(), f"H of {size} is not symmetric")
    product = transform.double() @ transform.double().t()
    torch.testing.assert_close(product, torch.eye(size).double(), rtol=0, atol=1e-6)
    if size in (16, 64):  # sqrt(n) is a power of two
        same(product, torch.eye(size).double(), f"T of {size} is not exactly orthogonal")


@each("dim", [0, 1])
@each("size", SIZES)
def test_rotate(size, dim):
    """Each group times T; zeros fill the last group and take part."""
    transform, signs, length = matrix(size), signs_of(size), 2 * size - 3
    x = torch.randn(length, 5) if dim == 0 else torch.randn(5, length)
    before = x.clone()
    found = rotate(x, signs, dim)
    padded = torch.zeros(2 * size, 5)
    padded[:length] = x if dim == 0 else x.t()
    expected = torch.cat([transform.double().t() @ group.double() for group in padded.split(size)])
    expected = expected if dim == 0 else expected.t()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    same(x, before, "the input was changed")
    same(rotate(x.t(), signs, 1 - dim).t(), found, f"{size}: rows and columns differ")
    back = rotate(found, signs, dim, inverse=True)
    torch.testing.assert_close(back.narrow(dim, 0, length), x, rtol=0, atol=2e-6)
    assert back.narrow(dim, length, 3).abs().max() < 2e-6, "rotated back, the padding is not zero"


@each("dim", [0, 1])
@each("size", SIZES)
def test_the_order_of_sums_is_fixed(size, dim):
    """Number by number: neighbors 1 apart, then 2, 4, ...; powers of two first, and what is left of 1/sqrt(n) last."""
    x, signs = torch.randn(2 * size, 3), signs_of(size, 5)
    early, late = {16: (0.25, 1), 32: (0.25, 0.5**0.5), 64: (0.125, 1), 128: (0.125, 0.5**0.5)}[size]
    expected = torch.empty_like(x)
    for group, column in itertools.product(range(2), range(3)):
        rows = slice(group * size, (group + 1) * size)
        values = list(x[rows, column].numpy() * signs.numpy() * np.float32(early))
        for h in (1 << i for i in range(size.bit_length() - 1)):
            values = [values[i - h] - values[i] if i & h else values[i] + values[i + h] for i in range(size)]
        expected[rows, column] = torch.from_numpy(np.array(values) * np.float32(late))
    found = rotate(x if dim == 0 else x.t(), signs, dim)
    same(found if dim == 0 else found.t(), expected, f"{size} along {dim}")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [16, 64])
def test_bfloat16_is_rounded_once(size, dim):
    """Sums of such integers are exact in float32, and too long for bfloat16: one rounding is all there may be."""
    x = torch.randint(-255, 256, (size, size)).bfloat16()
    transform = matrix(size).double()
    exact = transform.t() @ x.double() if dim == 0 else x.double() @ transform
    found = rotate(x, signs_of(size), dim)
    assert found.dtype == torch.bfloat16
    same(found, exact.float().bfloat16(), f"{size} along {dim}")
    assert (found.double() != exact).any(), "the test needs sums that are rounded"


@each("dim", [0, 1])
@each("shape", [(0, 8), (8, 0), (0, 16), (16, 0), (0, 0)])
def test_empty(shape, dim):
    found = rotate(torch.empty(shape), signs_of(16), dim)
    expected = list(shape)
    expected[dim] = -(-shape[dim] // 16) * 16
    assert list(found.shape) == expected


def test_what_is_not_finite_stays_in_its_group():
    x = torch.randn(4, 48)
    x[1, 20], x[2, 40] = torch.inf, torch.nan
    found = rotate(x, signs_of(16), 1)
    assert not found[1, 16:32].isfinite().any(), "an infinity became finite"
    assert found[2, 32:].isnan().all(), "a NaN became finite"
    found[1, 16:32] = found[2, 32:] = 0
    assert found.isfinite().all(), "the damage leaves its group"


# --- keyed signs ------------------------------------------------------------------------------------------------------


def test_keyed_signs_need_a_key():
    with pytest.raises(ValueError, match="Keyed signs of a Hadamard transform need a key.*LayerKeys"):
        Hadamard(signs="keyed").diagonal(None, CPU)
    same(Hadamard().diagonal(torch.tensor(3), CPU), signs_of(16), "fixed signs with a key")


def test_keyed_signs_are_a_function_of_the_key():
    key = KEYS[0]
    same(Hadamard(16, "keyed").diagonal(key, CPU), signs_of(16, int(key)), "the same key twice")
    same(SIGNS[:9], torch.stack([signs_of(16, int(key)) for key in KEYS[:9]]), "several keys at once")
    same(Hadamard(16, "keyed").diagonal(key.reshape(1), CPU), signs_of(16, int(key)), "a key of one element")
    patterns = {tuple(signs_of(128, int(key)).tolist()) for key in KEYS[:200]}
    assert len(patterns) == 200, "keys share their signs"


def test_keyed_signs_are_balanced():
    """Every sign, every pair and every pattern of four neighbors, over keys as layers have them."""
    signs = SIGNS
    assert set(signs.unique().tolist()) == {-1, 1}
    z = signs.sum(0) / len(KEYS) ** 0.5
    assert z.abs().max() < 4, f"sign {z.abs().argmax()} leans to one side: z = {z.abs().max():.1f}"
    total = signs.sum() / signs.numel() ** 0.5
    assert total.abs() < 4, f"all signs together lean to one side: z = {total:.1f}"
    pairs = (signs.t() @ signs / len(KEYS) ** 0.5).fill_diagonal_(0)
    assert pairs.abs().max() < 4.5, f"two signs go together: z = {pairs.abs().max():.1f}"
    steps = (signs[1:] * signs[:-1]).sum(0) / len(KEYS) ** 0.5
    assert steps.abs().max() < 4, f"signs of consecutive keys go together: z = {steps.abs().max():.1f}"
    for start in range(0, 16, 4):
        bits = (signs[:, start : start + 4] > 0).int() @ torch.tensor([1, 2, 4, 8], dtype=torch.int32)
        counts, expected = torch.bincount(bits, minlength=16), len(KEYS) / 16
        z = (counts - expected) / (expected * 15 / 16) ** 0.5
        assert z.abs().max() < 4.5, f"signs {start} to {start + 3}: pattern {z.abs().argmax()} occurs {counts.tolist()}"


def test_keyed_signs_are_not_the_bits_of_stochastic_rounding():
    """Both come from the key of an operand; neither the raw key nor the element index may tie them together."""
    index = torch.arange(64, dtype=torch.int32)
    for name, keys in (("key", KEYS), ("mixed key", mix_key(KEYS))):
        draws = uniform(index, keys[:, None]) - 0.5
        z = SIGNS.t() @ draws * (12 / len(KEYS)) ** 0.5
        assert z.abs().max() < 5, f"{name}: sign and draw {divmod(z.abs().argmax().item(), 64)} correlate"


def test_signs_are_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.float64)
    try:
        signs = Hadamard(16, signs="keyed").diagonal(torch.tensor(3), torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert signs.dtype == torch.float32
