"""When the share λ of quantization takes effect, and what it may be."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import set_blend
from lightning_lowbit.nn.native.devices import declared
from tests.nn.blend.layers import CASTS, IN, OUT, REMEMBERED, tensors
from tests.nn.layers import Net, gradients, identical, layer_like, net, remember
from tests.tables import each


@each("name", CASTS)
def test_a_backward_pass_has_the_share_of_its_forward_pass(name):
    """λ of the next micro-batch may be set before this one's backward pass."""
    original, (x, g) = nn.Linear(IN, OUT), tensors()
    found = {}
    for later in (0.3, 0.8):
        share = torch.tensor(0.3)
        layer = layer_like(original, CASTS[name])
        remember(layer, *REMEMBERED)
        set_blend(layer, share)
        x_ = x.clone().requires_grad_()
        y = layer(x_)
        share.fill_(later)
        y.backward(g)
        found[later] = {"x": x_.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    identical(found[0.8], found[0.3], "λ was changed in between:")


@pytest.mark.parametrize("name", ["ternary", "fp8-current"])
def test_on_its_way_nothing_is_native(within, name):
    within(declared("cpu", {"fp8", "int8"}))
    layer = layer_like(nn.Linear(IN, OUT), name)
    native = layer.native_gemms(torch.device("cpu"))
    assert native, "nothing shows"
    set_blend(layer, 0.5)
    assert layer.native_gemms(torch.device("cpu")) == ()
    assert layer.native_gemms(torch.device("cpu"), layer.full_casts) == native, "what it will be, all the way"


def test_it_changes_in_place_and_for_all_layers():
    model, _ = net("int4")
    share, x = torch.tensor(0.0), torch.randn(16, 32)
    set_blend(model, share)
    start = gradients(model, x)
    for number in (0.5, 0.25):
        share.fill_(number)
        found = gradients(model, x)
        assert not torch.equal(found["y"], start["y"])
        other, _ = net("int4")
        set_blend(other, number)
        identical(found, gradients(other, x), f"λ = {number}:")


@pytest.mark.slow
@pytest.mark.parametrize("casts", ["ternary", "delayed, surrogates"])
def test_it_costs_no_compilation_to_change(compiler, casts):
    model, keys = net(CASTS[casts])
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    x, share = torch.randn(16, 32), torch.tensor(0.0)
    set_blend(model, share)
    for step, number in enumerate((0.0, 0.25, 0.5, 1.0)):
        keys.fill_(step)
        share.fill_(number)
        identical(gradients(compiled, x), gradients(model, x), f"compiled, λ = {number}:")
    assert compiler.frame_count == 1, f"{compiler.frame_count} compilations"
    set_blend(model, None)
    gradients(compiled, x)
    assert compiler.frame_count == 2, "all the way is another graph"


NUMBERS = (-0.1, 1.1, 2, torch.inf, torch.nan, True, "0.5")
TENSORS = torch.tensor(1.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)


@each(
    ("blend", "message"),
    [
        *((number, rf"blend is λ, .*, 0 or more and at most 1; got {number!r}") for number in NUMBERS),
        *((tensor, "0-d float32 tensor|at most 1") for tensor in TENSORS),
    ],
)
def test_what_is_no_share_is_refused(blend, message):
    """When it is set, and not by the kernel that meets it first."""
    model = convert(Net(), "int4")
    set_blend(model, 0.5)
    with pytest.raises(ValueError, match=message):
        set_blend(model, blend)
    assert model.first.lowbit.blend == 0.5, "what was refused has been set"


def test_numbers_and_copies():
    model = convert(Net(), "int4")
    for number in (0, 0.0, 0.5):
        set_blend(model, number)
        share = model.first.lowbit.blend
        assert (share.dtype, share.shape, share.item()) == (torch.float32, (), number)
        assert model.second.lowbit.blend is share, "layers do not share λ"
    twin = copy.deepcopy(model)
    twin.first.lowbit.blend.fill_(0.75)
    assert model.first.lowbit.blend == 0.5
    assert list(model.state_dict()) == list(Net().state_dict()), "λ is none of the model's state"
    for whole in (1, 1.0, None):
        set_blend(model, whole)
        assert model.first.lowbit.blend is None
