"""Smooth-SwiGLU's arithmetic: unquantized the same function, quantized the equations; and s, down to its ends."""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit import LinearCasts, convert, quantize
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from tests.nn.conversion.swiglus import (
    CURRENT,
    DELAYED,
    KINDS,
    MLP,
    QAT,
    down_power,
    factors,
    only_down,
    product_amax,
    relative,
    sources,
    step,
)
from tests.nn.layers import CONTRACTION, by_definition
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


# --- by definition ----------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """What went through an MLP, forward and backward."""

    x: Tensor
    y: Tensor
    g: Tensor
    gate: Tensor
    up: Tensor
    product: Tensor


def passed(mlp, x, dtype):
    kept = {}

    def keep(name, tensor):
        tensor.retain_grad()
        kept[name] = tensor

    hooks = [
        mlp.gate_proj.register_forward_hook(lambda _, __, output: keep("gate", output)),
        mlp.up_proj.register_forward_hook(lambda _, __, output: keep("up", output)),
        mlp.down_proj.register_forward_pre_hook(lambda _, inputs: keep("product", inputs[0])),
    ]
    x = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
        y = mlp(x)
    g = torch.randn_like(y)
    y.backward(g)
    for hook in hooks:
        hook.remove()
    return Pass(x, y.detach(), g, **kept)


def down_by_definition(casts, weight, bias, went, kind):
    """The equations, in float64; s is a constant in them, by which y, and so the g that is quantized, is divided."""
    h, up, g = (tensor.detach().double() for tensor in (went.product, went.up, went.g))
    w = weight.detach().double()
    if kind == "channel":
        s = down_power(h.abs().amax(0, keepdim=True))
        x, w, g, back = h * s, w / s, g, torch.ones(1, 1)
    else:
        s = down_power(up.abs().amax(1, keepdim=True))
        x, w, g, back = h * s, w, g / s, 1 / s
    made = {}
    for name, tensor in {"fprop_x": x, "fprop_w": w, "dgrad_g": g, "dgrad_w": w, "wgrad_g": g, "wgrad_x": x}.items():
        cast = getattr(casts, name)
        if cast == "fprop":
            made[name] = made[f"fprop_{name[-1]}"]
        else:
            exact = tensor.float()
            assert torch.equal(exact.double(), tensor), f"{name} is no float32"
            made[name] = tensor if cast is None else quantize(exact, cast, CONTRACTION[name]).dequantize().double()
    dx, dw = made["dgrad_g"] @ made["dgrad_w"], made["wgrad_g"].t() @ made["wgrad_x"]
    return {
        "y": made["fprop_x"] @ made["fprop_w"].t() * back + bias.detach().double(),
        "product": dx * s,  # of h, whose own gradient is s times that of s h
        "weight": dw / s if kind == "channel" else dw,  # of W, whose own gradient is 1/s times that of W / s
        "bias": went.g.double().sum(0),
    }


def close(found, expected, dtype, name):
    """Up to the rounding of sums: relative to their own size, which cancellation makes smaller than their terms'."""
    assert found is not None, f"{name} has no gradient"
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    error = (found.double() - expected).abs().amax() / expected.abs().amax()
    assert error <= tolerance, f"{name} is off by {error:.1e} of its largest element"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("casts", [DELAYED, LinearCasts.preset("fp8-row"), QAT], ids=["fp8-delayed", "fp8-row", "qat"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_by_definition(kind, casts, dtype):
    """Stage by stage: down projection, product, up and gate projection. Were s not detached, h or up would show it."""
    mlp = convert(MLP(bias=True), casts, smooth_swiglu=kind)
    with torch.no_grad():  # powers of two, so that bfloat16 sees the same W / s
        mlp.up_proj.weight.mul_(2.0 ** torch.arange(-12, 12)[:, None])
    LayerKeys(mlp).fill_(0)
    AmaxHistories(mlp)
    went = passed(mlp, torch.randn(20, 16), dtype)
    down = mlp.down_proj
    # The weight as autocast rounds it.
    expected = down_by_definition(down.casts, down.weight.to(dtype), down.bias.to(dtype), went, kind)
    close(went.y, expected["y"], dtype, "y")
    close(went.product.grad, expected["product"], dtype, "the gradient of h")
    close(down.weight.grad, expected["weight"], dtype, "the gradient of W_down")
    close(down.bias.grad, expected["bias"], dtype, "the gradient of b")

    gate, up = (tensor.detach().requires_grad_() for tensor in (went.gate, went.up))
    (F.silu(gate) * up).backward(went.product.grad)
    for name, found, wanted in (("gate", went.gate.grad, gate.grad), ("up", went.up.grad, up.grad)):
        assert torch.equal(found, wanted), f"the gradient of {name} is more than that of the product"

    dx = torch.zeros(20, 16, dtype=torch.float64)
    for name, g in (("gate_proj", went.gate.grad), ("up_proj", went.up.grad)):
        layer = getattr(mlp, name)
        rounded = copy.deepcopy(layer).to(dtype)
        results = by_definition(rounded, went.x.detach(), g).results
        dx += results["x"]
        close(layer.weight.grad, results["weight"], dtype, f"the gradient of {name}.weight")
        close(layer.bias.grad, results["bias"], dtype, f"the gradient of {name}.bias")
    close(went.x.grad, dx, dtype, "the gradient of x")


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


def test_a_dead_channel_does_no_harm():
    """All zeros, or so small that its s would be beyond what numbers hold."""
    for size in (0.0, 1e-38, 1e-30):
        mlp = MLP()
        with torch.no_grad():
            mlp.up_proj.weight[3].mul_(size)
        for dtype in (torch.float32, torch.bfloat16):
            model = convert(copy.deepcopy(mlp), CURRENT, smooth_swiglu="channel").to(dtype)
            x = torch.randn(9, 16, dtype=dtype)
            y = model(x)
            y.sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters()), size
            assert relative(y, mlp.to(dtype)(x)) < 0.15, size


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
