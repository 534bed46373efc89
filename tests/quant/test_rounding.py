"""Stochastic rounding, its random bits, a pure function of key and index, and what stands for its derivative."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, Scale, convert, quantize
from lightning_lowbit._torch.devices import power_of_two
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.quant import SURROGATES, quantize_operand, surrogate_factor, through_rounding
from lightning_lowbit.quant.operand import scaled_elements
from lightning_lowbit.quant.rounding import (
    _converted,
    _step_by_bits,
    grid_step,
    mix_key,
    round_nearest,
    round_stochastic,
    uniform,
    uniform_by_fours,
)
from tests.quant.tensors import NVFP4, casts, expected_fields, same, sample
from tests.references import quantize as reference
from tests.tables import each

KEYS = [0, 1, -1, 2**31, -(2**31) - 5, 0x0123456789ABCDEF, -0x7EDCBA9876543210]
SMALLEST, LARGEST = 2.0 ** -(reference.RANDOM_BITS + 1), 1 - 2.0 ** -(reference.RANDOM_BITS + 1)
DRAWS = [uniform, uniform_by_fours]


def bits_of(key, count, draws=uniform_by_fours):
    return draws(torch.arange(count, dtype=torch.int32), torch.tensor(key))


def probes(name):
    """Grid, midpoints and their neighbors, values far out, subnormals and zeros."""
    grid = reference.magnitudes(name)
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    x = np.concatenate([exact, np.nextafter(exact, np.float32(9e9)), np.nextafter(exact, np.float32(-9e9))])
    x = np.concatenate([x, np.float32([2.0**-149, 2.0**-126, 1e-30, grid[-1] * 1.01, 1e30, np.inf, 0.0])])
    return torch.from_numpy(np.concatenate([x, -x]))


@each("name", ELEMENT_FORMATS)
def test_only_neighbors(name):
    x = probes(name)
    lower, upper = (torch.from_numpy(bound.astype(np.float32)) for bound in reference.neighbors(x.numpy(), name))
    for u in (SMALLEST, 0.1, 0.5, 0.9, LARGEST):
        found = round_stochastic(x, ELEMENT_FORMATS[name], torch.tensor(u).expand_as(x))
        wrong = (found != lower) & (found != upper)
        assert not wrong.any(), (
            f"{name}, u = {u!r}: {x[wrong][:4].tolist()} became {found[wrong][:4].tolist()}, "
            f"not {lower[wrong][:4].tolist()} or {upper[wrong][:4].tolist()}"
        )
    nan = torch.tensor([torch.nan, 1.0, -torch.nan])
    assert round_stochastic(nan, ELEMENT_FORMATS[name], torch.full((3,), 0.3)).isnan().tolist() == [True, False, True]


@each("name", ["e4m3", "e5m2", "e6m1"])
def test_steps_from_bits_are_those_from_products(name):
    format = {**ELEMENT_FORMATS, **SCALE_FORMATS}[name]
    magnitude = every_bfloat16().abs().clamp(2.0**format.min_exponent, format.max)
    assert torch.equal(_step_by_bits(magnitude, format), grid_step(magnitude, format))


@each("name", ["e4m3", "e5m2"])
def test_conversions_to_fp8_have_the_bits_of_sums(name):
    """The sign of zero, too, which a conversion keeps and a sum does not."""
    format, x = ELEMENT_FORMATS[name], torch.cat([probes(name), every_bfloat16()])
    converted = _converted(x.clamp(-format.max, format.max), format)
    assert torch.equal(converted.view(torch.int32), round_nearest(x, format).view(torch.int32))


def test_powers_of_two_are_exact():
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0**exponent for exponent in exponents.tolist()]


def every_bfloat16():
    """All bfloat16 values that are no NaN, and their neighbors among float32 values."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    return torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, -torch.tensor(torch.inf))])


@each(
    ("scale", "unbiased"),
    [
        (Scale("e8m0", 16, "floor", prescale=0.75), True),
        (Scale("fp32", "tensor", "power_of_two"), True),
        (Scale("e8m0", 16, "ceil"), True),
        (Scale("e4m3", 16, "up"), True),
        (Scale("e8m0", 16, "floor"), False),
        (Scale("e4m3", 16), False),
    ],
)
def test_scales_leave_room_for_the_largest_element(scale, unbiased):
    """Under them stochastic rounding is unbiased; the others saturate, and the test sees that they do."""
    scaled = scaled_elements(torch.randn(1024, 16), Cast("e2m1", scale), 1)
    beyond = (scaled.abs() > 6 * (1 + 2.0**-22)).any(1).float().mean()
    assert beyond == 0 if unbiased else beyond > 0.1, f"{scale}: {beyond:.0%} of the blocks saturate"


