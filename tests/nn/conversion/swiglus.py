"""MLPs and models of them, a training step, what a pass quantizes, s by definition."""

import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn.core.watch import observed
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.quant import Operand

KINDS = ("channel", "token")
DELAYED = LinearCasts.preset("fp8-delayed")
CURRENT = LinearCasts.preset("fp8-current")
# Quantization-aware training: the backward pass takes what the forward pass used.
QAT = LinearCasts(fprop_x=CURRENT.fprop_x, fprop_w=CURRENT.fprop_w, dgrad_w="fprop", wgrad_x="fprop")


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


def casts_by_name(model):
    return {name: layer.casts for name, layer in quantized_layers(model).items()}


def everything(model):
    """What an error must leave as it was."""
    parts = {name: value.clone() for name, value in model.state_dict().items()}
    parts["random numbers"] = torch.get_rng_state()
    for name, module in model.named_modules():
        casts = (module.casts, module.full_casts) if isinstance(module, QuantizedLayer) else None
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        parts[f"module {name}"] = type(module), module.training, hooks, casts
    return parts


def unchanged(model, before):
    now = everything(model)
    assert now.keys() == before.keys()
    for name, value in now.items():
        same = torch.equal(value, before[name]) if isinstance(value, Tensor) else value == before[name]
        assert same, f"{name} changed"


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
