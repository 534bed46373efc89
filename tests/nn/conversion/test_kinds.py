"""What holds for converted layers of every kind: names, bits without casts, copies, draws, and baked weights."""

import copy
import pickle

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, LinearCasts, Scale, bake
from lightning_lowbit.nn import LayerKeys
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
