"""Derivatives of gradients: refused for every layer that quantizes, and torch's own where nothing is quantized."""

import copy
import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.autograd.functional import hvp, jvp
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import LowBitPrecision, convert
from lightning_lowbit.nn import LayerKeys, set_phase
from tests.nn.layers import layer_like, token_amax
from tests.nn.named_casts import CASTS
from tests.nn.passes.situations import SITUATIONS, WIDTH, frozen
from tests.tables import each


def refused(name):
    return pytest.raises(ValueError, match=rf"^Layer {re.escape(name)}: the gradient of a quantized layer cannot be")


def gradient(model, x, to=None):
    """Of a sum, whose own derivative depends on nothing: only the layer leads back to its inputs."""
    return torch.autograd.grad(model(x).sum(), x if to is None else to, create_graph=True)[0]


def penalty(model, x):
    (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    found.square().sum().backward()
    return [p.grad for p in model.parameters()]


def product_with_hessian(model, x):
    return hvp(lambda x: model(x).square().sum(), x.detach(), torch.ones_like(x))[1]


def meta_learning(model, x):
    """The outer gradient through a step of the inner loop."""
    weights = dict(model.named_parameters())
    inner = torch.autograd.grad(model(x.detach()).square().sum(), [*weights.values()], create_graph=True)
    stepped = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), inner, strict=True)}
    outer = functional_call(model, stepped, (x.detach(),)).square().sum()
    return torch.autograd.grad(outer, [*weights.values()])


def of_input_alone(model, x):
    return torch.autograd.grad(gradient(model, x).square().sum(), [*model.parameters()], allow_unused=True)


def beside_the_loss(model, x):
    """The penalty is one term: without an error the other one would hide that it has no gradient."""
    found = gradient(model, x)
    return torch.autograd.grad(model(x).sum() + found.square().sum(), [*model.parameters()], allow_unused=True)


def double_backward_jvp(model, x):
    return jvp(model, x.detach(), torch.ones_like(x))[1]


WAYS = (penalty, product_with_hessian, meta_learning, of_input_alone, beside_the_loss, double_backward_jvp)


@each("kind", SITUATIONS)
def test_a_second_derivative_of_any_layer_is_refused_in_any_way(kind):
    """In the backward pass of two high-precision GEMMs, too."""
    of = SITUATIONS[kind]
    model = of.model()
    names = "|".join(re.escape(name) for name in (of.name, "layer.out_proj", "layer.down_proj", "layer.0"))
    ways = WAYS if kind == "linear" else (penalty, product_with_hessian, beside_the_loss, of_input_alone)
    for phase in ("fqt", "qaf"):
        set_phase(model, phase)
        for way in ways:
            if kind == "attention" and way in (of_input_alone, beside_the_loss):
                way = penalty  # a weighted mean, whose sum
            with pytest.raises(ValueError, match=rf"^Layer ({names}): the gradient of a quantized layer cannot be"):
                way(model, of.input())


@each("kind", SITUATIONS)
def test_without_casts_second_derivatives_are_those_of_the_original(kind):
    of = SITUATIONS[kind]
    model, original = of.model(), of.model(None)
    set_phase(model, "bf16")
    for way in WAYS:
        with sdpa_kernel(SDPBackend.MATH):  # the other one has no second derivative, of torch's own layers either
            found, expected = (way(one, of.input()) for one in (model, original))
        found, expected = (one if isinstance(one, tuple | list) else [one] for one in (found, expected))
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5), way.__name__


@each("casts", CASTS)
def test_with_all_casts(casts):
    """Of a layer alone, whose gradient depends on what it has kept only by its mark; with surrogates and smoothing."""
    layer = layer_like(nn.Linear(WIDTH, 48), CASTS[casts])
    if layer.casts.traits.is_empty:
        return
    x = torch.randn(16, WIDTH, requires_grad=True)
    for to, by in ((x, layer.weight), (layer.weight, x), (layer.weight, layer.weight), (x, x)):
        if layer.casts.smooth == "token":
            layer.lowbit.token_amax = token_amax(x)
        found = gradient(layer, x, to)
        with refused("QuantLinear (48, 32)"):
            torch.autograd.grad(found.square().sum(), by)


def test_of_a_frozen_weight():
    x = torch.randn(4, WIDTH, requires_grad=True)
    with refused("0"):
        gradient(frozen(), x).square().sum().backward()


@each("kind", SITUATIONS)
def test_gradients_with_a_graph_that_nobody_uses_are_the_same(kind):
    of = SITUATIONS[kind]
    model = of.model()

    def gradients(**kwargs):
        LayerKeys(model).fill_(0)
        x = of.input()
        return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], allow_unused=True, **kwargs)

    for found, expected in zip(gradients(create_graph=True), gradients(), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
        assert found is None or found.requires_grad


def test_other_terms_keep_their_derivatives():
    model, x, y = SITUATIONS["linear"].model(), SITUATIONS["linear"].input(), torch.randn(3, requires_grad=True)
    (found,) = torch.autograd.grad(model(x).sum() + y.pow(3).sum(), y, create_graph=True)
    assert torch.allclose(torch.autograd.grad(found.sum(), y)[0], 6 * y)


def test_in_a_region_that_is_recomputed():
    model, x = SITUATIONS["linear"].model(), SITUATIONS["linear"].input()
    with refused("layer"):
        gradient(lambda x: checkpoint(model, x, use_reentrant=False), x).square().sum().backward()


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@each("backend", ["eager", "aot_eager"])
def test_compiled_torch_refuses(backend):
    model = SITUATIONS["linear"].model("int4")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match="does not require grad|double backward|donated buffers"):
        penalty(compiled, SITUATIONS["linear"].input())


class Penalized(LightningModule):
    def __init__(self, phase):
        super().__init__()
        self.net, self.phase = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), phase

    def training_step(self, batch, _):
        plugin, x = self.trainer.precision_plugin, batch[0].requires_grad_()
        plugin.push_phase("penalty", self.phase)
        self.penalty = gradient(self.net, x).square().sum()
        self.derivative = torch.autograd.grad(self.penalty, self.net[0].weight)[0]
        plugin.pop_phase("penalty")
        return self.net(x).square().sum() + self.penalty.detach()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_way_out_with_a_plugin():
    loader = DataLoader(TensorDataset(torch.randn(4, WIDTH)), batch_size=4)

    def fit(model):
        plugin = LowBitPrecision("nvfp4", compute_dtype="fp32")
        Trainer(fast_dev_run=True, accelerator="cpu", plugins=[plugin], enable_progress_bar=False).fit(model, loader)

    with pytest.raises(
        ValueError, match=re.escape("Layer net.0: ") + ".*" + re.escape("push_phase('penalty', 'bf16')")
    ):
        fit(Penalized(None))
    model = Penalized("bf16")
    twin = copy.deepcopy(model.net)
    fit(model)
    expected = gradient(twin, loader.dataset.tensors[0].requires_grad_()).square().sum()
    assert torch.allclose(model.derivative, torch.autograd.grad(expected, twin[0].weight)[0])
    assert not model.net[0].casts.traits.is_empty


def test_the_name_is_that_in_the_model():
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))})
    convert(model, "int4", only=["net.1"])
    with refused("net.1"):
        gradient(model["net"], torch.randn(2, WIDTH, requires_grad=True)).square().sum().backward()
    with refused("QuantLinear (48, 32)"):
        gradient(convert(nn.Linear(WIDTH, 48), "int4"), torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
