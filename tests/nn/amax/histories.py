"""Casts, tensors of a given amax, models with histories, what those remember."""

import copy
import math

import torch
from torch import nn

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from tests.nn.conversion.swiglus import MLP
from tests.nn.layers import Net, every, gradients, identical, layer_like, run

TOKENS, IN, OUT = 32, 48, 16
BY_TENSOR = {"x": ("fprop_x", "wgrad_x"), "w": ("fprop_w", "dgrad_w"), "g": ("dgrad_g", "wgrad_g")}


def delayed(element="e4m3", rounding=None, **scale):
    return Cast(element, Scale("fp32", "tensor", rounding, source="delayed", **scale))


E4M3 = delayed()
NVFP4 = every(
    Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed")),
    dgrad_g=Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed"), "stochastic"),
)


def single(casts, inputs=IN, outputs=OUT):
    """A layer of its own, and its histories."""
    layer = layer_like(nn.Linear(inputs, outputs, bias=False), casts)
    return layer, AmaxHistories(layer)


def filled(shape, amax, seed=0):
    """Numbers of all sizes, one of which is minus the largest magnitude."""
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    tensor *= amax if math.isfinite(amax) else 1
    tensor.view(-1)[1] = -amax
    return tensor


def one_pass(layer, x, w=None, g=None):
    """Forward and backward pass of tensors with these largest magnitudes, those of w and g by default that of x."""
    layer.weight.data.copy_(filled(layer.weight.shape, x if w is None else w, 1))
    outputs, inputs = layer.weight.shape
    return run(layer, filled((TOKENS, inputs), x), filled((TOKENS, outputs), x if g is None else g, 2))


def remembered(histories):
    """By layer and operand, the amaxes that there are, oldest first."""
    found = {}
    for name, tensor in histories.state_dict()["amax_history"].items():
        amaxes = tensor.tolist()
        found[name] = [amax for amax in amaxes if amax != 0]
        empty = len(amaxes) - len(found[name])
        assert not any(amaxes[:empty]), f"{name}: a gap in {amaxes}"
    return found


def same_states(found, expected, message=""):
    for kind, tensors in expected.state_dict().items():
        identical(found.state_dict()[kind], tensors, f"{message} {kind} of")


def trained(casts="fp8-delayed", steps=3, start=0, **kwargs):
    torch.manual_seed(0)
    model = convert(Net(), casts, **kwargs)
    histories = AmaxHistories(model)
    steps_of(model, histories, range(start, start + steps))
    return model, histories


def steps_of(model, histories, steps):
    found = []
    for step in steps:
        found.append(gradients(model, filled((16, 32), [2.0, 0.5, 5.0, 1.0, 0.3][step % 5], step)))
        histories.advance_()
    return found


def twins(casts, module=None, **settings):
    """Two equal models with keys, each with its histories."""
    torch.manual_seed(0)
    model = convert(Net(**settings) if module is None else module, casts)
    models = model, copy.deepcopy(model)
    for one in models:
        LayerKeys(one).fill_(0)
    return [(one, AmaxHistories(one)) for one in models]


def assert_equal_steps(changed, plain, amaxes=(1.0, 20.0, 0.1)):
    """Passes of two micro-batches in each step, and histories after it, of two models with histories."""
    for step, amax in enumerate(amaxes):
        for micro_batch in range(2):
            x = filled((16, 32), amax, micro_batch)
            identical(gradients(changed[0], x), gradients(plain[0], x), f"step {step}")
        for _, histories in (changed, plain):
            histories.advance_()
        same_states(changed[1], plain[1], f"step {step}")
    assert {len(history) for history in remembered(changed[1]).values()} == {len(amaxes)}


def gated(casts="fp8-delayed", width=24, smooth="channel"):
    torch.manual_seed(0)
    model = convert(MLP(16, width, bias=True), casts, smooth_swiglu=smooth)
    return model, AmaxHistories(model)
