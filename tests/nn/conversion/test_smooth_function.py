"""Smooth-SwiGLU's arithmetic: unquantized the same function; and s, down to its ends."""

import copy
import math

import pytest
import torch

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories
from tests.nn.conversion.swiglus import (
    CURRENT,
    DELAYED,
    KINDS,
    MLP,
    down_power,
    factors,
    only_down,
    product_amax,
    relative,
    sources,
    step,
)
from tests.tables import each

# --- the unquantized function -----------------------------------------------------------------------------------------


@each("bias", [False, True])
@each("dtype", [torch.float32, torch.bfloat16])
@each("kind", KINDS)
def test_unquantized_it_is_the_same_function(kind, dtype, bias):
    """Output and all gradients, to the bit, channels being of sizes from 1e-6 to 1e6 and one of them 0.

    A bias comes after the division per token, and with it a second rounding in bfloat16.
    """
    plain = MLP(bias=bias)
    with torch.no_grad():
        plain.up_proj.weight.mul_(torch.logspace(-6, 6, 24)[:, None])
        plain.up_proj.weight[5] = 0
        if bias:
            plain.up_proj.bias[5] = 0
    smoothed = convert(copy.deepcopy(plain), CURRENT, smooth_swiglu=kind).to(dtype)
    unsmoothed = convert(copy.deepcopy(plain), CURRENT).to(dtype)
    x, g = torch.randn(7, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    results, products = [], []
    for model in (unsmoothed, smoothed):
        inputs = x.clone().requires_grad_()
        with sources(lossless=True) as seen:
            y = model(inputs)
            y.backward(g)
        results.append({"y": y.detach(), "x": inputs.grad, **{n: p.grad for n, p in model.named_parameters()}})
        [entered] = [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape == (7, 24)]
        products.append(entered)
    assert not torch.equal(*products), "nothing was smoothed"
    for name, expected in results[0].items():
        found = results[1][name]
        assert expected.isfinite().all()
        if name == "y" and kind == "token" and bias and dtype == torch.bfloat16:
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8)  # of a bias below 1/4
        else:
            assert torch.equal(found, expected), f"{name} differs by up to {(found - expected).abs().max()}"


# --- s ----------------------------------------------------------------------------------------------------------------


def test_s_per_channel_is_of_all_tokens():
    """Of every sequence of a batch; |up * silu(gate)|, not |up|. A channel that is 0 keeps 1."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight.mul_(torch.logspace(-3, 3, 24)[:, None])
        mlp.gate_proj.weight[3] = 0
    x = torch.randn(2, 3, 5, 16)
    amax = product_amax(mlp, x)
    s = factors(only_down(mlp, CURRENT), x)
    assert torch.equal(s, down_power(amax))
    assert s[3] == 1
    assert len(s.unique()) > 10


def test_s_per_token_is_of_the_up_projection():
    """Of its output as it is, quantized; each token its own, those of every sequence. A token of 0 keeps 1."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    x = torch.randn(2, 3, 16) * torch.logspace(-3, 3, 6).view(2, 3, 1)
    x[1, 1] = 0
    up = []
    mlp.up_proj.register_forward_hook(lambda _, __, output: up.append(output.detach()))
    product = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: product.append(inputs[0].detach()))
    with sources() as seen:
        mlp(x)
    [scaled] = [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape[1] == 24]
    [weight] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == (16, 24)]
    s = down_power(up[0].abs().amax(-1).view(-1, 1))
    assert torch.equal(scaled, product[0].view(-1, 24) * s)
    assert torch.equal(weight, mlp.down_proj.weight)
    assert s[4] == 1
    assert len(s.unique()) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_float16_stays_finite(kind):
    """A channel of 1e-5 and one of 3e4 lie within its range, which is small: s and 1/s must, too."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight[3].mul_(1e-5)
        mlp.up_proj.weight[4].mul_(3e4 / product_amax(mlp, x := torch.randn(9, 16))[4])
        mlp.down_proj.weight[:, 4].mul_(1e-4)
    model = convert(copy.deepcopy(mlp), CURRENT, smooth_swiglu=kind)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
        expected = mlp(x)
    assert expected.isfinite().all()
    assert y.isfinite().all(), "smoothing has left the range of float16"
    assert relative(y, expected) < 0.15


def test_an_infinite_channel_stays_visible():
    """An overflow never becomes a finite number, and is no amax to remember."""
    mlp = convert(MLP(), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(mlp)
    x = torch.randn(9, 16)
    step(mlp, histories, x)
    before = histories.state_dict()["channel_amax"]["down_proj"]
    mlp.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), math.inf))
    histories.recording = True
    assert not mlp(2 * x).isfinite().any()
    histories.advance_()
    after = histories.state_dict()["channel_amax"]["down_proj"]
    assert after[7] == before[7], "an infinity was remembered"
    others = torch.arange(24) != 7
    assert (after[others] != before[others]).all(), "finite channels were forgotten"


def test_tokens_need_the_up_projection():
    """A down projection that is called by itself, or after an up projection of other tokens, cannot know its s."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    with pytest.raises(ValueError, match="none has come before this pass"):
        mlp.down_proj(torch.randn(3, 24))
    mlp.up_proj(torch.randn(4, 16))
    with pytest.raises(ValueError, match="none has come before this pass"):
        mlp.down_proj(torch.randn(3, 24))
    assert mlp(torch.randn(3, 16)).isfinite().all()
    with pytest.raises(ValueError, match="none has come before this pass"):  # it is used once
        mlp.down_proj(torch.randn(3, 24))
