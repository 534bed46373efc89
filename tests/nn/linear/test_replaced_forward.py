"""Modules whose ``forward`` something has replaced before they are converted."""

from functools import partial, wraps

import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import GroupedLinear
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.nn.layers.classes import restore_classes


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
