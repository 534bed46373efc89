"""A small model of every kind of layer, and calls of it that give one output."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import convert, pack_frozen, register_linear
from lightning_lowbit.nn import AmaxHistories, GroupedLinear, LayerKeys

WIDTH = 32


class Scaled(nn.Linear):
    def forward(self, input):
        return 0.5 * super().forward(input)


register_linear(Scaled, forward=lambda layer, multiply, x: 0.5 * multiply(x))


class Called(nn.Module):
    """Calls its layer in a way of its own, and returns one tensor."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x.flip(-1), x * 2)


def experts():
    config = OlmoeConfig(hidden_size=WIDTH, intermediate_size=WIDTH, num_experts=3)
    made = OlmoeExperts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def routed(layer, x):
    chosen = torch.arange(len(x))[:, None] % 3
    weights = torch.ones(len(x), 1)
    return layer(x, chosen, weights)


def self_attention(layer, x):
    return layer(x, x, x, need_weights=False)[0]


class Situation(NamedTuple):
    """A layer, the shape of its input, how it is called, what errors call it, and arguments of ``convert``."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x)
    name: str = "layer"
    options: dict[str, Any] = {}

    def model(self, casts="nvfp4"):
        """Converted, unless the casts are None."""
        torch.manual_seed(0)
        model = Called(self.make(), self.call)
        if casts is not None:
            options = {name: casts if value is ... else value for name, value in self.options.items()}
            convert(model, casts, **options)
            LayerKeys(model).fill_(0)
            AmaxHistories(model)
        return model

    def input(self, requires_grad=True):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


ROWS, IMAGES = (6, WIDTH), (2, 16, 5, 5)

SITUATIONS = {
    "linear": Situation(lambda: nn.Linear(WIDTH, 48), ROWS),
    "codes": Situation(lambda: nn.Linear(WIDTH, 48), ROWS, options={"save": "codes"}),
    "Conv1D": Situation(lambda: Conv1D(48, WIDTH), ROWS),
    "registered": Situation(lambda: Scaled(WIDTH, 48), ROWS),
    "convolution": Situation(lambda: nn.Conv2d(16, 32, 3, padding=1), IMAGES),
    "pixelwise": Situation(lambda: nn.Conv2d(16, 32, 1), IMAGES),
    "groups": Situation(lambda: nn.Conv2d(16, 32, 3, groups=2), IMAGES),
    "transposed": Situation(lambda: nn.ConvTranspose2d(16, 16, 3, stride=2), IMAGES),
    "stack": Situation(lambda: GroupedLinear(2, WIDTH, 48), ROWS, lambda layer, x: layer(x, [2, 6])),
    "experts": Situation(experts, ROWS, routed, "layer.gate_up_proj"),
    "multihead": Situation(lambda: nn.MultiheadAttention(WIDTH, 2), (3, 2, WIDTH), self_attention, "layer.in_proj"),
    "attention": Situation(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Attends()),
        (2, 6, WIDTH),
        name="layer.1.qk",
        options={"attention": ..., "only": [".*qk", ".*pv"]},
    ),
}

LINEAR = ("linear", "codes", "Conv1D", "registered")


def frozen():
    """A layer whose weight is kept as bytes."""
    model = nn.Sequential(nn.Linear(WIDTH, 48).requires_grad_(False))
    pack_frozen(model, "nvfp4")
    convert(model, "nvfp4")
    LayerKeys(model).fill_(0)
    return model
