"""Baked layers are plain ones that compute what the converted ones did."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import LinearCasts, bake, convert
from lightning_lowbit.nn import AmaxHistories, SharedAmaxes, set_blend
from tests.tables import each

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def weight_only(preset, **changes):
    """The casts of a preset for the weight in the forward pass, and for nothing else."""
    return LinearCasts(fprop_w=LinearCasts.preset(preset).fprop_w, **changes)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), Conv1D(32, 48), nn.ReLU(), nn.Linear(32, 8, bias=False))


@each("preset", ["int4", "ternary", "nvfp4", "mxfp4", "fp8-row", "fp8-delayed"])
def test_baked_layers_compute_the_same(preset):
    model = convert(network(), weight_only(preset), overrides={"4": "bf16"})
    if preset == "fp8-delayed":
        histories = AmaxHistories(model)
        model(X)
        with torch.no_grad():
            model[0].weight.mul_(0.5)  # scaled by the amax of before
        histories.advance_()
        histories.recording = False
    expected, latent = model(X), model[0].weight.clone()
    baked = bake(model)
    assert [type(layer) for layer in baked] == [nn.Linear, nn.ReLU, Conv1D, nn.ReLU, nn.Linear]
    assert not torch.equal(baked[0].weight, latent)
    assert [*vars(baked[0])] == [*vars(nn.Linear(64, 48))]
    torch.testing.assert_close(baked(X), expected, rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_to_the_dtype_of_autocast_first():
    with torch.autocast("cpu", torch.bfloat16):
        model = convert(network(), weight_only("mxfp4"))
        expected = model(X)
        assert torch.equal(bake(model)(X), expected), "mxfp4 is exact in bfloat16"


def test_layers_that_share_an_amax_and_layers_on_their_way_are_baked_as_they_compute():
    model = convert(nn.ModuleDict({"q_proj": nn.Linear(64, 64), "k_proj": nn.Linear(64, 32)}), weight_only("nvfp4"))
    SharedAmaxes(model, ["(q|k)_proj"]).measure()
    set_blend(model, 0.5)
    expected = model["k_proj"](X)
    torch.testing.assert_close(bake(model)["k_proj"](X), expected, rtol=1e-5, atol=1e-5)


def test_what_no_weight_can_hold_is_refused_and_nothing_is_changed():
    tied = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8, bias=False))
    tied[1].weight = tied[0].weight
    three = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    three[2].weight = three[1].weight = three[0].weight
    view = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    view[1].weight = nn.Parameter(view[0].weight.data.t())
    stochastic = weight_only("int4").replace(fprop_w=weight_only("int4").fprop_w.replace(rounding="stochastic"))
    for model, why in (
        (convert(network(), "int4"), "3 of 3 layers, e.g. 0: it quantizes activations"),
        (convert(network(), weight_only("int4"), overrides={"2": "ternary"}), "1 of 3 layers, e.g. 2"),
        (convert(network(), weight_only("nvfp4", hadamard={"fprop": 16})), "rotates weights"),
        (convert(network(), stochastic), "stochastically"),
        (convert(tied, weight_only("int4")), "The weight of 1 is also that of 0"),
        (convert(three, weight_only("int4"), skip=["0", "1"]), "The weight of 2 is also that of [01]"),
        (convert(view, weight_only("int4")), "The weight of [01] is also that of [01]"),
        (network(), "no converted layers"),
    ):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=why):
            bake(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
