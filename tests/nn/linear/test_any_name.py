"""Linear layers by any name: subclasses, known and registered ones, and modules whose ``forward`` was replaced."""

import copy
import pickle
import sys
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import LinearCasts, convert, register_linear
from lightning_lowbit.nn import GroupedLinear, QuantizedLayer, plan
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.nn.layers import classes, known_linears, registry
from lightning_lowbit.nn.layers.classes import restore_classes
from tests.nn.layers import every, identical, layer_like, run
from tests.tables import each

IN, OUT = 48, 24
NEAREST = every(LinearCasts.preset("nvfp4").fprop_x)  # each call has the same bits


class Plain(nn.Linear):
    """Has a constructor of its own only, as ESMFold's has."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)


class Halved(nn.Linear):
    def forward(self, input, whole=False):
        return super().forward(input) if whole else super().forward(input) / 2


class Columns(nn.Module):
    """Stores its weight as ``[in, out]``, and has no attribute ``bias``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, hidden):
        return hidden @ self.weight


class Linear(nn.Module):
    """Like that of torch_geometric, whose copies are constructed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def __deepcopy__(self, memo):
        twin = Linear(*self.weight.shape[::-1])
        twin.load_state_dict(self.state_dict())
        return twin


def halved(layer, multiply, input, whole=False):
    return multiply(input) if whole else multiply(input) / 2


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(known_linears, "_REGISTERED", {})
    register_linear(Halved, forward=halved)
    register_linear(Columns, "[in, out]")
    register_linear(Linear)
    yield
    registry.converted_class.cache_clear()


LAYERS = {cls.__name__: lambda cls=cls: cls(IN, OUT) for cls in (Plain, FalconLinear, Halved, Columns, Linear)}
LAYERS["Conv1D"] = lambda: Conv1D(OUT, IN)
STORE_COLUMNS = (Columns, Conv1D)


def twin_of(layer):
    """An ``nn.Linear`` with the weights of a layer."""
    twin, weight = nn.Linear(IN, OUT, bias=hasattr(layer, "bias")), layer.weight.detach()
    twin.weight.data = (weight.t() if isinstance(layer, STORE_COLUMNS) else weight).clone()
    if hasattr(layer, "bias"):
        twin.bias.data = layer.bias.detach().clone()
    return twin


@each("name", LAYERS)
@each("autocast", [False, True])
def test_each_equals_a_converted_linear_layer_to_the_bit(name, autocast):
    original, factor = LAYERS[name](), 0.5 if name == "Halved" else 1.0
    x, g = torch.randn(3, 5, IN), torch.randn(3, 5, OUT)
    found = run(layer_like(original, "nvfp4"), x, g, autocast)
    expected = run(layer_like(twin_of(original), "nvfp4"), x, g * factor, autocast)
    expected["y"] *= factor
    if isinstance(original, STORE_COLUMNS):
        expected["weight"] = expected["weight"].t()
    identical(found, expected, name)
    identical(run(layer_like(original, LinearCasts()), x, g, autocast), run(original, x, g, autocast), name)


@each("name", LAYERS)
def test_copies_pickles_and_state_dicts_are_those_of_the_class(name):
    layer = layer_like(original := LAYERS[name](), NEAREST)
    assert isinstance(layer, type(original)) and isinstance(layer, QuantizedLayer)
    assert "casts=" in repr(layer)
    original.load_state_dict(layer.state_dict())
    x, g = torch.randn(7, IN), torch.randn(7, OUT)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        identical(run(twin, x, g), run(layer, x, g), name)
    assert type(classes.restore_classes(nn.Sequential(layer))[0]) is type(original)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_and_recomputed_passes_have_the_same_bits(name):
    layer, x, g = layer_like(LAYERS[name](), NEAREST), torch.randn(16, IN), torch.randn(16, OUT)
    expected, given = run(layer, x, g), x.clone().requires_grad_()
    y = checkpoint(torch.compile(layer, fullgraph=True), given, use_reentrant=False)
    y.backward(g)
    assert torch.equal(y, expected["y"]) and torch.equal(given.grad, expected["x"])


def test_a_forward_of_its_own_gets_all_arguments():
    layer, x = layer_like(Halved(IN, OUT), NEAREST), torch.randn(4, IN)
    assert torch.equal(layer(x, whole=True), 2 * layer(input=x))
    with pytest.raises(ValueError, match=r"QuantColumns is registered .* got 2 arguments\. .*forward="):
        layer_like(Columns(IN, OUT), "nvfp4")(x, x)


def test_a_known_class_with_additional_outputs():
    layer = IdeficsDecoupledLinear(IN, OUT, out_additional_features=16, partially_freeze=False)
    model, x = nn.Sequential(layer), torch.randn(4, IN)
    y = convert(model, LinearCasts.preset("nvfp4").replace(wgrad_g=None))(x)
    assert y.shape == (4, OUT + 16)
    assert torch.equal(y[:, OUT:], layer.additional_fc(x))
    assert not torch.equal(y[:, :OUT], nn.functional.linear(x, layer.weight, layer.bias)), "not quantized"


@pytest.mark.parametrize("module", ["torch_geometric.nn.dense.linear", "timm.layers.linear"])
def test_layers_of_other_packages_are_known_by_name(module, monkeypatch):
    stand_in = type("Linear", (Linear,), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(Linear=stand_in))
    assert list(plan(nn.Sequential(stand_in(IN, OUT)), "nvfp4")) == ["0"]


def test_what_cannot_be_converted_stays_in_high_precision():
    class Weighted(nn.Linear):
        @property
        def weight(self):
            return self.own.exp()

    clash = Plain(IN, OUT)
    clash.lowbit = "something else"
    computed = parametrize.register_parametrization(nn.Linear(IN, OUT), "weight", nn.Identity())
    assert registry.converted_class(Weighted) is None
    model = nn.ModuleDict({"lazy": nn.LazyLinear(OUT), "clash": clash, "computed": computed, "plain": Plain(IN, OUT)})
    assert list(plan(model, "nvfp4")) == ["plain"]
    model["lazy"](torch.randn(2, IN))
    assert list(plan(model, "nvfp4")) == ["lazy", "plain"], "it has a weight now"


def test_registering_takes_effect_at_the_next_conversion():
    class Late(Halved):
        pass

    model = nn.Sequential(nn.Linear(IN, IN), Late(IN, OUT))
    assert list(plan(model, "nvfp4")) == ["0"], "a subclass of a registered class might compute otherwise"
    register_linear(Late, forward=halved)
    register_linear(Late, forward=halved)
    assert list(plan(model, "nvfp4")) == ["0", "1"]


def test_registrations_that_cannot_be_honored_say_what_was_needed():
    refused = {
        r"takes a class of modules, such as MyLinear; got Columns\(": lambda: register_linear(Columns(2, 2)),
        r"takes a class of modules, .*; got <class 'int'>": lambda: register_linear(int),
        r"Unknown order of a weight 'in, out'\. .*'\[in, out\]'": lambda: register_linear(Columns, "in, out"),
        r"forward is a function .*; got 3\.": lambda: register_linear(Columns, forward=3),
        r"Columns is registered already, with weight='\[in, out\]'": lambda: register_linear(Columns),
        "Plain is converted without being registered": lambda: register_linear(Plain),
        "Linear is converted without being registered": lambda: register_linear(nn.Linear),
        r"Conv1d is registered .* weight of two dimensions; got one \(4, 3, 2\)": lambda: (
            register_linear(nn.Conv1d, forward=halved),
            plan(nn.Sequential(nn.Conv1d(3, 4, 2), nn.Linear(IN, OUT)), "nvfp4"),
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


class _Plan:
    """Holds the method, as expert parallelism of transformers does."""

    def __init__(self, module):
        self.inner = module.forward


def by_closure(module):
    """As tensor parallelism of transformers."""
    original = module.forward

    @wraps(original)
    def forward(*args):
        return original(*args) + 1

    module.forward = forward


def by_object(module):
    plan = [_Plan(module)][0]
    module.forward = lambda *args: plan.inner(*args) + 1


def by_attribute(module):
    """As hooks of accelerate."""

    def forward(module, *args):
        return module._old_forward(*args) + 1

    module._old_forward = module.forward
    module.forward = partial(forward, module)


@pytest.mark.parametrize("replace", [by_closure, by_object, by_attribute])
def test_what_replaced_it_calls_the_converted_layer(replace):
    x, ends = torch.randn(4, 32), [1, 4]
    for layer, args in ((nn.Linear(32, 32), (x,)), (GroupedLinear(2, 32, 32), (x, ends))):
        model = nn.Sequential(layer)
        plain = layer(*args)
        expected = convert(model, "mxfp4")[0](*args) + 1
        restore_classes(model)
        replace(layer)
        assert torch.equal(layer(*args), plain + 1)
        for _ in range(2):  # also a second time
            assert torch.equal(convert(model, "mxfp4")[0](*args), expected)
            assert not torch.equal(expected, plain + 1)
            restore_classes(model)
            assert torch.equal(layer(*args), plain + 1)


def test_a_forward_that_does_not_call_that_of_the_class_stays():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].forward = torch.neg
    convert(model, "nvfp4")
    assert type(model[0]) is nn.Linear and type(model[1]) is not nn.Linear
    assert "its forward pass was replaced, by" in str(Reasons(model).of("0"))


def test_a_variable_of_the_forward_pass_may_be_unset():
    layer = nn.Linear(32, 32)
    own = layer.forward

    def forward(x):
        return unset(x) if x is None else own(x)

    layer.forward = forward
    model = convert(nn.Sequential(layer), "mxfp4")
    assert type(model[0]) is not nn.Linear
    unset = own  # from here on it is
