"""Scales that round stochastically, and MS-EDEN's correction: by a slow reference, and on average."""

import itertools

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale, quantize
from lightning_lowbit.compilation import backend
from lightning_lowbit.quant import Hadamard, quantize_operand, rotate
from lightning_lowbit.quant.rounding import mix_key
from lightning_lowbit.quant.shard import Shard
from tests.quant.tensors import NVFP4, float_scales, same, sample
from tests.references import quantize as reference

RANDOM = NVFP4.replace(scale={"rounding": "stochastic"})
EDEN = LinearCasts.preset("quartet2").wgrad_g
SALT = 0x5363616C


def draws(shape, block, key):
    """Of the scale of each block along rows: by the index of its first element, from a stream of their own."""
    first = np.arange(shape[0])[:, None] * (-(-shape[1] // block) * block) + np.arange(0, shape[1], block)
    mixed = reference.splitmix64((key ^ SALT) & (2**64 - 1))
    return reference.uniform(first, mixed)


def up_or_down(wanted, uniform):
    lower, upper = reference.neighbors(wanted, "e4m3")
    return np.where(wanted - lower > (upper - lower) * (1 - uniform), upper, lower)


def test_scales_go_up_with_their_draws():
    x, key = sample(24, 64), 77
    stored, nearest = quantize(x, RANDOM, key=key), quantize(x, NVFP4)
    blocks = x.view(24, 4, 16).abs().amax(-1)
    wanted = (blocks.double() / 6 / nearest.tensor_scale.double()).numpy().clip(max=448)
    expected = torch.from_numpy(up_or_down(wanted, draws((24, 64), 16, key))).float()
    assert (float_scales(stored) != expected).float().mean() < 0.02, "more than ties of float32 differ"
    assert (float_scales(stored) != float_scales(nearest)).float().mean() > 0.1
    # Elements are rounded to nearest in units of the scales that were drawn.
    units = float_scales(stored).repeat_interleave(16, 1) * stored.tensor_scale
    found = stored.dequantize()
    assert ((found - x).abs() <= (x.abs() - 6 * units).clamp(min=0) + units * (1 + 1e-5)).all()


def test_random_bits_of_scales_are_not_those_of_elements():
    key = mix_key(torch.tensor(5))
    both = RANDOM.replace(rounding="stochastic")
    x = sample(64, 128)
    assert torch.equal(float_scales(quantize(x, both, key=key)), float_scales(quantize(x, RANDOM, key=key)))
    of_scales = torch.from_numpy(draws((64, 128), 16, int(key)))
    of_elements = torch.from_numpy(reference.uniform_by_fours(np.arange(64 * 128).reshape(64, 128), int(key)))[:, ::16]
    assert torch.corrcoef(torch.stack([of_scales.flatten(), of_elements.flatten()]))[0, 1].abs() < 0.15


@pytest.mark.slow
def test_the_mean_of_scales_is_what_was_wanted():
    amax = torch.linspace(0.5, 1, 64)
    x = torch.stack([amax, torch.zeros(64)], 1).repeat_interleave(512, 0)
    scales = float_scales(quantize(x, Cast("e2m1", Scale("e4m3", 2, "stochastic")), key=mix_key(torch.tensor(1))))
    wanted, error = amax / 6, scales.view(64, 512).std(1) / 512**0.5
    assert ((scales.view(64, 512).mean(1) - wanted).abs() <= 4.5 * error + 1e-7).all()


@pytest.mark.fast("random")
@pytest.mark.parametrize(
    "cast, size", [(RANDOM, 64), (RANDOM, 256), (EDEN, 256)], ids=["random", "random-compiled", "eden"]
)
def test_shards_together_equal_the_whole_matrix(cast, size):
    x, half, key = sample(size, size), size // 2, torch.tensor(2**50 + 7)
    for dim, sharded in itertools.product((0, 1), (0, 1)):
        whole, amax = quantize_operand(x, cast, dim, key).values, x.abs().amax()
        parts = [
            quantize_operand(
                x.narrow(sharded, start, half), cast, dim, key, amax, shard=Shard("group", sharded, start, half, size)
            ).values
            for start in (0, half)
        ]
        assert torch.equal(torch.cat(parts, sharded), whole), f"blocks along {dim}, cut along {sharded}"


def test_a_shard_boundary_within_a_corrected_group_is_refused():
    with pytest.raises(ValueError, match="in the middle of corrected groups of 128"):
        quantize_operand(sample(8, 64), EDEN, 1, torch.tensor(1), torch.tensor(1.0), shard=Shard("g", 1, 0, 64, 128))


# --- MS-EDEN ----------------------------------------------------------------------------------------------------------


def by_steps(x, key, four_over_six):
    """Steps 2 to 5 of the paper's algorithm on rows of 128, float64 but for the formats."""
    o = 0.93 * 17 / 16
    d = np.abs(x).max() / 255.99 / (6 / o)
    result, uniform = np.zeros_like(x), draws(x.shape, 16, key)
    for row in range(len(x)):
        blocks = x[row].reshape(-1, 16)
        scales, codes = [], []
        for block in blocks:
            choices = []
            for m in (1, 1.5) if four_over_six else (1,):
                s = reference.nearest(np.abs(block).max() / (6 / o) / d * m, "e4m3") or 1.0
                q = reference.nearest(block / (s * d), "e2m1")
                choices.append((np.square(q * s * d - block).sum(), s, q))
            _, s, q = min(choices, key=lambda choice: choice[0])
            scales.append(s)
            codes.append(q)
        s, q = np.array(scales)[:, None], np.array(codes)
        for group in range(0, len(blocks), 8):
            at = slice(group, group + 8)
            exact, rounded = blocks[at], q[at] * s[at] * d
            c = np.square(exact).sum() / (exact * rounded).sum() if rounded.any() else 1.0
            corrected = up_or_down(s[at, 0] * c, uniform[row, at])
            result[row, group * 16 :][:128] = (q[at] * corrected[:, None] * d).ravel()
    return result


@pytest.mark.parametrize("four_over_six", [False, True])
def test_ms_eden_takes_the_steps_of_the_paper(four_over_six):
    cast, x = EDEN.replace(scale={"four_over_six": "mse" if four_over_six else None}), sample(32, 256, seed=3)
    found = quantize(x, cast, key=11).dequantize()
    expected = torch.from_numpy(by_steps(x.double().numpy(), 11, four_over_six)).float()
    wrong = (found - expected).abs() > 1e-5 * expected.abs()
    assert wrong.view(-1, 16).any(1).float().mean() < 0.02, "more than ties of float32 differ"
    same(
        quantize(x.t().contiguous(), cast.replace(round_to_bfloat16=False), 0, 11).elements().t(),
        quantize(x, cast, key=11).elements(),
        "transposed",
    )


def test_the_error_of_a_corrected_group_is_orthogonal_to_it():
    """On average over the rounding of scales, which is what makes it unbiased over rotations."""
    x = torch.randn(8, 128) * torch.randn(8, 8).exp().repeat_interleave(16, 1)
    with backend("eager"):
        copies = quantize(x.repeat(400, 1), EDEN, key=mix_key(torch.tensor(0))).dequantize()
    shares = (copies.view(400, 8, 128) * x).sum(-1)
    growth = shares.double() / x.double().square().sum(1) - 1
    assert (growth.mean(0).abs() < 4 * growth.std(0) / 20).all(), growth.mean(0)


def test_zeros_and_what_is_not_finite():
    x = torch.randn(3, 256)
    x[0, :200], x[1, 5] = 0, torch.inf
    found = quantize(x, EDEN, key=1).dequantize()
    assert not found[0, :128].any() and not found[0, 128:192].any()
    assert found[1, :16].isnan().all(), "an infinity became a number"
    assert quantize(torch.zeros(2, 128), EDEN, key=1).dequantize().eq(0).all()
    assert quantize(torch.zeros(0, 128), EDEN, key=1).codes.shape == (0, 128)


def rotated(x, cast, key):
    """Quantized after a random rotation of groups of 128, and rotated back."""
    signs, bits = mix_key(torch.tensor(2 * key)), mix_key(torch.tensor(2 * key + 1))
    signs = Hadamard(128, "keyed").diagonal(signs, x.device)
    return rotate(quantize(rotate(x, signs, 1), cast, 1, bits).dequantize(), signs, 1, inverse=True)


@pytest.mark.slow
def test_ms_eden_has_half_the_error_of_stochastic_rounding():
    """The factor is that of normal data, which any data is after a rotation: 0.0098 / 0.0189."""
    x = torch.randn(128, 512) * torch.randn(128, 32).exp().repeat_interleave(16, 1)
    error = {
        cast: sum((rotated(x, cast, key) - x).square().sum() for key in range(4)).item() / x.square().sum().item() / 4
        for cast in (EDEN, NVFP4.replace(rounding="stochastic"), NVFP4)
    }
    eden, stochastic, nearest = error.values()
    assert eden == pytest.approx(0.0098, rel=0.03)
    assert eden / stochastic == pytest.approx(0.52, abs=0.02)
    assert eden / nearest == pytest.approx(1.08, abs=0.03)


@pytest.mark.slow
def test_the_mean_of_ms_eden_is_the_tensor():
    """Over 4,096 keys: each element within 4 standard errors, their mean square that of chance, and no shrinkage."""
    x, keys = sample(4, 256, seed=8), 4096
    mean, square, growth = torch.zeros(4, 256).double(), torch.zeros(4, 256).double(), []
    for key in range(keys):
        error = (rotated(x, EDEN, key) - x).double()
        mean, square = mean + error / keys, square + error.square() / keys
        growth.append((error * x).sum() / x.double().square().sum())
    chance = mean / ((square - mean.square()) / keys).sqrt().clamp(min=1e-30)
    within = chance[x.abs().amax(1) > 0]
    assert (within.abs() < 4).all(), within.abs().max()
    assert within.square().mean() == pytest.approx(1, abs=0.2)
    along = torch.stack(growth)
    assert along.mean().abs() < 4 * along.std() / keys**0.5
