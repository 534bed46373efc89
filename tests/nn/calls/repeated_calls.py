"""A model whose layers are called several times, regions to recompute, and a step of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.nn import OPERANDS, LayerKeys

SIZE = 16
STOCHASTIC = Cast("int4", Scale("fp32", SIZE), rounding="stochastic")
EVERYTHING: dict[str, Any] = dict.fromkeys(OPERANDS, STOCHASTIC)

Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def non_reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


class Recurrent(nn.Module):
    """Four steps in depth through the same two layers, one of them twice, and a layer that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4)
        self.outer: Region = plain
        self.inner: Region = plain
        self.shape = "each step"

    def step(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.relu(self.a(x)))) + self.a(x)

    def two(self, x: Tensor) -> Tensor:
        return self.inner(self.step, self.inner(self.step, x))

    def four(self, x: Tensor) -> Tensor:
        return self.two(self.two(x))

    def whole(self, x: Tensor) -> Tensor:
        return self.head(self.four(x))

    def forward(self, x: Tensor) -> Tensor:
        region = self.outer
        if self.shape == "each step":
            return self.head(region(self.step, region(self.step, region(self.step, region(self.step, x)))))
        if self.shape == "several steps":
            return self.head(region(self.two, region(self.two, x)))
        if self.shape == "some steps":
            return self.head(region(self.step, self.step(region(self.step, self.step(x)))))
        return region(self.whole, x)


SHAPES = ("each step", "several steps", "some steps", "whole")


def recurrent(casts: Any = EVERYTHING) -> tuple[Recurrent, LayerKeys]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = convert(Recurrent(), casts)
    return model, LayerKeys(model, seed=1)


def batch() -> Tensor:
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(2)).requires_grad_()


def gradients(model: nn.Module, keys: LayerKeys, forward: Any = None, backwards: int = 1) -> dict[str, Tensor]:
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


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str, is_reordered: bool = False) -> None:
    """To the bit, but for sums over calls that are added up in another order."""
    for (name, a), b in zip(found.items(), expected.values(), strict=True):
        if is_reordered and name not in "yx":  # other bits would make a difference of about a tenth
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()), msg=f"{what}: {name}")
        else:
            assert torch.equal(a, b), f"{what}: {name} differs by {(a - b).abs().max()}"
