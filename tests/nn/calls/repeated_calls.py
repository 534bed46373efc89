"""A model whose layers are called several times, regions to recompute, and a step of it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.nn import OPERANDS, LayerKeys

SIZE = 16
STOCHASTIC = Cast("int4", Scale("fp32", SIZE), rounding="stochastic")
EVERYTHING = dict.fromkeys(OPERANDS, STOCHASTIC)


def plain(function, x):
    return function(x)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


class Recurrent(nn.Module):
    """Four steps in depth through the same two layers, one of them twice, and a layer that is called once."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4)
        self.outer = plain
        self.inner = plain
        self.shape = "each step"

    def step(self, x):
        return x + torch.tanh(self.b(torch.relu(self.a(x)))) + self.a(x)

    def two(self, x):
        return self.inner(self.step, self.inner(self.step, x))

    def four(self, x):
        return self.two(self.two(x))

    def whole(self, x):
        return self.head(self.four(x))

    def forward(self, x):
        region = self.outer
        if self.shape == "each step":
            return self.head(region(self.step, region(self.step, region(self.step, region(self.step, x)))))
        if self.shape == "several steps":
            return self.head(region(self.two, region(self.two, x)))
        if self.shape == "some steps":
            return self.head(region(self.step, self.step(region(self.step, self.step(x)))))
        return region(self.whole, x)


SHAPES = ("each step", "several steps", "some steps", "whole")


def recurrent(casts=EVERYTHING):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = convert(Recurrent(), casts)
    return model, LayerKeys(model, seed=1)


def batch():
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(2)).requires_grad_()


def gradients(model, keys, forward=None, backwards=1):
    """Of a step, in which there may be several backward passes."""
    model.zero_grad()
    keys.fill_(5)
    x = batch()
    y = (model if forward is None else forward)(x)
    loss = y.square().sum()
    for number in range(backwards):
        loss.backward(retain_graph=number < backwards - 1)
    used = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **used}


def assert_equal(found, expected, what, is_reordered=False):
    """To the bit, but for sums over calls that are added up in another order."""
    for (name, a), b in zip(found.items(), expected.values(), strict=True):
        if is_reordered and name not in "yx":  # other bits would make a difference of about a tenth
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()), msg=f"{what}: {name}")
        else:
            assert torch.equal(a, b), f"{what}: {name} differs by {(a - b).abs().max()}"
