"""Smooth-SwiGLU's layers: which are smoothed, with which casts and in which phases, and which models are refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_lowbit import LinearCasts, convert, smooth_swiglu
from lightning_lowbit.nn import AmaxHistories, plan, set_phase, swiglus
from tests.nn.conversion.swiglus import (
    CURRENT,
    DELAYED,
    KINDS,
    MLP,
    MODELS,
    QAT,
    Net,
    casts_by_name,
    everything,
    inputs_of,
    output_of,
    unchanged,
)
from tests.tables import each


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


def gradients_only():
    return LinearCasts(dgrad_g=DELAYED.dgrad_g, wgrad_g=DELAYED.wgrad_g)


@each(
    ("model", "arguments", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, "found no SwiGLU in Sequential"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)), {}, "found no SwiGLU"),
        (Net, {"skip": ["down_proj"]}, r"none of the 2 down projections, e.g. layers\.0\.down_proj, is quantized"),
        (Net, {"overrides": {"down_proj": gradients_only()}}, "none of the 2"),
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
        (gradients_only().replace(fprop_w=CURRENT.fprop_w), {"fqt", "qaf"}),
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
