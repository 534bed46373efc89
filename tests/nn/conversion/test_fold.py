"""Folding into the weights: the same function to the bit, or a refusal that changes nothing; and what comes after."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import convert, fold
from lightning_lowbit.nn import AmaxHistories, set_phase, swiglus
from tests.nn.conversion.swiglus import (
    CURRENT,
    DELAYED,
    MLP,
    MODELS,
    Net,
    casts_by_name,
    everything,
    inputs_of,
    output_of,
    relative,
    step,
    unchanged,
)
from tests.tables import each


def conv1d(inputs, outputs, bias):
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.normal_(layer.bias, std=0.1)
    return layer


class Swapped(MLP):
    """The activation is that of what calls itself the up projection."""

    def product(self, x):
        return F.silu(self.up_proj(x)) * self.gate_proj(x)


def trained(model):
    histories = AmaxHistories(model)
    for seed in range(2):
        step(model, histories, inputs_of(model, seed))
    model.zero_grad()
    return histories


FOLDED = {name: make for name, make in MODELS.items() if name in ("Llama", "Gemma", "named")} | {
    "conv1d": lambda: Net(lambda: MLP(layer=conv1d)),
    "dropout": lambda: Net(lambda: MLP(bias=True, between=nn.Dropout(0.5))),
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", FOLDED)
def test_fold_keeps_the_function(name, autocast):
    """To the bit, in float32 and bfloat16: of the converted model, unquantized, and of an unconverted copy."""
    plain = FOLDED[name]()
    with torch.no_grad():
        for mlp in swiglus(plain).values():
            if mlp.up_proj.bias is not None:
                nn.init.normal_(mlp.up_proj.bias)
    x = inputs_of(plain, 7)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    amaxes = trained(model).state_dict()["channel_amax"]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    next(iter(swiglus(model).values())).eval()  # a part that is frozen stays so
    modes = {name: module.training for name, module in model.named_modules()}
    random = torch.get_rng_state()
    twin = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert fold(model) is model
        assert fold(twin, amaxes) is twin
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random), "folding drew random numbers"
    after = model.state_dict()
    assert after.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in after.items()), "the two ways differ"
    parts = ("up_proj.weight", "up_proj.bias", "down_proj.weight", "w1.weight", "w1.bias", "w3.weight")
    for key, value in after.items():
        assert torch.equal(value, before[key]) != key.endswith(parts), key
    assert not any(casts.smooth for casts in casts_by_name(model).values())

    fresh = FOLDED[name]()
    fresh.load_state_dict(after)
    set_phase(model, "bf16")
    for dtype in (torch.float32, torch.bfloat16):
        expected = output_of(copy.deepcopy(plain).to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x)
        for what, folded in {"converted": model, "unconverted": twin, "loaded": fresh}.items():
            found = output_of(copy.deepcopy(folded).to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x)
            assert torch.equal(found, expected), f"{what}, {dtype}: off by {(found - expected).abs().max()}"


def test_fold_of_some_mlps():
    """Those that are given, or smoothed: ``up`` times s, ``down`` by s; the others stay as they are."""
    plain = Net()
    amax = {"layers.1.down_proj": torch.full((24,), 3.0)}
    folded = fold(copy.deepcopy(plain), amax)
    for key, value in folded.state_dict().items():
        factor = {"layers.1.up_proj.weight": 0.25, "layers.1.down_proj.weight": 4.0}.get(key, 1.0)
        assert torch.equal(value, plain.state_dict()[key] * factor), key
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    trained(model)
    fold(model, amax)
    assert [layer.down_proj.casts.smooth for layer in model.layers] == ["channel", None]


@each("phase", ["qaf", "bf16"])
def test_fold_in_a_phase(phase):
    model = convert(MLP(), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(model)
    step(model, histories, torch.randn(9, 16))
    set_phase(model, phase)
    fold(model)
    assert model.down_proj.casts == model.down_proj.full_casts.phase(phase)
    assert model.down_proj.full_casts.smooth is None


def normed():
    """As BitNet has it: a norm between product and down projection."""
    return MLP(between=nn.RMSNorm(24))


class Masked(MLP):
    def forward(self, x, mask):
        return super().forward(x) * mask


def smoothed(model, prepare=trained, kind="channel"):
    prepare(convert(model, DELAYED, smooth_swiglu=kind))
    return model


GOOD = {"layers.0.down_proj": torch.full((24,), 3.0)}
BOTH = GOOD | {"layers.1.down_proj": torch.full((24,), 3.0)}


@each(
    ("make", "amax", "message"),
    [
        (Net, None, "nothing to fold"),
        (Net, {}, "nothing to fold"),
        (lambda: convert(Net(), DELAYED), None, "nothing to fold"),
        (lambda: fold(smoothed(Net())), None, "nothing to fold"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), None, "nothing to fold"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), GOOD, "no down projection of this model; they are: none"),
        (lambda: smoothed(Net(), kind="token"), None, r"layers\.0\.down_proj smooths tokens"),
        (lambda: convert(Net(), CURRENT, smooth_swiglu="channel"), None, "has not been trained"),
        (lambda: smoothed(Net(), AmaxHistories), None, r"layers\.0\.down_proj has not been trained"),
        (Net, {**GOOD, "layers.2.down_proj": torch.ones(24)}, r"they are: layers\.0\.down_proj, layers\.1\.down_proj"),
        (Net, {**GOOD, "layers.1": torch.ones(24)}, "of 'layers.1', no down projection"),
        (Net, {**GOOD, "layers.1.up_proj": torch.ones(24)}, "of 'layers.1.up_proj', no down projection"),
        (Net, {**GOOD, "layers.1.down_proj": torch.ones(16)}, r"has 24 channels; its channel_amax is of shape \(16,\)"),
        (Net, {**GOOD, "layers.1.down_proj": torch.ones(1, 24)}, r"is of shape \(1, 24\)"),
        (lambda: smoothed(Net(normed)), None, r"layers\.0\.down_proj: .* not linear"),
        (lambda: Net(iter((normed(), MLP())).__next__), BOTH, r"layers\.0\.down_proj: .* not linear"),
        (lambda: Net(iter((MLP(), normed())).__next__), BOTH, r"layers\.1\.down_proj: .* not linear"),
        (lambda: Net(Swapped), GOOD, "not linear"),
        (lambda: Net(lambda: MLP(between=nn.Tanh())), GOOD, "not linear"),
        (lambda: Net(lambda: MLP(between=nn.Hardtanh(-7, 7))), GOOD, "not linear"),  # that of common numbers
        (lambda: Net(Masked), GOOD, r"layers\.0\.down_proj: its MLP must take x alone"),
    ],
)
def test_fold_refuses(make, amax, message):
    model = make()
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        fold(model, amax)
    unchanged(model, before)


@each("scale", [1e-4, 1.0, 100.0])
def test_after_folding_evaluation_is_close_and_training_goes_on(scale):
    """The up projection's weight and gradients are others now: their former amaxes would saturate or flush them."""
    plain = MLP()
    with torch.no_grad():
        plain.gate_proj.weight.mul_(scale)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(model)
    for _ in range(3):
        step(model, histories, torch.randn(2000, 16))  # few tokens would tell little of the range of a channel
    amaxes, x = histories.state_dict()["channel_amax"], torch.randn(2000, 16)
    with torch.no_grad():
        expected, before = plain(x), model(x)
        after = fold(model)(x)
    errors = relative(before, expected), relative(after, expected), relative(after, before)
    assert max(errors) < 0.1, f"relative errors before and after, and of both: {errors}"
    model.zero_grad()
    for mlp in (model, fold(plain, amaxes)):
        mlp(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        error = relative(model.get_parameter(name).grad, parameter.grad)
        assert error < 0.3, f"the gradient of {name} is off by {error:.2f}"