@pytest.mark.parametrize("draws", DRAWS)
@each("key", KEYS)
def test_hash_equals_reference(key, draws):
    ends = [2**31 - 1, 2**30, 123456789, -1, -2, -3, -4, -(2**31)]
    index = torch.cat([torch.arange(4096), torch.tensor(ends)]).to(torch.int32)
    found = draws(index, torch.tensor(key)).double().numpy()
    expected = getattr(reference, draws.__name__)(index.numpy(), key)
    np.testing.assert_array_equal(found, expected, err_msg=f"key {key:#x}")
    assert found.min() >= SMALLEST
    assert found.max() <= LARGEST


def test_mix_key_is_splitmix64():
    found = mix_key(torch.tensor(KEYS)).tolist()
    assert [key % 2**64 for key in found] == [reference.splitmix64(key % 2**64) for key in KEYS]


def layer_keys(steps=4, layers=3):
    """int64 ``[steps, layers, 6]``: the keys of consecutive steps, made as training makes them."""
    model = convert(nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)]), "nvfp4")
    keys = LayerKeys(model, seed=0)
    found = []
    for step in range(steps):
        keys.fill_(step)
        found.append(torch.stack([layer.lowbit.keys for layer in keys.layers.values()]).clone())
    return torch.stack(found)


def chi_square_z(samples, bins=256):
    """Standardized chi-square statistic of samples in (0, 1)."""
    counts = torch.bincount((samples.flatten() * bins).long(), minlength=bins).double()
    expected = samples.numel() / bins
    return float(((counts - expected).square().sum() / expected - (bins - 1)) / (2 * (bins - 1)) ** 0.5)


@pytest.mark.parametrize("draws", DRAWS)
def test_uniform_along_indices_and_along_keys(draws):
    keys = layer_keys(steps=2)
    for key in keys.flatten().tolist():
        assert abs(chi_square_z(bits_of(key, 2**15, draws))) < 5, f"key {key}: not uniform over the elements"
    many = layer_keys(steps=400).flatten()
    for index in (0, 1, 2, 255, 65536):
        samples = draws(torch.full_like(many, index, dtype=torch.int32), many)
        assert abs(chi_square_z(samples, bins=64)) < 5, f"element {index}: not uniform over the keys"


@pytest.mark.parametrize("draws", DRAWS)
def test_no_correlation_between_steps_layers_operands_and_neighbors(draws):
    count, keys = 2**14, layer_keys().flatten().tolist()
    samples = torch.stack([bits_of(key, count, draws) for key in keys]).double() - 0.5
    for lag in (0, *range(1, 9), 16, 96, 97, 128, 1024):
        z = samples @ samples.roll(-lag, dims=1).t() * (12 / count**0.5)  # standard normal where independent
        if lag == 0:
            assert 0.9 < z[~torch.eye(len(keys), dtype=torch.bool)].std() < 1.1
            z.fill_diagonal_(0)
        streams = divmod(z.abs().argmax().item(), len(keys))
        assert z.abs().max() < 5, f"lag {lag}: streams {streams} correlate: z = {z.abs().max():.1f}"


def test_four_that_share_a_hash_are_independent():
    """Of the four together, and of any two of them along elements and along keys, all values are as frequent."""
    along = bits_of(int(mix_key(torch.tensor(3))), 2**20).view(-1, 4)
    keys = mix_key(torch.arange(2**18))
    index = torch.arange(4, dtype=torch.int32)[:, None].expand(-1, len(keys))
    for name, fours in (("elements", along), ("keys", uniform_by_fours(index, keys).t())):
        places = (fours * 16).long()
        joint = ((places[:, 0] * 16 + places[:, 1]) * 16 + places[:, 2]) * 16 + places[:, 3]
        assert abs(chi_square_z((joint + 0.5) / 2**16, bins=2**16)) < 5, f"four along {name}"
        for one, other in itertools.combinations(range(4), 2):
            pairs = ((fours[:, one] * 512).floor() + fours[:, other]) / 512
            assert abs(chi_square_z(pairs.double(), bins=2**16)) < 5, f"{one} and {other} along {name}"


