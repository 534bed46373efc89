"""Spikes that were planted are found, and nothing else is; what a cast makes of a tensor is what a loop says."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.metrics import (
    bias,
    cast_statistics,
    code_histogram,
    count_spikes,
    levels,
    mse,
    sqnr,
    swiglu_alignment,
)


def noise(steps=300, seed=0, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    return (3 + size * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()


def decay(steps=300):
    return [2 + 5 * math.exp(-step / 60) for step in range(steps)]


def with_values(losses, values):
    return [values.get(step, loss) for step, loss in enumerate(losses)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [[100], [40, 150, 151, 290], [20], [299]])
def test_planted_spikes(seed, steps):
    """Neighbours are one spike; the first value with a full window before it may be one, and so may the last."""
    losses = noise(seed=seed)
    quiet = count_spikes(losses, threshold=8)
    assert quiet == 0
    found = count_spikes(with_values(losses, dict.fromkeys(steps, 6.0)), threshold=8)
    assert found == len([step for step in steps if step - 1 not in steps])


def test_a_run_of_high_values_is_one_spike_however_long():
    losses = with_values(noise(), {step: 6.0 - step / 1000 for step in range(100, 150)})
    assert count_spikes(losses, threshold=8) == 1


def test_a_spike_does_not_hide_the_next():
    """What jumped is not among the values that the next one is compared with."""
    losses = noise()
    for step in range(50, 290, 3):  # a third of all
        losses[step] = 6.0
    assert count_spikes(losses, threshold=8) == len(range(50, 290, 3))


def test_noise_is_rarely_a_spike():
    counts = [count_spikes(noise(1000, seed)) for seed in range(5)]
    assert sum(counts) <= 5 * 1000 * 0.003, f"too many of 1000 values each: {counts}"


@pytest.mark.parametrize("size", [0.003, 0.005, 0.01, 0.02])
def test_noise_in_rounded_losses_is_rarely_a_spike(size):
    """Logged in bfloat16, most losses are the same number, and the next larger one is no jump."""
    losses = torch.tensor(noise(size=size)).bfloat16().tolist()
    assert count_spikes(losses) <= 1


@pytest.mark.parametrize("losses", [decay(), [3.0] * 100, [-float(step) for step in range(100)]])
def test_a_decreasing_loss_has_none(losses):
    assert count_spikes(losses) == 0


def test_a_decreasing_loss_with_noise():
    losses = [a + b for a, b in zip(decay(), noise(size=0.02), strict=True)]
    assert count_spikes(losses) <= 1
    assert count_spikes(with_values(losses, {30: 12.0, 200: 8.0})) - count_spikes(losses) == 2


def test_a_downward_jump_is_none():
    assert count_spikes(with_values(noise(), {100: 0.1}), threshold=8) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value):
    """Wherever it is: also at the start, where there is nothing to compare with."""
    for steps in ([0], [5], [100], [299]):
        assert count_spikes(with_values(noise(), dict.fromkeys(steps, value)), threshold=8) == 1, steps
    assert count_spikes(with_values(noise(), {100: value, 101: value, 102: 6.0, 104: value}), threshold=8) == 2
    assert count_spikes([value] * 10) == 1


def test_not_finite_values_do_not_fill_the_window():
    losses = [math.nan] * 5 + [1.0, 1.1, 50.0]
    assert count_spikes(losses, window=3) == 1, "two values are no full window of three"
    assert count_spikes(losses, window=2) == 2


@pytest.mark.parametrize("window", [2, 5, 20])
def test_window_borders(window):
    """A jump is told from the first value on that has a full window before it."""
    calm = [1.0, 1.1] * window
    assert count_spikes([*calm[: window - 1], 50.0], window) == 0
    assert count_spikes([*calm[:window], 50.0], window) == 1
    assert count_spikes(calm[:window], window) == 0
    assert count_spikes([], window) == count_spikes([1.0], window) == 0


def test_only_the_window_is_compared_with():
    """A level left behind is forgotten."""
    losses = [9.0, 9.1] * 10 + [1.0, 1.1] * 10
    assert count_spikes([*losses, 5.0], window=20) == 1
    assert count_spikes([*losses, 5.0], window=40) == 0


def test_the_threshold_is_in_robust_standard_deviations():
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]  # median 3, median absolute deviation 1
    edge = 3 + 2 * 1.4826
    assert count_spikes([*losses, edge + 1e-9], window=5, threshold=2) == 1
    assert count_spikes([*losses, edge - 1e-9], window=5, threshold=2) == 0


@pytest.mark.parametrize(
    ("window", "threshold"), [(1, 6.0), (0, 6.0), (-5, 6.0), (20, 0.0), (20, -1.0), (20, math.nan)]
)
def test_wrong_settings(window, threshold):
    with pytest.raises(ValueError, match=f"got {window} and {threshold}"):
        count_spikes([1.0], window, threshold)


# --- what a cast makes of a tensor ------------------------------------------------------------------------------------

CASTS = [
    Cast("e2m1", Scale("e4m3", 16, two_level=True)),
    Cast("e2m1", Scale("e4m3", (4, 16), two_level=True)),
    Cast("e2m1", Scale("e4m3", 16, "up")),
    Cast("e2m1", Scale("e8m0", 32)),
    Cast("e1m2", Scale("e8m0", 32, "floor")),
    Cast("int4", Scale("fp32", 24)),
    Cast("ternary", Scale("fp32", "row")),
    Cast("e4m3", Scale("fp32", "tensor")),
]


def sample(*shape, seed=0, dtype=torch.float32):
    """Rows of very different sizes, so that scales saturate and underflow; zeros among them, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).mul(4).exp()
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    x[shape[0] // 2] = 0
    return x.to(dtype)


def scale_of(quantized, row, column):
    """The scale of one element, float64, from what is stored."""
    scale, scales = quantized.cast.scale, quantized.scales
    scales = scales.double() if scale.storage.dtype is not None else scale.storage.decode(scales).double()
    height, width = scale.block if isinstance(scale.block, tuple) else (1, scale.block)
    if isinstance(width, str):
        height, width = (1, 10**9) if width == "row" else (10**9, 10**9)
    factor = 1.0 if quantized.tensor_scale is None else quantized.tensor_scale.item()
    return scales[row // height, column // width].item() * factor


def slow(x, quantized):
    """The seven numbers by one loop over elements, in Python's floats."""
    q = quantized.dequantize()
    signal = noise = size = growth = 0.0
    nonzero = underflowed = saturated = 0
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            a, b = x[row, column].item(), q[row, column].item()
            largest = scale_of(quantized, row, column) * quantized.cast.format.max
            signal, noise, size = signal + a * a, noise + (a - b) ** 2, size + abs(a)
            growth += (b - a) * ((a > 0) - (a < 0))
            nonzero += a != 0
            underflowed += a != 0 and b == 0
            saturated += 0 < largest * (1 + 1e-6) < abs(a)
    return {
        "sqnr": 10 * math.log10(signal / noise),
        "mse": noise / x.numel(),
        "relative_mse": noise / signal,
        "bias": growth / size,
        "underflow": underflowed / nonzero,
        "saturation": saturated / x.numel(),
        "not_finite": 0.0,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_numbers_of_a_cast_equal_a_loop(cast, dtype):
    underflow = saturation = 0.0
    for seed in range(3):
        x = sample(9, 40, seed=seed, dtype=dtype)
        expected = slow(x, quantize(x, cast))
        found = cast_statistics(x, cast)
        assert found.floats() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        q = quantize(x, cast).dequantize()
        functions = {"sqnr": sqnr(x, q), "mse": mse(x, q), "relative_mse": mse(x, q, relative=True), "bias": bias(x, q)}
        for name, value in functions.items():
            assert value.item() == found.floats()[name], name
        underflow, saturation = underflow + expected["underflow"], saturation + expected["saturation"]
    assert underflow > 0, "the sample does not test underflow"
    assert (saturation > 0) == (cast.scale.format == "e4m3" or cast.scale.rounding == "floor")


@pytest.mark.parametrize("dim", [0, 1, -3])
def test_numbers_do_not_depend_on_where_blocks_lie(dim):
    x, cast = sample(8, 64), Cast("e2m1", Scale("e4m3", 16))
    turned = {0: x.t(), 1: x, -3: x.t().reshape(64, 2, 4)}[dim]
    assert cast_statistics(turned, cast, dim=dim).floats() == pytest.approx(cast_statistics(x, cast).floats(), rel=1e-9)


def test_numbers_by_hand():
    x = torch.tensor([[7.0, 3.4, -0.4, 0.0]])
    cast = Cast("int4", Scale("fp32", "tensor"))
    found = cast_statistics(x, cast)  # becomes 7, 3, 0, 0
    assert found.floats() == pytest.approx(
        {
            "sqnr": 10 * math.log10(60.72 / 0.32),
            "mse": 0.08,
            "relative_mse": 0.32 / 60.72,
            "bias": -0.8 / 10.8,
            "underflow": 1 / 3,
            "saturation": 0.0,
            "not_finite": 0.0,
        },
        rel=1e-6,
    )
    assert found.codes.tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1]
    late = cast_statistics(x, cast, amax=torch.tensor(3.5))  # a scale of 1/2 gives 3.5, 3.5, -0.5, 0
    assert late.floats()["saturation"] == 1 / 4
    assert late.floats()["bias"] == pytest.approx((-3.5 + 0.1 + 0.1) / 10.8, rel=1e-6)
    assert late.floats()["underflow"] == 0


@pytest.mark.parametrize(("rounding", "saturation"), [("nearest", 1 / 16), ("up", 0.0)])
def test_a_scale_rounded_down_saturates(rounding, saturation):
    """6.3 needs a scale of 1.05; E4M3 has 1 and 1.125."""
    x = torch.full((1, 16), 0.7)
    x[0, 3] = -6.3
    assert cast_statistics(x, Cast("e2m1", Scale("e4m3", 16, rounding))).floats()["saturation"] == saturation


@pytest.mark.parametrize("element", ["int4", "int8", "e2m1", "e4m3"])
@pytest.mark.parametrize(
    "scale", [Scale("fp32", 16), Scale("fp32", "tensor"), Scale("e4m3", 128, two_level=True)], ids=str
)
def test_rounding_of_float32_scales_is_no_saturation(element, scale):
    """The largest element of a block is what its scale was made for, whatever the last bit says."""
    for seed in range(20):
        x = torch.randn(1, 128, generator=torch.Generator().manual_seed(seed))
        assert cast_statistics(x, Cast(element, scale)).floats()["saturation"] == 0


def test_a_scale_that_underflows_is_underflow_only():
    x = torch.full((2, 16), 1e-7)
    x[0] = 1.0
    x[1, 0] = 0
    error = cast_statistics(x, CASTS[0])
    assert quantize(x, CASTS[0]).scales[1].float() == 0, "the sample does not test what it should"
    assert error.floats()["underflow"] == 15 / 31
    assert error.floats()["saturation"] == 0
    assert error.codes.sum() == 32


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_zeros_and_what_is_exact(cast):
    nothing = {"mse": 0.0, "relative_mse": 0.0, "bias": 0.0, "underflow": 0.0, "saturation": 0.0, "not_finite": 0.0}
    assert cast_statistics(torch.zeros(4, 32), cast).floats() == {"sqnr": math.inf, **nothing}
    ones = torch.ones(4, 32) * torch.tensor([1.0, -1.0]).repeat(16)
    if cast.scale.format != "e4m3":  # which does not hold 1/6
        assert cast_statistics(ones * cast.format.max, cast).floats() == {"sqnr": math.inf, **nothing}


def test_functions_at_their_limits():
    zero, one = torch.zeros(3), torch.ones(3)
    assert sqnr(zero, one) == -math.inf
    assert mse(zero, one) == 1
    assert mse(zero, one, relative=True) == math.inf
    assert sqnr(one, zero) == 0
    assert bias(one, zero) == -1, "all magnitude is lost"
    assert bias(torch.tensor([1.0, -3.0]), torch.tensor([2.0, -3.0])) == 0.25
    assert bias(torch.tensor([1.0, -3.0]), torch.tensor([0.0, -4.0])) == 0, "what one loses the other wins"
    tiny, huge = torch.full((3,), 1e-30), torch.full((3,), 1e30)
    for x in (tiny, huge):  # whose squares no float32 holds
        assert sqnr(x, 0.9 * x).item() == pytest.approx(20, rel=1e-5)
    assert sqnr(zero[:0], zero[:0]) == math.inf
    assert mse(zero[:0], zero[:0]).isnan()
    for function in (sqnr, mse, bias):
        with pytest.raises(ValueError, match=r"got \(3,\) and \(1, 3\)"):
            function(one, one[None])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cast", [CASTS[0], CASTS[3], CASTS[5]], ids=str)
def test_elements_that_are_not_finite(cast, value):
    """They take their block with them, which then counts nowhere."""
    x, block = sample(4, 96), cast.scale.block
    x[0, 0] = value
    rest = x[:, block:] if cast.scale.two_level else torch.cat([x[0, block:], x[1:].flatten()])[None]
    numbers = cast_statistics(x, cast).floats()
    assert numbers["not_finite"] == block / 384
    assert all(math.isnan(numbers[name]) for name in ("sqnr", "mse", "relative_mse", "bias"))
    assert cast_statistics(x, cast).codes.sum() == 384 - block
    if not cast.scale.two_level:  # a scale of the tensor is another without that value
        found, expected = cast_statistics(x, cast), cast_statistics(rest, cast)
        assert found.underflowed == expected.underflowed
        assert found.saturated == expected.saturated
        assert found.codes.tolist() == expected.codes.tolist()


# --- histograms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_histogram_equals_counting(name):
    format = ELEMENT_FORMATS[name]
    values = levels(format)
    assert list(values) == sorted(set(values))
    assert list(values) == [-value for value in reversed(values)], "a level has no opposite"
    assert max(values) == format.max
    quantized = quantize(sample(16, 64), Cast(name, Scale("fp32", 16)))
    counts = Counter(format.decode(quantized.codes).flatten().tolist())
    histogram = code_histogram(quantized)
    assert histogram.dtype == torch.int64
    assert histogram.tolist() == [counts[value] for value in values]
    assert sum(counts.values()) == 16 * 64
    shares = code_histogram(quantized, normalise=True)
    torch.testing.assert_close(shares, histogram / 1024)


def test_levels_by_hand():
    assert levels(ELEMENT_FORMATS["e2m1"]) == (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert levels(ELEMENT_FORMATS["int2"]) == levels(ELEMENT_FORMATS["ternary"]) == (-1, 0, 1)
    assert len(levels(ELEMENT_FORMATS["int8"])) == 255
    assert len(levels(ELEMENT_FORMATS["e4m3"])) == 253


def test_minus_zero_is_zero():
    quantized = quantize(torch.full((1, 16), 6.0), CASTS[2])
    codes = torch.tensor([[0b0000, 0b1000] * 8], dtype=torch.uint8)
    histogram = code_histogram(replace(quantized, codes=codes))
    assert histogram.tolist() == [0] * 7 + [16] + [0] * 7


def test_histogram_of_nothing():
    quantized = quantize(torch.full((1, 16), math.nan), CASTS[0])
    assert code_histogram(quantized).sum() == 0
    assert code_histogram(quantized, normalise=True).tolist() == [0.0] * 15


# --- parts, devices, what is known of casts ---------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_errors_of_parts_add_up(cast):
    x = sample(24, 64)
    amax = x.abs().amax() if cast.scale.needs_amax else None
    whole = cast_statistics(x, cast)
    parts = [cast_statistics(part, cast, amax=amax) for part in x.split(8)]
    total = parts[0] + parts[1] + parts[2]
    assert total.floats() == pytest.approx(whole.floats(), rel=1e-12)
    assert total.codes.tolist() == whole.codes.tolist()
    assert total.elements == 24 * 64
    assert total.cast == cast


def test_errors_of_different_casts_do_not_add_up():
    x = sample(8, 64)
    with pytest.raises(ValueError, match="Errors of one cast add up; got those of e2m1/e4m3:1x16.* and e2m1/e8m0"):
        cast_statistics(x, CASTS[0]) + cast_statistics(x, CASTS[3])


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_nothing_waits_for_the_device(cast):
    """Tensors without data: whoever asked one for its value would fail."""
    error = cast_statistics(torch.empty(8, 64, device="meta"), cast)
    for name in ("sqnr", "mse", "relative_mse", "bias", "underflow", "saturation", "not_finite"):
        value = getattr(error, name)
        assert value.device.type == "meta"
        assert value.shape == ()
    assert error.codes.shape == (len(levels(cast.format)),)


def test_no_gradient_is_recorded():
    assert not cast_statistics(torch.randn(4, 16, requires_grad=True), CASTS[0]).sqnr.requires_grad


def test_what_quantize_refuses():
    with pytest.raises(ValueError, match="takes a floating point tensor"):
        cast_statistics(torch.ones(4, 16, dtype=torch.int64), CASTS[0])
    with pytest.raises(ValueError, match="needs a key"):
        cast_statistics(torch.ones(4, 16), replace(CASTS[0], rounding="stochastic"))


def test_a_bit_is_six_decibels():
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    casts = [Cast(f"int{bits}", Scale("fp32", "tensor")) for bits in (5, 6, 7, 8)]
    for fewer, more in itertools.pairwise(casts):
        gain = cast_statistics(x, more).sqnr - cast_statistics(x, fewer).sqnr
        assert gain.item() == pytest.approx(20 * math.log10(more.format.max / fewer.format.max), abs=0.15)


def test_shrinkage():
    """Rounded to nearest, normal numbers shrink, more so on E2M1's grid than on a uniform one; stochastically never."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    scale = Scale("fp32", 16)  # nothing saturates
    shrunk = {name: cast_statistics(x, Cast(name, scale)).floats()["bias"] for name in ("e2m1", "e1m2", "int4")}
    assert shrunk["e2m1"] < -0.005
    assert abs(shrunk["e1m2"]) < 0.6 * abs(shrunk["e2m1"])
    unbiased = [cast_statistics(x, Cast("e2m1", scale, "stochastic"), key=key).floats()["bias"] for key in range(8)]
    assert abs(sum(unbiased) / 8) < 0.001


# --- a SwiGLU ---------------------------------------------------------------------------------------------------------


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def defined(gate, up, x):
    """Cosine, gate norm and share of active tokens as they are defined, in float64."""
    gate, up, x = gate.double(), up.double(), x.double().flatten(0, -2)
    cosine = (gate * up).sum(1).abs() / (gate.square().sum(1).sqrt() * up.square().sum(1).sqrt())
    z = x @ gate.t()
    assert ((z.abs() - 1).abs() > 1e-5).all(), "the sample has a token whose side float32 does not tell"
    return cosine.float(), gate.square().sum(1).sqrt().float(), (z.abs() > 1).double().mean(0).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("leading", [(37,), (3, 5), (2, 3, 4), (1,)], ids=str)
def test_alignment_equals_its_definition(leading, dtype):
    gate, up = normal(24, 40, seed=1, dtype=dtype) * 0.2, normal(24, 40, seed=2, dtype=dtype)
    up[:8] += 5 * gate[:8]
    x = normal(*leading, 40, seed=3, dtype=dtype)
    found = swiglu_alignment(gate, up, x)
    for value, expected in zip((found.cosine, found.gate_norm, found.active), defined(gate, up, x), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    one = swiglu_alignment(gate, up, x.flatten(0, -2)[0])
    assert set(one.active.tolist()) <= {0.0, 1.0}, "a vector is one token"


def test_alignment_of_more_rows_and_tokens_than_are_taken_at_once():
    gate, up, x = normal(2500, 6, seed=1), normal(2500, 6, seed=2), normal(3, 700, 6, seed=3)
    found = swiglu_alignment(gate, up, x)
    expected = (gate.double() @ x.double().flatten(0, 1).t()).abs() > 1
    # One token of 2100 may lie so close to 1 that its side is a matter of rounding.
    torch.testing.assert_close(found.active, expected.double().mean(1).float(), rtol=0, atol=1.5 / 2100)
    cosine = torch.nn.functional.cosine_similarity(gate.double(), up.double()).abs()
    torch.testing.assert_close(found.cosine, cosine.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.gate_norm, gate.norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planted_alignment(dtype):
    gate = normal(4, 64, dtype=dtype)
    gate[3] = torch.tensor([1.0, 2.0] * 32)
    up = torch.stack([4 * gate[0], -0.5 * gate[1], normal(64, seed=9, dtype=dtype), torch.tensor([-2.0, 1.0] * 32)])
    found = swiglu_alignment(gate, up.to(dtype))
    parallel, opposite, independent, orthogonal = found.cosine.tolist()
    assert 1 - 1e-6 <= parallel <= 1
    assert 1 - 1e-6 <= opposite <= 1, "the sign makes no difference"
    assert 0 < independent < 0.5
    assert orthogonal == 0
    assert found.gate_norm[3].item() == pytest.approx(math.sqrt(160), rel=1e-6)
    assert found.active is None, "without tokens"


def test_active_by_hand():
    gate = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    x = torch.tensor([[[1.0, 2.0], [-1.5, 2.5]], [[1.25, -4.0], [0.0, 0.0]]])
    found = swiglu_alignment(gate, torch.ones(3, 2), x)
    assert found.active.tolist() == [0.5, 0.5, 0.0], "1 itself is not beyond 1"
    assert found.gate_norm.tolist() == [1, 0.5, 0]
    assert swiglu_alignment(gate, gate, x[:0]).active.isnan().all(), "of no tokens there is no share"


def test_rows_of_zeros_have_a_cosine_of_zero():
    gate, up = normal(4, 8, seed=1), normal(4, 8, seed=2)
    gate[0] = up[1] = gate[2] = up[2] = 0
    found = swiglu_alignment(gate, up, normal(5, 8))
    assert found.cosine[:3].tolist() == [0, 0, 0]
    assert found.cosine[3] > 0
    assert (found.gate_norm == 0).tolist() == [True, False, True, False]
    assert found.active[[0, 2]].tolist() == [0, 0]
    empty = swiglu_alignment(torch.ones(3, 0), torch.ones(3, 0), torch.ones(2, 0))
    assert empty.cosine.tolist() == empty.gate_norm.tolist() == empty.active.tolist() == [0, 0, 0]
    assert swiglu_alignment(gate[:0], up[:0], normal(5, 8)).active.shape == (0,)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_alignment_of_rows_whose_squares_no_float32_holds(size):
    gate = normal(3, 16).mul(size)
    found = swiglu_alignment(gate, -gate)
    torch.testing.assert_close(found.cosine, torch.ones(3))
    torch.testing.assert_close(found.gate_norm, gate.double().norm(dim=1).float(), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value):
    """They are seen in their own channel, and nowhere else."""
    gate, up, x = normal(4, 8, seed=1), normal(4, 8, seed=2), normal(5, 8)
    whole = swiglu_alignment(gate, up, x)
    gate[0, 3] = up[1, 3] = value
    up[0] = 0  # a row of zeros hides nothing
    found = swiglu_alignment(gate, up, x)
    assert found.cosine.isnan().tolist() == [True, True, False, False]
    assert found.gate_norm.isnan().tolist() == [True, False, False, False]
    assert found.active.isnan().tolist() == [math.isnan(value), False, False, False]
    assert found.cosine[2:].tolist() == whole.cosine[2:].tolist()
    assert found.active[1:].tolist() == whole.active[1:].tolist()
    if math.isinf(value):
        assert found.active[0] == 1, "an infinity is beyond 1"


def test_a_token_that_is_nan_is_seen_in_every_channel():
    x = normal(3000, 8)
    x[2999, 0] = math.nan
    found = swiglu_alignment(normal(4, 8, seed=1), normal(4, 8, seed=2), x)
    assert found.active.isnan().all()
    assert found.cosine.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alignment_under_autocast(dtype):
    """bf16 products would move tokens across 1, and cosines by a hundredth."""
    gate, up, x = normal(32, 64, seed=1) * 0.1, normal(32, 64, seed=2), normal(500, 64, seed=3)
    assert ((x @ gate.t()).abs() > 1).sum() != ((x.bfloat16() @ gate.bfloat16().t()).abs() > 1).sum()
    gate, up, x = gate.to(dtype), up.to(dtype), x.to(dtype)
    expected = swiglu_alignment(gate, up, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = swiglu_alignment(gate, up, x)
        assert torch.is_autocast_enabled("cpu")
    for name in ("cosine", "gate_norm", "active"):
        assert getattr(found, name).dtype == torch.float32
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_alignment_leaves_its_arguments_alone_and_records_no_gradient():
    gate, up = (torch.nn.Parameter(normal(4, 8, seed=seed)) for seed in (1, 2))
    x = normal(5, 8).requires_grad_()
    before = [tensor.detach().clone() for tensor in (gate, up, x)]
    found = swiglu_alignment(gate, up, x)
    assert not any(value.requires_grad for value in (found.cosine, found.gate_norm, found.active))
    assert all(torch.equal(a, b) for a, b in zip(before, (gate, up, x), strict=True))


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes; a view makes none."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_alignment_of_a_large_mlp_takes_little_memory_and_waits_for_nothing():
    """Tensors without data: whoever asked one for its value would fail."""
    gate, up, x = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in [(11008, 4096)] * 2 + [(4096,) * 2]
    )
    with _Largest() as seen:
        found = swiglu_alignment(gate, up, x)
    for value in (found.cosine, found.gate_norm, found.active):
        assert value.shape == (11008,)
        assert value.device.type == "meta"
    assert seen.bytes == 1024 * 4096 * 4


def test_alignment_refuses_what_is_no_swiglu():
    gate, up = torch.ones(6, 4), torch.ones(6, 4)
    for wrong in (torch.ones(4, 6), torch.ones(12, 4), torch.ones(6)):
        with pytest.raises(ValueError, match=r"both \[hidden, in\]; got \(6, 4\) and \(.*\)\. Pass those of one MLP"):
            swiglu_alignment(gate, wrong)
    with pytest.raises(ValueError, match=r"got \(6,\) and \(6,\)"):
        swiglu_alignment(gate[:, 0], up[:, 0])
    for x in (torch.ones(5, 6), torch.ones(4, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"x needs 4 columns, \[\.\.\., in\], .*; got \(.*\)\. Pass what enters"):
            swiglu_alignment(gate, up, x)
