"""Smooth-SwiGLU's layers: which are smoothed, in which phases, which models are refused; and folding into weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import LinearCasts, convert, fold, smooth_swiglu
from lightning_lowbit.nn import AmaxHistories, plan, set_phase, swiglus
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from tests.nn.conversion.swiglus import CURRENT, DELAYED, KINDS, MLP, MODELS, Net, inputs_of, output_of, relative, step
from tests.tables import each

# Quantization-aware training: the backward pass takes what the forward pass used.
QAT = LinearCasts(fprop_x=CURRENT.fprop_x, fprop_w=CURRENT.fprop_w, dgrad_w="fprop", wgrad_x="fprop")


def casts_by_name(model):
    return {name: layer.casts for name, layer in quantized_layers(model).items()}


def everything(model):
    """What an error must leave as it was."""
    parts = {name: value.clone() for name, value in model.state_dict().items()}
    parts["random numbers"] = torch.get_rng_state()
    for name, module in model.named_modules():
        casts = (module.casts, module.full_casts) if isinstance(module, QuantizedLayer) else None
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        parts[f"module {name}"] = type(module), module.training, hooks, casts
    return parts


def unchanged(model, before):
    now = everything(model)
    assert now.keys() == before.keys()
    for name, value in now.items():
        same = torch.equal(value, before[name]) if isinstance(value, Tensor) else value == before[name]
        assert same, f"{name} changed"


def down_names(model):
    downs = {id(mlp.down_proj) for mlp in swiglus(model).values()}
    return {name for name, module in model.named_modules() if id(module) in downs}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("in_place", [False, True], ids=["convert", "smooth_swiglu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_only_down_projections_change(name, kind, in_place):
    """Channel mode takes delayed scaling from their weights, and from nothing else; the model still computes."""
    model = MODELS[name]()
    skip = [] if name == "named" else ["lm_head"]
    layers = plan(model, DELAYED, skip).keys()
    if in_place:
        assert smooth_swiglu(convert(model, DELAYED, skip), kind) is model
    else:
        convert(model, DELAYED, skip, smooth_swiglu=kind)
    downs, found = down_names(model), casts_by_name(model)
    assert len(downs) == 2
    assert found.keys() == layers
    for layer, casts in found.items():
        expected = DELAYED
        if layer in downs:
            weights = {"fprop_w": CURRENT.fprop_w, "dgrad_w": CURRENT.dgrad_w} if kind == "channel" else {}
            expected = DELAYED.replace(smooth=kind, **weights)
        assert casts == model.get_submodule(layer).full_casts == expected, f"{layer}: {casts}"
    AmaxHistories(model)
    output = output_of(model, inputs_of(model))
    assert output.isfinite().all()
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_is_shown():
    model = convert(Net(), DELAYED, smooth_swiglu="channel")
    assert [str(layer).count("smooth=channel") for layer in model.layers] == [1, 1]
    casts = str(model.layers[0].down_proj.casts)
    assert "w=e4m3/fp32:tensor)" in casts, casts
    assert "x=e4m3/fp32:tensor(delayed 16)" in casts, casts
    assert casts.endswith("smooth=channel"), casts
    assert "smooth=token" in str(convert(model, DELAYED, smooth_swiglu="token"))
    assert "smooth" not in str(convert(model, DELAYED))


@each("kind", KINDS)
def test_again_changes_nothing_and_converting_without_takes_it_away(kind):
    model = convert(Net(), DELAYED)
    plain = everything(model)
    smoothed = everything(convert(model, DELAYED, smooth_swiglu=kind))
    for again in (lambda: smooth_swiglu(model, kind), lambda: convert(model, DELAYED, smooth_swiglu=kind)):
        unchanged(again(), smoothed)
    unchanged(convert(model, DELAYED), plain)


@each("kind", KINDS)
def test_plan_is_what_convert_does(kind):
    model = Net()
    overrides = {r"layers\.0": QAT, "layers.1.gate_proj": "bf16"}
    arguments = {"skip": ["head"], "overrides": overrides, "smooth_swiglu": kind}
    planned = plan(model, DELAYED, **arguments)
    assert not casts_by_name(model), "plan converted"
    assert planned == casts_by_name(convert(model, DELAYED, **arguments))
    assert planned["layers.0.down_proj"] == QAT.replace(smooth=kind)


def test_unquantized_down_projections_are_left_alone():
    model = convert(Net(), DELAYED, overrides={r"layers\.0\.down_proj": "bf16"}, smooth_swiglu="channel")
    assert model.layers[0].down_proj.casts == LinearCasts()
    assert model.layers[1].down_proj.casts.smooth == "channel"
    model = convert(Net(), DELAYED, skip=[r"layers\.0\.down_proj"], smooth_swiglu="token")
    assert type(model.layers[0].down_proj) is nn.Linear
    assert [len(layer.up_proj._forward_hooks) for layer in model.layers] == [0, 1]
    with pytest.raises(ValueError, match="none of the 2"):
        smooth_swiglu(Net())


GRADIENTS_ONLY = LinearCasts(dgrad_g=DELAYED.dgrad_g, wgrad_g=DELAYED.wgrad_g)


@each(
    ("model", "arguments", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, "found no SwiGLU in Sequential"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)), {}, "found no SwiGLU"),
        (Net, {"skip": ["down_proj"]}, r"none of the 2 down projections, e.g. layers\.0\.down_proj, is quantized"),
        (Net, {"overrides": {"down_proj": GRADIENTS_ONLY}}, "none of the 2"),
        (Net, {"smooth_swiglu": "chanel"}, "Unknown kind of smooth_swiglu 'chanel'. Did you mean 'channel'"),
    ],
)
def test_refusals(model, arguments, message):
    """By convert, plan, and smooth_swiglu on a converted model; nothing has been changed then."""
    given = {"smooth_swiglu": "channel", **arguments}
    fresh = model()
    before = everything(fresh)
    for call in (convert, plan):
        with pytest.raises(ValueError, match=message):
            call(fresh, DELAYED, **given)
        unchanged(fresh, before)
    kind = given.pop("smooth_swiglu")
    converted = convert(fresh, DELAYED, **given)
    before = everything(converted)
    with pytest.raises(ValueError, match=message):
        smooth_swiglu(converted, kind)
    unchanged(converted, before)


@each(
    ("casts", "keeping"),
    [
        (DELAYED, {"fqt", "qaf", "hp-forward"}),
        (QAT, {"fqt", "qaf"}),  # without its forward pass it quantizes nothing
        (QAT.replace(dgrad_w=None, wgrad_x=CURRENT.wgrad_x), {"fqt", "qaf", "hp-forward"}),
        (GRADIENTS_ONLY.replace(fprop_w=CURRENT.fprop_w), {"fqt", "qaf"}),
    ],
)
@each("kind", KINDS)
def test_phases_keep_it_as_long_as_x_or_w_is_quantized(casts, keeping, kind):
    model = convert(MLP(), casts, smooth_swiglu=kind)
    AmaxHistories(model)
    for phase in ("qaf", "bf16", "hp-forward", "fqt"):
        set_phase(model, phase)
        assert model.down_proj.casts.smooth == (kind if phase in keeping else None), phase
        assert model.down_proj.full_casts.smooth == kind, phase
        assert (f"smooth={kind}" in str(model)) == (phase in keeping), phase
        model(torch.randn(5, 16)).sum().backward()


@each("kind", KINDS)
def test_the_bf16_phase_is_the_plain_model(kind):
    plain, x = MLP(), torch.randn(9, 16)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu=kind)
    histories = AmaxHistories(model)
    set_phase(model, "bf16")
    assert torch.equal(model(x), plain(x))
    histories.advance_()
    state = histories.state_dict()
    amaxes = [*state["amax_history"].values(), *state["channel_amax"].values()]
    assert amaxes and not any(amax.any() for amax in amaxes)
    assert model.down_proj.lowbit.token_amax is None


# --- folding: the same function to the bit, or a refusal that changes nothing; and what comes after -------------------


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
    step(model, AmaxHistories(model), torch.randn(9, 16))
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
