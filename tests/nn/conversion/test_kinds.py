"""What holds for converted layers of every kind: names, bits without casts, copies, draws; and baked weights."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, Scale, bake, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys, SharedAmaxes, set_blend
from lightning_lowbit.nn.layers.classes import restore_classes
from tests.nn.layers import identical, pass_through
from tests.nn.passes.situations import SITUATIONS, WIDTH, Called
from tests.tables import each


class Drops(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x.flip(-1), x * 2, dropout_p=0.2)


DROPOUT = SITUATIONS["attention"]._replace(make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Drops()))
KINDS = {**SITUATIONS, "dropout": DROPOUT}


def classes(model):
    return [type(module) for module in model.modules()]


def weights(model):
    return [p for name, p in model.named_parameters() if not name.endswith("bias")]


def results(model, situation, **how):
    LayerKeys(model).fill_(3)
    torch.manual_seed(3)  # of dropout
    return pass_through(model, situation.input(), **how)


@each("kind", KINDS)
@each("autocast", [False, True])
def test_without_casts_names_classes_and_bits_are_those_of_before(kind, autocast):
    situation = KINDS[kind]
    plain, model = situation.model(None), situation.model()
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    expected = results(plain, situation, autocast=autocast)
    if kind != "codes":  # which need a cast
        identical(results(situation.model("bf16"), situation, autocast=autocast), expected)
    assert classes(restore_classes(model)) == classes(plain)
    identical(results(model, situation, autocast=autocast), expected)


@each("kind", KINDS)
def test_copies_and_pickles_compute_the_same_with_weights_of_their_own(kind):
    situation = KINDS[kind]
    model = situation.model()
    expected = results(model, situation)
    for layer in (copy.deepcopy(model.layer), pickle.loads(pickle.dumps(model.layer))):
        assert classes(layer) == classes(model.layer)
        twin = Called(layer, situation.call)
        identical(results(twin, situation), expected)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        assert not results(twin, situation)["y"].any()
    identical(results(model, situation), expected)


@each("kind", KINDS)
@each("use_reentrant", [False, True])
@each("autocast", [False, True])
def test_activations_that_are_computed_again_have_the_same_bits(kind, use_reentrant, autocast):
    situation = KINDS[kind]
    model = situation.model()
    expected = results(model, situation, autocast=autocast)
    recomputed = {"forward": lambda x: checkpoint(model, x, use_reentrant=use_reentrant), "autocast": autocast}
    identical(results(model, situation, **recomputed), expected)


@each("kind", KINDS)
def test_another_draw_of_the_backward_pass_has_other_bits(kind):
    model, draws = KINDS[kind].model(), []
    keys = LayerKeys(model)
    keys.expect_draws(True)
    keys.fill_(0)
    loss = model(KINDS[kind].input()).square().sum()
    for number in range(2):
        keys.draw_again_(number)
        draws.append(torch.autograd.grad(loss, weights(model), retain_graph=True))
    assert not any(map(torch.equal, *draws))


@each("kind", [kind for kind in KINDS if kind not in ("attention", "dropout", "codes")])
@each("block", ["row", "tensor"])
def test_baked_layers_compute_the_same(kind, block):
    situation = KINDS[kind]
    if kind == "multihead" and block == "tensor":
        return  # whose parts would share a scale
    plain, model = situation.model(None), situation.model(LinearCasts(fprop_w=Cast("int4", Scale("fp32", block))))
    expected = model(situation.input())
    assert classes(bake(model)) == classes(plain)
    torch.testing.assert_close(model(situation.input()), expected, rtol=1e-5, atol=1e-5)
    assert not any(map(torch.equal, weights(model), weights(plain)))


# --- baked weights, of a layer each and of models ---------------------------------------------------------------------

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def weight_only(preset, **changes):
    """The casts of a preset for the weight in the forward pass, and for nothing else."""
    return LinearCasts(fprop_w=LinearCasts.preset(preset).fprop_w, **changes)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), Conv1D(32, 48), nn.ReLU(), nn.Linear(32, 8, bias=False))


@each("preset", ["int4", "ternary", "nvfp4", "mxfp4", "fp8-row", "fp8-delayed"])
def test_baked_layers_of_presets_compute_the_same(preset):
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


def test_layers_that_share_an_amax_layers_on_their_way_and_parts_of_a_weight_are_baked_as_they_compute():
    model = convert(nn.ModuleDict({"q_proj": nn.Linear(64, 64), "k_proj": nn.Linear(64, 32)}), weight_only("nvfp4"))
    SharedAmaxes(model, ["(q|k)_proj"]).measure()
    set_blend(model, 0.5)
    expected = model["k_proj"](X)
    torch.testing.assert_close(bake(model)["k_proj"](X), expected, rtol=1e-5, atol=1e-5)
    attention, memory = convert(nn.MultiheadAttention(64, 2), weight_only("int4")), X[:4]
    expected = attention(X, memory, memory)[0]
    torch.testing.assert_close(bake(attention)(X, memory, memory)[0], expected, rtol=1e-5, atol=1e-5)


def test_what_no_weight_can_hold_is_refused_and_nothing_is_changed():
    tied = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8, bias=False))
    tied[1].weight = tied[0].weight
    three = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    three[2].weight = three[1].weight = three[0].weight
    view = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    view[1].weight = nn.Parameter(view[0].weight.data.t())
    stochastic = weight_only("int4").replace(fprop_w=weight_only("int4").fprop_w.replace(rounding="stochastic"))
    one_scale = weight_only("fp8-current", dgrad_w=LinearCasts.preset("fp8-current").dgrad_w)
    multihead = nn.Sequential(nn.MultiheadAttention(64, 2))
    for model, why in (
        (convert(network(), "int4"), "3 of 3 layers, e.g. 0: it quantizes activations"),
        (convert(network(), weight_only("int4"), overrides={"2": "ternary"}), "1 of 3 layers, e.g. 2"),
        (convert(network(), weight_only("nvfp4", hadamard={"fprop": 16})), "rotates weights"),
        (convert(network(), stochastic), "stochastically"),
        (convert(multihead, one_scale, skip=["out_proj"]), "parts of its weight share scales"),
        (convert(tied, weight_only("int4")), "The weight of 1 is also that of 0"),
        (convert(three, weight_only("int4"), skip=["0", "1"]), "The weight of 2 is also that of [01]"),
        (convert(view, weight_only("int4")), "The weight of [01] is also that of [01]"),
        (network(), "no converted layers"),
    ):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=why):
            bake(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
