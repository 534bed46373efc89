"""MLPs and models of them, their inputs and outputs, a training step."""

from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_lowbit import LinearCasts

KINDS = ("channel", "token")
DELAYED = LinearCasts.preset("fp8-delayed")
CURRENT = LinearCasts.preset("fp8-current")


class MLP(nn.Module):
    """A SwiGLU; ``between`` is what the product goes through on its way to the down projection."""

    def __init__(self, hidden=16, channels=24, bias=False, between=None, layer=nn.Linear):
        super().__init__()
        self.gate_proj, self.up_proj = layer(hidden, channels, bias), layer(hidden, channels, bias)
        self.between = nn.Identity() if between is None else between
        self.down_proj = layer(channels, hidden, bias)

    def product(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.between(self.product(x)))


class Named(nn.Module):
    """A SwiGLU with the names of the paper, that of a convertible MLP by properties."""

    gate_proj = property(lambda self: self.w2)
    up_proj = property(lambda self: self.w1)
    down_proj = property(lambda self: self.w3)

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.w3(self.w1(x) * F.silu(self.w2(x)))


class Net(nn.Module):
    """Two residual MLPs between other layers."""

    def __init__(self, mlp=MLP):
        super().__init__()
        self.embed, self.layers = nn.Linear(8, 16), nn.ModuleList([mlp(), mlp()])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def language_model(kind, **settings):
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


MODELS = {kind: partial(language_model, kind) for kind in ("Mistral", "Qwen3", "Gemma")}
MODELS |= {"Llama": partial(language_model, "Llama", mlp_bias=True), "named": lambda: Net(Named)}


def inputs_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Net):
        return torch.randn(2, 10, 8, generator=generator)
    return torch.randint(31, (2, 10), generator=generator)


def output_of(model, x):
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def product_amax(mlp, x):
    """Largest magnitude of each channel of what enters the down projection."""
    with torch.no_grad():
        return mlp.product(x).abs().flatten(0, -2).amax(0)


def step(model, histories, *micro_batches):
    histories.recording = True
    for x in micro_batches:
        output_of(model, x).square().mean().backward()
    histories.advance_()
    histories.recording = False


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
