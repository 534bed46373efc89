"""MLPs and models of them, a training step, what a pass quantizes, s by definition."""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.core.watch import observed
from lightning_lowbit.quant import Operand

KINDS = ("channel", "token")
DELAYED = LinearCasts.preset("fp8-delayed")
CURRENT = LinearCasts.preset("fp8-current")
# Quantization-aware training: the backward pass takes what the forward pass used.
QAT = LinearCasts(fprop_x=CURRENT.fprop_x, fprop_w=CURRENT.fprop_w, dgrad_w="fprop", wgrad_x="fprop")


def plain_linear(inputs, outputs, bias):
    return nn.Linear(inputs, outputs, bias=bias)


class MLP(nn.Module):
    """A SwiGLU; ``between`` is what the product goes through on its way to the down projection."""

    def __init__(self, hidden=16, channels=24, bias=False, between=None, layer=plain_linear):
        super().__init__()
        self.gate_proj, self.up_proj = layer(hidden, channels, bias), layer(hidden, channels, bias)
        self.between = nn.Identity() if between is None else between
        self.down_proj = layer(channels, hidden, bias)
        self.recompute = None

    def product(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def all_of_it(self, x):
        return self.down_proj(self.between(self.product(x)))

    def forward(self, x):
        if self.recompute is None:
            return self.all_of_it(x)
        return checkpoint(self.all_of_it, x, use_reentrant=self.recompute == "reentrant")


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


TINY = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, num_key_value_heads=1)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**TINY, num_key_value_heads=1)),
    "named": lambda: Net(Named),
}


def inputs_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Net):
        return torch.randn(2, 10, 8, generator=generator)
    return torch.randint(31, (2, 10), generator=generator)


def output_of(model, x):
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def casts_by_name(model):
    return {name: layer.casts for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def everything(model):
    """What an error must leave as it was."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "casts": casts_by_name(model),
        "full casts": {n: m.full_casts for n, m in model.named_modules() if isinstance(m, QuantizedLayer)},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "random numbers": {"state": torch.get_rng_state()},
    }


def unchanged(model, before):
    for what, now in everything(model).items():
        assert now.keys() == before[what].keys(), f"{what} changed"
        for name, value in now.items():
            same = torch.equal(value, before[what][name]) if isinstance(value, Tensor) else value == before[what][name]
            assert same, f"{what} of {name or 'the model'} changed"


@contextmanager
def sources(lossless=False):
    """Captures what is to be quantized, by operand, in the order of the GEMMs; ``lossless`` then leaves it as it is."""
    seen = []

    def spy(how, source, operand, *_):
        seen.append((how.name, source.values))
        return Operand(source.values, source.factor) if lossless else operand

    with observed(spy):
        yield seen


def factors(mlp, x):
    """The s per channel that a forward pass through one MLP uses: W over what it makes of W."""
    with sources() as seen, torch.no_grad():
        mlp(x)
    weight = mlp.down_proj.weight_matrix()
    [scaled] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == weight.shape]
    s = weight.detach() / scaled
    assert (s == s[0]).all(), "the factor of a channel differs between rows of the weight"
    return s[0]


def only_down(mlp, casts):
    """With smoothed channels; what enters the down projection is that of the plain MLP, and depends on no history."""
    return convert(mlp, "bf16", overrides={"down_proj": casts}, smooth_swiglu="channel")


def product_amax(mlp, x):
    """Largest magnitude of each channel of what enters the down projection."""
    with torch.no_grad():
        return mlp.product(x).abs().flatten(0, -2).amax(0)


def down_power(amax):
    """1 / amax rounded down to a power of two, 1 for 0: number by number, by logarithms in float64."""
    powers = [2.0 ** math.floor(-math.log2(a)) if a > 0 else 1.0 for a in amax.flatten().tolist()]
    return torch.tensor(powers, dtype=amax.dtype).view(amax.shape)


def step(model, histories, *micro_batches):
    histories.recording = True
    for x in micro_batches:
        output_of(model, x).square().mean().backward()
    histories.advance_()
    histories.recording = False


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
