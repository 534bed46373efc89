"""Rotations, means that are split off, surrogates and smoothing: what they are for, and what they leave alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.nn import AmaxHistories
from lightning_lowbit.quant import Hadamard
from tests.nn.conversion.swiglus import DELAYED, MLP, product_amax, relative
from tests.nn.layers import GEMMS, RESULTS, every, layer_like, run
from tests.tables import each

LOSSLESS = Cast("int8", Scale("fp32", 1))  # each element is the largest of its block
NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))
TOKENS, IN, OUT = 50, 40, 24
KEYED = {gemm: Hadamard(16, "keyed") for gemm in GEMMS}
ALL = tuple(GEMMS)


def tensors(tokens=TOKENS, mean=0.0):
    """A layer, x and g; all tokens share a direction of the given size."""
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(IN, OUT)
    layer.weight.data = torch.randn(OUT, IN, generator=generator)
    layer.bias.data = torch.randn(OUT, generator=generator)
    x, g = (
        torch.randn(tokens, size, generator=generator) + mean * torch.randn(size, generator=generator)
        for size in (IN, OUT)
    )
    return layer, x, g


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *[{"hadamard": {gemm: size}} for gemm in GEMMS for size in (16, 64)],
        {"hadamard": KEYED},
        *[{"subtract_mean": [gemm]} for gemm in GEMMS],
        {"subtract_mean": ["wgrad"], "wgrad_x": None},
        {"subtract_mean": ["wgrad"], "wgrad_g": None},
        {"subtract_mean": ALL, "hadamard": KEYED},
        {"subtract_mean": ["fprop", "dgrad"], "dgrad_w": "fprop"},
        {"surrogate": {"fprop_x": "trust", "fprop_w": "trust"}},  # nothing is saturated
        {"surrogate": {"fprop_w": "trust"}, "hadamard": KEYED, "subtract_mean": ["dgrad", "wgrad"]},
    ],
    ids=str,
)
def test_with_lossless_casts_the_layer_is_linear(settings, exact, mean):
    original, x, g = tensors(mean=mean)
    found = run(layer_like(original, every(LOSSLESS, **settings), exact=exact), x, g)
    for name, expected in run(original, x, g).items():
        assert error(found[name], expected) < 1e-5, f"{name}: off by {error(found[name], expected):.1e}"


@pytest.mark.parametrize("gemm", GEMMS)
def test_splitting_the_mean_off_helps_where_there_is_one(gemm):
    """Averaged over draws of the random bits, where there are some."""
    casts = LinearCasts.preset("nvfp4")
    for mean, low, high in ((30.0, 0.0, 0.5), (0.0, 0.7, 1.3)):
        original, x, g = tensors(tokens=512, mean=mean)
        expected = run(original, x, g)[RESULTS[gemm]]
        errors = [
            sum(error(run(layer_like(original, c, seed), x, g)[RESULTS[gemm]], expected) for seed in range(4))
            for c in (casts.replace(subtract_mean=[gemm]), casts)
        ]
        ratio = errors[0] / errors[1]
        assert low < ratio < high, f"{gemm}, a mean of size {mean}: {ratio:.2f} of the error without"


@each("gemm", GEMMS)
def test_keyed_signs_without_keys_are_refused(gemm):
    layer = convert(nn.Linear(IN, OUT), every(NEAREST, hadamard={gemm: Hadamard(16, "keyed")}))
    x = torch.randn(2, IN, requires_grad=True)
    with pytest.raises(ValueError, match="Keyed signs of a Hadamard transform need a key.*LayerKeys"):
        layer(x).sum().backward()


# --- smoothing: a channel that spikes (table 3 of Smooth-SwiGLU's paper) ----------------------------------------------

HIDDEN, CHANNELS, BATCH, STEPS = 64, 128, 256, 20


def spiking_mlp(sign):
    """The model of the test, and its direction u."""
    torch.manual_seed(0)
    mlp = MLP(HIDDEN, CHANNELS)
    direction = F.normalize(torch.randn(HIDDEN), dim=0)
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight.normal_(std=HIDDEN**-0.5)
        mlp.down_proj.weight.normal_(std=CHANNELS**-0.5)
        mlp.gate_proj.weight[0] = 4 * direction
        mlp.up_proj.weight[0] = sign * 4 * direction
    return mlp, direction


def batch(direction, turned=0):
    """Tokens of the usual kind, of which the first few are turned towards the direction."""
    x = torch.randn(BATCH, HIDDEN).clamp(-3, 3)
    along = 0.25 + 0.25 * torch.rand(BATCH, 1)
    x = x + (along - (x @ direction)[:, None]) * direction
    x[:turned] = direction.sign() * (2 + torch.rand(turned, HIDDEN))
    return x


ROWS = {
    "plain": {},
    "smooth": {"smooth_swiglu": "channel"},
    "down projection in bf16": {"overrides": {"down_proj": "bf16"}},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [1, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_channel_spikes_in_the_middle_of_a_run(sign, turned, dtype):
    """In channel 0 gate and up projection have one direction u, ``w1 = ±w2 = ±4 u``, four times as long as other rows.

    For 20 steps the tokens' component along u lies between 0.25 and 0.5, so that the product ``4p * silu(4p)`` stays
    below 4, the size of other channels. Then some tokens turn towards u, element by element ``sign(u) * [2, 3]``,
    within the amax of the steps before: the component is some 16, and the product, which enters the down projection, a
    thousand times what it was.
    """
    mlp, direction = spiking_mlp(sign)
    models = {row: convert(copy.deepcopy(mlp), DELAYED, **settings) for row, settings in ROWS.items()}
    histories = {row: AmaxHistories(model) for row, model in models.items()}
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32)
    torch.manual_seed(1)
    usual, largest_x = 0.0, 0.0
    for _ in range(STEPS):
        x, g = batch(direction), torch.randn(BATCH, HIDDEN)
        usual = max(usual, product_amax(mlp, x)[0].item())
        largest_x = max(largest_x, x.abs().max().item())
        for row, model in models.items():
            with autocast:
                y = model(x)
            y.backward(g.to(y.dtype))
            histories[row].advance_()
    with torch.no_grad(), autocast:
        x, spiking = batch(direction), batch(direction, turned)
        before, after = ({row: relative(model(t), mlp(t)) for row, model in models.items()} for t in (x, spiking))
        others = relative(models["smooth"](spiking)[turned:], mlp(spiking)[turned:])
    spike, told = product_amax(mlp, spiking), f"relative errors {before}, then {after}"
    assert spike[0] >= 1000 * usual, "the channel does not spike as it should"
    assert spike[0] > 10 * spike[1:].max(), "other channels spike as well"
    assert spiking.abs().max() <= largest_x, "x left its history: the projections before saturate, too"
    for row in ("smooth", "down projection in bf16"):
        assert after[row] <= after["plain"] / 10 and before[row] <= 2 * before["plain"], told
    assert after["plain"] > 0.9, told
    assert others <= 2 * before["plain"], f"the other tokens suffer from the spike of these: {others:.3f}"