def test_global_generator_neither_matters_nor_moves():
    x = torch.linspace(-3, 3, 256).view(4, 64)
    cast = Cast(rounding="stochastic")
    torch.manual_seed(1)
    first = quantize(x, cast, key=7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = quantize(x, cast, key=7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was advanced"
    assert torch.equal(first.codes, second.codes), "the global generator decides the bits"
    assert not torch.equal(first.codes, quantize(x, cast, key=8).codes), "the key does not decide the bits"
    assert torch.equal(first.codes, quantize(x, cast, key=torch.tensor(7)).codes), "as a tensor the key is another"


def factor(kind, values, element):
    """The factors of elements that are these values in units of their scale."""
    cast = Cast(element, Scale("fp32", "tensor"))
    x = torch.as_tensor(values, dtype=torch.float32).reshape(1, -1)
    return surrogate_factor(kind, x, cast, -1, torch.tensor(ELEMENT_FORMATS[element].max))[0]


# The largest level and half the step at it: 6 + 1, 7 + 1/2 ...
@each(
    ("element", "last"),
    [("e2m1", 7.0), ("int4", 7.5), ("int8", 127.5), ("e3m0", 24.0), ("e4m3", 464.0), ("ternary", 1.5), ("e1m2", 1.875)],
)
def test_trust_ends_half_a_step_beyond_the_largest_level(element, last):
    beyond = torch.nextafter(torch.tensor(last), torch.tensor(torch.inf)).item()
    largest = ELEMENT_FORMATS[element].max
    found = factor("trust", [last, -last, beyond, -beyond, largest, 0.0, 1e30], element)
    assert found.tolist() == [1, 1, 0, 0, 1, 1, 0], element


def test_trust_follows_the_scales():
    """floor gives 7.5 and 5 the scale 1, of which only 7.5 lies beyond 7; rceil gives 7.5 the scale 2."""
    x = torch.tensor([[7.5, 5.0, -7.0], [-2.0, 0.1, 0.0]])
    for rule, expected in (("floor", [[0, 1, 1], [1, 1, 1]]), ("rceil", [[1, 1, 1], [1, 1, 1]])):
        found = surrogate_factor("trust", x, Cast("e2m1", Scale("e8m0", 32, rule)), -1)
        assert found.tolist() == expected, rule
        assert found.dtype == torch.float32


@each("element", ["e2m1", "int4", "e1m2", "e3m0"])
def test_dge_is_the_clipped_derivative_of_a_smooth_step(element):
    """With t from -1 at a level to 1 at the next: |t|^(1/5 - 1) / 5, at most 3; beyond the largest level 1/5."""
    levels = torch.from_numpy(reference.magnitudes(element)).float()
    t = torch.linspace(-1, 1, 65)[:-1]
    values = (levels[:-1, None] + (t + 1) / 2 * (levels[1:] - levels[:-1])[:, None]).flatten()
    expected = (t.abs() ** (1 / 5 - 1) / 5).clamp(max=3).repeat(len(levels) - 1)
    beyond = torch.tensor([levels[-1], levels[-1] * 1.01, levels[-1] * 100])
    values, expected = torch.cat([values, beyond]), torch.cat([expected, torch.full((3,), 1 / 5)])
    for sign in (1, -1):
        torch.testing.assert_close(factor("dge", sign * values, element), expected)


@pytest.mark.fast("dge")
@pytest.mark.parametrize("kind", SURROGATES)
def test_factors_are_those_of_the_scaled_elements(kind):
    """For every way of making scales, blocks along either dimension, sizes that do not fill them, bfloat16."""
    x = sample(13, 40).bfloat16()
    for block, dim in itertools.product((16, (16, 16), "row", "tensor"), (0, 1)):
        for cast in casts("e2m1", block)[::3]:
            fields = expected_fields(x.float(), cast, dim, None, "scaled", "spread")
            counts = fields["spread"] != 0
            found = surrogate_factor(kind, x, cast, dim)
            expected = factor(kind, fields["scaled"].flatten(), "e2m1").view_as(x)
            assert (found.shape, found.dtype) == (x.shape, torch.float32)
            torch.testing.assert_close(
                found[counts], expected[counts], rtol=1e-4, atol=0, msg=f"{kind} of {cast}, {dim}"
            )


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_gradient_through_rounding(kind):
    x, gradient = sample(8, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    amax = x.abs().max() / 4  # some elements saturate
    factors = surrogate_factor(kind, x, NVFP4, 0, amax)
    found = through_rounding(gradient, kind, x, NVFP4, 0, amax)
    assert len(factors.unique()) > 1
    assert found.dtype == torch.bfloat16
    same(found, (gradient.float() * factors).bfloat16(), "multiplied in float32, rounded once")


@pytest.mark.parametrize("kind", SURROGATES)
def test_rounding_is_the_derivative_of_nothing_else(kind):
    """amax is that of the quantizer: factors agree with what quantize_operand saturates."""
    x = torch.tensor([[8.0, 5.0, -7.5, 0.2]])
    cast, amax = Cast("e2m1", Scale("fp32", "tensor")), torch.tensor(6.0)
    values = quantize_operand(x, cast, -1, amax=amax).values
    found = surrogate_factor(kind, x, cast, -1, amax)
    assert values[0, :3].tolist() == [6, 4, -6]
    assert found[0, :3].tolist() == ([0, 1, 0] if kind == "trust" else pytest.approx([0.2, 3, 0.2]))


def test_an_unknown_surrogate():
    for call in (surrogate_factor, lambda *rest: through_rounding(torch.ones(1, 4), *rest)):
        with pytest.raises(ValueError, match="Unknown surrogate 'dgee'. Did you mean 'dge'.*'trust', 'dge'"):
            call("dgee", torch.ones(1, 4), Cast(), -1)
