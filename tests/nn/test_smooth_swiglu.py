"""Smooth-SwiGLU: which layers, the unchanged function, its definition, evaluation, folding, and a leap of a channel."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, Scale, convert, fold, quantize, smooth_swiglu
from lightning_lowbit.metrics import swiglu_alignment
from lightning_lowbit.nn import AmaxHistories, LayerKeys, QuantizedLayer, function, plan, set_phase, swiglus
from lightning_lowbit.quant import Operand, smoothing_factor
from tests.nn.layers import CONTRACTION, by_definition

KINDS = ("channel", "token")
DELAYED = LinearCasts.preset("fp8-delayed")
CURRENT = LinearCasts.preset("fp8-current")
# Quantisation-aware training: the backward pass takes what the forward pass used.
QAT = LinearCasts(fprop_x=CURRENT.fprop_x, fprop_w=CURRENT.fprop_w, dgrad_w="fprop", wgrad_x="fprop")


def plain_linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias)


def conv1d(inputs: int, outputs: int, bias: bool) -> nn.Module:
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.normal_(layer.bias, std=0.1)
    return layer


class MLP(nn.Module):
    """A SwiGLU; ``between`` is what the product goes through on its way to the down projection."""

    def __init__(
        self,
        hidden: int = 16,
        channels: int = 24,
        bias: bool = False,
        between: nn.Module | None = None,
        layer: Callable[[int, int, bool], nn.Module] = plain_linear,
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = layer(hidden, channels, bias), layer(hidden, channels, bias)
        self.between = nn.Identity() if between is None else between
        self.down_proj = layer(channels, hidden, bias)
        self.recompute: str | None = None

    def product(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def all_of_it(self, x: Tensor) -> Tensor:
        return self.down_proj(self.between(self.product(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.all_of_it(x)
        return checkpoint(self.all_of_it, x, use_reentrant=self.recompute == "reentrant")


class Swapped(MLP):
    """The activation is that of what calls itself the up projection."""

    def product(self, x: Tensor) -> Tensor:
        return F.silu(self.up_proj(x)) * self.gate_proj(x)


class Named(nn.Module):
    """A SwiGLU with the names of the paper, that of a convertible MLP by properties."""

    gate_proj = property(lambda self: self.w2)
    up_proj = property(lambda self: self.w1)
    down_proj = property(lambda self: self.w3)

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(self.w1(x) * F.silu(self.w2(x)))


class Net(nn.Module):
    """Two residual MLPs between other layers."""

    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(8, 16), nn.ModuleList([mlp(), mlp()])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


TINY: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, num_key_value_heads=1)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**TINY, num_key_value_heads=1)),
    "named": lambda: Net(Named),
}


def inputs_of(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Net):
        return torch.randn(2, 10, 8, generator=generator)
    return torch.randint(31, (2, 10), generator=generator)


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def down_names(model: nn.Module) -> set[str]:
    downs = {id(mlp.down_proj) for mlp in swiglus(model).values()}
    return {name for name, module in model.named_modules() if id(module) in downs}


def casts_by_name(model: nn.Module) -> dict[str, LinearCasts]:
    return {name: layer.casts for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def everything(model: nn.Module) -> dict[str, Any]:
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


def unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    for what, now in everything(model).items():
        assert now.keys() == before[what].keys(), f"{what} changed"
        for name, value in now.items():
            same = torch.equal(value, before[what][name]) if isinstance(value, Tensor) else value == before[what][name]
            assert same, f"{what} of {name or 'the model'} changed"


@contextmanager
def sources(monkeypatch: pytest.MonkeyPatch, lossless: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
    """Captures what is to be quantised, by operand, in the order of the GEMMs; ``lossless`` then leaves it as it is."""
    seen: list[tuple[str, Tensor]] = []
    original: Callable[..., Operand] = function._operand

    def spy(name: str, source: Any, how: Any) -> Operand:
        seen.append((name, source.values))
        return Operand(source.values, source.factor) if lossless else original(name, source, how)

    with monkeypatch.context() as patch:
        patch.setattr(function, "_operand", spy)
        yield seen


def factors(monkeypatch: pytest.MonkeyPatch, mlp: Any, x: Tensor) -> Tensor:
    """The s per channel that a forward pass through one MLP uses: W over what it makes of W."""
    with sources(monkeypatch) as seen, torch.no_grad():
        mlp(x)
    weight = mlp.down_proj.weight_matrix()
    [scaled] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == weight.shape]
    s = weight.detach() / scaled
    assert (s == s[0]).all(), "the factor of a channel differs between rows of the weight"
    return s[0]


def only_down(mlp: MLP, casts: LinearCasts) -> MLP:
    """With smoothed channels; what enters the down projection is that of the plain MLP, and depends on no history."""
    return convert(mlp, "bf16", overrides={"down_proj": casts}, smooth_swiglu="channel")


def product_amax(mlp: MLP, x: Tensor) -> Tensor:
    """Largest magnitude of each channel of what enters the down projection."""
    with torch.no_grad():
        return mlp.product(x).abs().flatten(0, -2).amax(0)


def down_power(amax: Tensor) -> Tensor:
    """1 / amax rounded down to a power of two, 1 for 0: number by number, by logarithms in float64."""
    powers = [2.0 ** math.floor(-math.log2(a)) if a > 0 else 1.0 for a in amax.flatten().tolist()]
    return torch.tensor(powers, dtype=amax.dtype).view(amax.shape)


def step(model: nn.Module, histories: AmaxHistories, *micro_batches: Tensor) -> None:
    histories.recording = True
    for x in micro_batches:
        output_of(model, x).square().mean().backward()
    histories.advance_()
    histories.recording = False


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# --- which layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True], ids=["convert", "smooth_swiglu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_only_down_projections_change(name: str, kind: Any, in_place: bool) -> None:
    """Channel mode takes delayed scaling from their weights, and from nothing else; the model still computes."""
    model = MODELS[name]()
    skip = [] if name == "named" else ["lm_head"]
    layers = plan(model, DELAYED, skip).keys()
    if in_place:
        assert smooth_swiglu(convert(model, DELAYED, skip), kind) is model
    else:
        convert(model, DELAYED, skip, smooth_swiglu=kind)
    downs, found = down_names(model), casts_by_name(model)
    assert len(downs) == 2
    assert found.keys() == layers
    for layer, casts in found.items():
        expected = DELAYED
        if layer in downs:
            weights = {"fprop_w": CURRENT.fprop_w, "dgrad_w": CURRENT.dgrad_w} if kind == "channel" else {}
            expected = DELAYED.replace(smooth=kind, **weights)
        assert casts == model.get_submodule(layer).full_casts == expected, f"{layer}: {casts}"
    AmaxHistories(model)
    output = output_of(model, inputs_of(model))
    assert output.isfinite().all()
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_is_shown() -> None:
    """print(model) tells of the smoothing, once per MLP; str of the casts does, with the scale of the weight."""
    model = convert(Net(), DELAYED, smooth_swiglu="channel")
    assert [str(layer).count("smooth=channel") for layer in model.layers] == [1, 1]
    casts = str(model.layers[0].down_proj.casts)
    assert "w=e4m3/fp32:tensor)" in casts, casts
    assert "x=e4m3/fp32:tensor(delayed 16)" in casts, casts
    assert casts.endswith("smooth=channel"), casts
    assert "smooth=token" in str(convert(model, DELAYED, smooth_swiglu="token"))
    assert "smooth" not in str(convert(model, DELAYED))


@pytest.mark.parametrize("kind", KINDS)
def test_again_changes_nothing(kind: Any) -> None:
    model = convert(Net(), DELAYED, smooth_swiglu=kind)
    before = everything(model)
    smooth_swiglu(model, kind)
    unchanged(model, before)
    convert(model, DELAYED, smooth_swiglu=kind)
    unchanged(model, before)


def test_converting_without_takes_it_away() -> None:
    """Hooks that tell tokens, too."""
    plain = everything(convert(Net(), DELAYED))
    for kind in KINDS:
        model = convert(Net(), DELAYED, smooth_swiglu=kind)
        hooks = everything(convert(model, DELAYED))
        assert hooks["casts"] == plain["casts"]
        assert hooks["hooks"] == plain["hooks"]


@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_what_convert_does(kind: Any) -> None:
    model = Net()
    overrides = {r"layers\.0": QAT, "layers.1.gate_proj": "bf16"}
    arguments: dict[str, Any] = {"skip": ["head"], "overrides": overrides, "smooth_swiglu": kind}
    planned = plan(model, DELAYED, **arguments)
    assert not casts_by_name(model), "plan converted"
    assert planned == casts_by_name(convert(model, DELAYED, **arguments))
    assert planned["layers.0.down_proj"] == QAT.replace(smooth=kind)


def test_unquantised_down_projections_are_left_alone() -> None:
    """One of two is quantised: that one is smoothed."""
    model = convert(Net(), DELAYED, overrides={r"layers\.0\.down_proj": "bf16"}, smooth_swiglu="channel")
    assert model.layers[0].down_proj.casts == LinearCasts()
    assert model.layers[1].down_proj.casts.smooth == "channel"
    model = convert(Net(), DELAYED, skip=[r"layers\.0\.down_proj"], smooth_swiglu="token")
    assert type(model.layers[0].down_proj) is nn.Linear
    assert [len(layer.up_proj._forward_hooks) for layer in model.layers] == [0, 1]


def gradients_only() -> LinearCasts:
    return LinearCasts(dgrad_g=DELAYED.dgrad_g, wgrad_g=DELAYED.wgrad_g)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, "found no SwiGLU in Sequential"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)), {}, "found no SwiGLU"),
        (Net, {"skip": ["down_proj"]}, r"none of the 2, e.g. layers\.0\.down_proj, is quantised"),
        (Net, {"overrides": {"down_proj": "bf16"}}, "none of the 2"),
        (Net, {"overrides": {"down_proj": gradients_only()}}, "none of the 2"),
        (Net, {"smooth_swiglu": "chanel"}, "Unknown kind of smooth_swiglu 'chanel'. Did you mean 'channel'"),
    ],
    ids=["no SwiGLU", "GPT-2", "skipped", "bf16", "gradients only", "unknown kind"],
)
def test_refusals(model: Callable[[], nn.Module], arguments: dict[str, Any], message: str) -> None:
    """By convert, plan, and smooth_swiglu on a converted model; nothing has been changed then."""
    given: dict[str, Any] = {"smooth_swiglu": "channel", **arguments}
    fresh = model()
    before = everything(fresh)
    for call in (convert, plan):
        with pytest.raises(ValueError, match=message):
            call(fresh, DELAYED, **given)
        unchanged(fresh, before)
    kind = given.pop("smooth_swiglu")
    converted = convert(fresh, DELAYED, **given)
    before = everything(converted)
    with pytest.raises(ValueError, match=message):
        smooth_swiglu(converted, kind)
    unchanged(converted, before)


def test_an_unconverted_model_has_no_quantised_down_projection() -> None:
    with pytest.raises(ValueError, match="none of the 2"):
        smooth_swiglu(Net())


@pytest.mark.parametrize("operand", ["fprop_w", "dgrad_w"])
def test_casts_refuse_delayed_scaling_of_a_weight_that_changes(operand: str) -> None:
    fine = DELAYED.replace(smooth="token")
    assert fine.fprop_w == DELAYED.fprop_w
    with pytest.raises(ValueError, match=f"delayed scaling of {operand} would meet the leap"):
        CURRENT.replace(smooth="channel", **{operand: DELAYED.fprop_w})
    assert CURRENT.replace(smooth="channel", fprop_x=DELAYED.fprop_x).smooth == "channel"


@pytest.mark.parametrize(
    ("casts", "keeping"),
    [
        (DELAYED, {"fqt", "qaf", "hp-forward"}),
        (QAT, {"fqt", "qaf"}),  # without its forward pass it quantises nothing
        (QAT.replace(dgrad_w=None, wgrad_x=CURRENT.wgrad_x), {"fqt", "qaf", "hp-forward"}),
        (gradients_only().replace(fprop_w=CURRENT.fprop_w), {"fqt", "qaf"}),
    ],
    ids=["all", "QAT", "x of wgrad", "w of fprop"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_phases_keep_it_as_long_as_x_or_w_is_quantised(casts: LinearCasts, keeping: set[str], kind: Any) -> None:
    model = convert(MLP(), casts, smooth_swiglu=kind)
    AmaxHistories(model)
    for phase in ("qaf", "bf16", "hp-forward", "fqt"):
        set_phase(model, phase)
        assert model.down_proj.casts.smooth == (kind if phase in keeping else None), phase
        assert model.down_proj.full_casts.smooth == kind, phase
        assert (f"smooth={kind}" in str(model)) == (phase in keeping), phase
        model(torch.randn(5, 16)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bf16_phase_is_the_plain_model(kind: Any) -> None:
    """To the bit; nothing enters the histories, and no amax of tokens stays behind."""
    plain, x = MLP(), torch.randn(9, 16)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu=kind)
    histories = AmaxHistories(model)
    set_phase(model, "bf16")
    assert torch.equal(model(x), plain(x))
    histories.advance_()
    assert not any(tensor.any() for tensors in histories.state_dict().values() for tensor in tensors.values())
    assert model.down_proj.token_amax is None


# --- the unquantised function -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_it_is_the_same_function(
    monkeypatch: pytest.MonkeyPatch, kind: Any, dtype: torch.dtype, bias: bool
) -> None:
    """Output and all gradients, to the bit, channels being of sizes from 1e-6 to 1e6 and one of them 0.

    A bias comes after the division per token, and with it a second rounding in bfloat16.
    """
    plain = MLP(bias=bias)
    with torch.no_grad():
        plain.up_proj.weight.mul_(torch.logspace(-6, 6, 24)[:, None])
        plain.up_proj.weight[5] = 0
        if bias:
            plain.up_proj.bias[5] = 0
    smoothed = convert(copy.deepcopy(plain), CURRENT, smooth_swiglu=kind).to(dtype)
    unsmoothed = convert(copy.deepcopy(plain), CURRENT).to(dtype)
    x, g = torch.randn(7, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    results, products = [], []
    for model in (unsmoothed, smoothed):
        inputs = x.clone().requires_grad_()
        with sources(monkeypatch, lossless=True) as seen:
            y = model(inputs)
            y.backward(g)
        results.append({"y": y.detach(), "x": inputs.grad, **{n: p.grad for n, p in model.named_parameters()}})
        [entered] = [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape == (7, 24)]
        products.append(entered)
    assert not torch.equal(*products), "nothing was smoothed"
    for name, expected in results[0].items():
        found = results[1][name]
        assert expected.isfinite().all()
        if name == "y" and kind == "token" and bias and dtype == torch.bfloat16:
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8)  # of a bias below 1/4
        else:
            assert torch.equal(found, expected), f"{name} differs by up to {(found - expected).abs().max()}"


# --- by definition ----------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """What went through an MLP, forward and backward."""

    x: Tensor
    y: Tensor
    g: Tensor
    gate: Tensor
    up: Tensor
    product: Tensor


def passed(mlp: MLP, x: Tensor, dtype: torch.dtype) -> Pass:
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        tensor.retain_grad()
        kept[name] = tensor

    hooks = [
        mlp.gate_proj.register_forward_hook(lambda _, __, output: keep("gate", output)),
        mlp.up_proj.register_forward_hook(lambda _, __, output: keep("up", output)),
        mlp.down_proj.register_forward_pre_hook(lambda _, inputs: keep("product", inputs[0])),
    ]
    x = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
        y = mlp(x)
    g = torch.randn_like(y)
    y.backward(g)
    for hook in hooks:
        hook.remove()
    return Pass(x, y.detach(), g, **kept)


def down_by_definition(casts: LinearCasts, weight: Tensor, bias: Tensor, went: Pass, kind: str) -> dict[str, Tensor]:
    """The equations, in float64; s is a constant in them, by which y, and so the g that is quantised, is divided."""
    h, up, g = (tensor.detach().double() for tensor in (went.product, went.up, went.g))
    w = weight.detach().double()
    if kind == "channel":
        s = down_power(h.abs().amax(0, keepdim=True))
        x, w, g, back = h * s, w / s, g, torch.ones(1, 1)
    else:
        s = down_power(up.abs().amax(1, keepdim=True))
        x, w, g, back = h * s, w, g / s, 1 / s
    made: dict[str, Tensor] = {}
    for name, tensor in {"fprop_x": x, "fprop_w": w, "dgrad_g": g, "dgrad_w": w, "wgrad_g": g, "wgrad_x": x}.items():
        cast = getattr(casts, name)
        if cast == "fprop":
            made[name] = made[f"fprop_{name[-1]}"]
        else:
            exact = tensor.float()
            assert torch.equal(exact.double(), tensor), f"{name} is no float32"
            made[name] = tensor if cast is None else quantize(exact, cast, CONTRACTION[name]).dequantize().double()
    dx, dw = made["dgrad_g"] @ made["dgrad_w"], made["wgrad_g"].t() @ made["wgrad_x"]
    return {
        "y": made["fprop_x"] @ made["fprop_w"].t() * back + bias.detach().double(),
        "product": dx * s,  # of h, whose own gradient is s times that of s h
        "weight": dw / s if kind == "channel" else dw,  # of W, whose own gradient is 1/s times that of W / s
        "bias": went.g.double().sum(0),
    }


def close(found: Tensor | None, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    """Up to the rounding of sums: relative to their own size, which cancellation makes smaller than their terms'."""
    assert found is not None, f"{name} has no gradient"
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    error = (found.double() - expected).abs().amax() / expected.abs().amax()
    assert error <= tolerance, f"{name} is off by {error:.1e} of its largest element"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("casts", [DELAYED, LinearCasts.preset("fp8-row"), QAT], ids=["fp8-delayed", "fp8-row", "qat"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_by_definition(kind: Any, casts: LinearCasts, dtype: torch.dtype) -> None:
    """Stage by stage: down projection, product, up and gate projection. Were s not detached, h or up would show it."""
    mlp = convert(MLP(bias=True), casts, smooth_swiglu=kind)
    with torch.no_grad():  # powers of two, so that bfloat16 sees the same W / s
        mlp.up_proj.weight.mul_(2.0 ** torch.arange(-12, 12)[:, None])
    LayerKeys(mlp).fill_(0)
    AmaxHistories(mlp)
    went = passed(mlp, torch.randn(20, 16), dtype)
    down: Any = mlp.down_proj
    # The weight as autocast rounds it.
    expected = down_by_definition(down.casts, down.weight.to(dtype), down.bias.to(dtype), went, kind)
    close(went.y, expected["y"], dtype, "y")
    close(went.product.grad, expected["product"], dtype, "the gradient of h")
    close(down.weight.grad, expected["weight"], dtype, "the gradient of W_down")
    close(down.bias.grad, expected["bias"], dtype, "the gradient of b")

    gate, up = (tensor.detach().requires_grad_() for tensor in (went.gate, went.up))
    (F.silu(gate) * up).backward(went.product.grad)
    for name, found, wanted in (("gate", went.gate.grad, gate.grad), ("up", went.up.grad, up.grad)):
        assert torch.equal(found, wanted), f"the gradient of {name} is more than that of the product"

    dx = torch.zeros(20, 16, dtype=torch.float64)
    for name, g in (("gate_proj", went.gate.grad), ("up_proj", went.up.grad)):
        layer: Any = getattr(mlp, name)
        rounded = copy.deepcopy(layer).to(dtype)
        results = by_definition(rounded, went.x.detach(), g).results
        dx += results["x"]
        close(layer.weight.grad, results["weight"], dtype, f"the gradient of {name}.weight")
        close(layer.bias.grad, results["bias"], dtype, f"the gradient of {name}.bias")
    close(went.x.grad, dx, dtype, "the gradient of x")


def test_histories_hold_what_is_quantised() -> None:
    """Of s * h, whose largest magnitude is between 1/2 and 1, and of no weight, which has its own scale."""
    mlp = only_down(MLP(), DELAYED)
    histories = AmaxHistories(mlp)
    for scale in (1.0, 1000.0, 1e-3):
        step(mlp, histories, scale * torch.randn(20, 16))
    of_down = {k.split("/")[1]: v for k, v in histories.state_dict()["amax_history"].items() if k.startswith("down")}
    assert of_down.keys() == {"fprop_x", "dgrad_g", "wgrad_g", "wgrad_x"}
    for name in ("fprop_x", "wgrad_x"):
        assert ((of_down[name][-3:] > 0.5) & (of_down[name][-3:] <= 1)).all(), of_down[name]
        assert not of_down[name][:-3].any()


# --- s ----------------------------------------------------------------------------------------------------------------


def test_s_is_one_over_the_amax_rounded_down_to_a_power_of_two() -> None:
    exact = torch.ldexp(torch.ones(127), torch.arange(-63, 64))
    next_up = torch.nextafter(exact, torch.tensor(math.inf))
    assert torch.equal(smoothing_factor(exact), 1 / exact)
    assert torch.equal(smoothing_factor(next_up), 0.5 / exact), "not rounded down"
    amax = torch.cat([torch.rand(500) * 10, torch.randn(500).exp() ** 8])
    s = smoothing_factor(amax)
    assert s.dtype == torch.float32
    assert torch.equal(s, down_power(amax))
    assert (torch.frexp(s).mantissa == 0.5).all()
    assert ((amax * s > 0.5) & (amax * s <= 1)).all()


@pytest.mark.parametrize(
    ("amax", "s"),
    [
        (0.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (1e-45, 2.0**64),
        (2.0**-64, 2.0**64),
        (2.0**-70, 2.0**64),
        (2.0**64, 2.0**-64),
        (3e38, 2.0**-64),
    ],
)
def test_s_at_the_ends(amax: float, s: float) -> None:
    assert smoothing_factor(torch.tensor([amax, 4.0])).tolist() == [s, 0.25]


def test_s_per_channel_is_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every sequence of a batch; |up * silu(gate)|, not |up|. A channel that is 0 keeps 1."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight.mul_(torch.logspace(-3, 3, 24)[:, None])
        mlp.gate_proj.weight[3] = 0
    x = torch.randn(2, 3, 5, 16)
    amax = product_amax(mlp, x)
    s = factors(monkeypatch, only_down(mlp, CURRENT), x)
    assert torch.equal(s, down_power(amax))
    assert s[3] == 1
    assert len(s.unique()) > 10


def test_s_per_token_is_of_the_up_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its output as it is, quantised; each token its own, those of every sequence. A token of 0 keeps 1."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    x = torch.randn(2, 3, 16) * torch.logspace(-3, 3, 6).view(2, 3, 1)
    x[1, 1] = 0
    up: list[Tensor] = []
    mlp.up_proj.register_forward_hook(lambda _, __, output: up.append(output.detach()))
    product: list[Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: product.append(inputs[0].detach()))
    with sources(monkeypatch) as seen:
        mlp(x)
    [scaled] = [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape[1] == 24]
    [weight] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == (16, 24)]
    s = down_power(up[0].abs().amax(-1).view(-1, 1))
    assert torch.equal(scaled, product[0].view(-1, 24) * s)
    assert torch.equal(weight, mlp.down_proj.weight)
    assert s[4] == 1
    assert len(s.unique()) >= 5


def test_a_dead_channel_does_no_harm() -> None:
    """All zeros, or so small that its s would be beyond what numbers hold."""
    for size in (0.0, 1e-38, 1e-30):
        mlp = MLP()
        with torch.no_grad():
            mlp.up_proj.weight[3].mul_(size)
        for dtype in (torch.float32, torch.bfloat16):
            model = convert(copy.deepcopy(mlp), CURRENT, smooth_swiglu="channel").to(dtype)
            x = torch.randn(9, 16, dtype=dtype)
            y = model(x)
            y.sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters()), size
            assert relative(y, mlp.to(dtype)(x)) < 0.15, size


@pytest.mark.parametrize("kind", KINDS)
def test_float16_stays_finite(kind: Any) -> None:
    """A channel of 1e-5 and one of 3e4 lie within its range, which is small: s and 1/s must, too."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight[3].mul_(1e-5)
        mlp.up_proj.weight[4].mul_(3e4 / product_amax(mlp, x := torch.randn(9, 16))[4])
        mlp.down_proj.weight[:, 4].mul_(1e-4)
    model = convert(copy.deepcopy(mlp), CURRENT, smooth_swiglu=kind)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
        expected = mlp(x)
    assert expected.isfinite().all()
    assert y.isfinite().all(), "smoothing has left the range of float16"
    assert relative(y, expected) < 0.15


def test_an_infinite_channel_stays_visible() -> None:
    """An overflow never becomes a finite number, and is no amax to remember."""
    mlp = convert(MLP(), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(mlp)
    x = torch.randn(9, 16)
    step(mlp, histories, x)
    before = histories.state_dict()["channel_amax"]["down_proj"]
    mlp.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), math.inf))
    histories.recording = True
    assert not mlp(2 * x).isfinite().any()
    histories.advance_()
    after = histories.state_dict()["channel_amax"]["down_proj"]
    assert after[7] == before[7], "an infinity was remembered"
    others = torch.arange(24) != 7
    assert (after[others] != before[others]).all(), "finite channels were forgotten"


def test_tokens_need_the_up_projection() -> None:
    """A down projection that is called by itself, or after an up projection of other tokens, cannot know its s."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    with pytest.raises(ValueError, match="none has come before this pass"):
        mlp.down_proj(torch.randn(3, 24))
    mlp.up_proj(torch.randn(4, 16))
    with pytest.raises(ValueError, match="none has come before this pass"):
        mlp.down_proj(torch.randn(3, 24))
    assert mlp(torch.randn(3, 16)).isfinite().all()
    with pytest.raises(ValueError, match="none has come before this pass"):  # it is used once
        mlp.down_proj(torch.randn(3, 24))


# --- evaluation, checkpointing, state ---------------------------------------------------------------------------------


def test_evaluation_uses_the_last_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of its micro-batches; training uses the batch's own, and evaluation leaves no trace."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories = AmaxHistories(model)
    batches = [torch.randn(6, 16) * scale for scale in (100.0, 1.0, 1.2, 0.01)]
    amaxes = [product_amax(mlp, x) for x in batches]
    assert torch.equal(factors(monkeypatch, model, batches[0]), down_power(amaxes[0])), "recording"
    histories.recording = False
    assert torch.equal(factors(monkeypatch, model, batches[1]), down_power(amaxes[1])), "no step yet: its own"
    histories.recording = True
    step(model, histories, batches[0])  # an earlier step must be forgotten
    step(model, histories, batches[1], batches[2])
    of_step = torch.maximum(amaxes[1], amaxes[2])
    assert not torch.equal(down_power(of_step), down_power(amaxes[2])), "the micro-batches must differ"
    state = histories.state_dict()
    torch.testing.assert_close(state["channel_amax"]["down_proj"], of_step)
    for x in (batches[3], batches[0]):
        assert torch.equal(factors(monkeypatch, model, x), down_power(of_step)), "evaluation"
    assert all(torch.equal(histories.state_dict()[k][n], t) for k, d in state.items() for n, t in d.items())
    histories.recording = True
    assert torch.equal(factors(monkeypatch, model, batches[3]), down_power(amaxes[3])), "training again"
    histories.advance_()
    torch.testing.assert_close(histories.state_dict()["channel_amax"]["down_proj"], amaxes[3])


def test_a_channel_that_was_silent_keeps_its_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent in the last step: that of the step before; silent so far: evaluation takes the batch's own."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories = AmaxHistories(model)
    x = torch.randn(6, 16)
    silence = model.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), 0))
    step(model, histories, x)
    silence.remove()
    amax = product_amax(mlp, 64 * x)
    seen = factors(monkeypatch, model, 64 * x)
    assert seen[7] == down_power(amax)[7]
    assert (seen[:7] > down_power(amax)[:7]).all()
    step(model, histories, x)
    silence = model.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), 0))
    step(model, histories, 2 * x)
    silence.remove()
    kept = histories.state_dict()["channel_amax"]["down_proj"]
    torch.testing.assert_close(kept[7], product_amax(mlp, x)[7])
    torch.testing.assert_close(kept[:7], product_amax(mlp, 2 * x)[:7])


def test_evaluation_of_one_token_does_not_depend_on_the_others() -> None:
    """What s per channel of the batch would make it do."""
    mlp = only_down(MLP(), LinearCasts.preset("fp8-row"))
    histories = AmaxHistories(mlp)
    step(mlp, histories, torch.randn(9, 16))
    x = torch.randn(5, 16) * torch.logspace(-2, 2, 5)[:, None]
    torch.testing.assert_close(mlp(x)[:1], mlp(x[:1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_training", [False, True], ids=["eval", "train"])
def test_without_histories_it_uses_the_batch(monkeypatch: pytest.MonkeyPatch, in_training: bool) -> None:
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), CURRENT)
    model.train(in_training)
    for scale in (1.0, 100.0):
        x = scale * torch.randn(6, 16)
        assert torch.equal(factors(monkeypatch, model, x), down_power(product_amax(mlp, x)))


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_nothing(kind: Any, recompute: str) -> None:
    """Losses, gradients and histories of three steps of two micro-batches each."""
    runs = []
    for how in (None, recompute):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), MLP(), MLP(), nn.Linear(16, 4))  # no residual: two terms have one sum
        convert(model, DELAYED, smooth_swiglu=kind)
        for mlp in swiglus(model).values():
            mlp.recompute = how
        histories, optimizer = AmaxHistories(model), torch.optim.SGD(model.parameters(), lr=0.1)
        seen: dict[str, Tensor] = {}
        for i in range(3):
            optimizer.zero_grad()
            for j in range(2):
                loss = model(torch.randn(9, 8)).square().mean()
                loss.backward()
                seen[f"loss {i} {j}"] = loss.detach()
            seen |= {f"{name} {i}": p.grad.clone() for name, p in model.named_parameters()}
            histories.advance_()
            optimizer.step()
            state = histories.state_dict()
            seen |= {f"{what} {name} {i}": t for what in state for name, t in state[what].items()}
        runs.append(seen)
    assert runs[0].keys() == runs[1].keys()
    for name, expected in runs[0].items():
        assert torch.equal(runs[1][name], expected), name


def test_amaxes_round_trip() -> None:
    """Through state_dict, weights_only, into another model of the same layers, which then evaluates alike."""
    model = convert(Net(), DELAYED, smooth_swiglu="channel")
    other = copy.deepcopy(model)
    histories, others = AmaxHistories(model), AmaxHistories(other)
    for _ in range(2):
        step(model, histories, torch.randn(9, 8))
    torch.save(histories.state_dict(), "amaxes.pt")
    state = torch.load("amaxes.pt", weights_only=True)
    assert {name: tensor.shape for name, tensor in state["channel_amax"].items()} == {
        "layers.0.down_proj": (24,),
        "layers.1.down_proj": (24,),
    }
    x = torch.randn(9, 8)
    expected = model(x)
    others.recording = False
    assert not torch.equal(other(x), expected)
    others.load_state_dict(state)
    assert torch.equal(other(x), expected)
    for what, tensors in histories.state_dict().items():
        assert all(torch.equal(others.state_dict()[what][name], tensor) for name, tensor in tensors.items()), what


def test_amaxes_of_other_channels_are_refused() -> None:
    histories = AmaxHistories(convert(MLP(), DELAYED, smooth_swiglu="channel"))
    wider = AmaxHistories(convert(MLP(channels=32), DELAYED, smooth_swiglu="channel"))
    with pytest.raises(ValueError, match="channel_amax of down_proj has 32 channels, and this run's 24"):
        histories.load_state_dict(wider.state_dict())
    plain = AmaxHistories(convert(MLP(), DELAYED, smooth_swiglu="token"))
    assert not plain.state_dict()["channel_amax"]
    with pytest.raises(ValueError, match="other layers"):
        histories.load_state_dict(plain.state_dict())


def test_token_smoothing_alone_has_nothing_to_remember() -> None:
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="token"))) == 0
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="channel"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy(kind: Any) -> None:
    """A copy computes the same, by its own up projection, and shares nothing with the original."""
    model = convert(Net(), DELAYED, smooth_swiglu=kind)
    histories = AmaxHistories(model)
    step(model, histories, torch.randn(9, 8))
    x = torch.randn(9, 8)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    for mlp, own in zip(twin.layers, model.layers, strict=True):
        assert mlp.down_proj.amaxes.in_force is not own.down_proj.amaxes.in_force
        for hook in mlp.up_proj._forward_hooks.values():
            assert hook.down is mlp.down_proj, "tells the tokens to the original"
    step(model, histories, 100 * torch.randn(9, 8))
    assert not torch.equal(model(x), expected)
    assert torch.equal(twin(x), expected), "training the original changed the copy"


def test_smoothing_after_the_histories_is_refused() -> None:
    """Which have no room for channels then."""
    model = convert(MLP(), DELAYED)
    AmaxHistories(model)
    smooth_swiglu(model)
    with pytest.raises(ValueError, match="AmaxHistories"):
        model(torch.randn(4, 16))


# --- folding ----------------------------------------------------------------------------------------------------------


def trained(model: Any, scale: float = 1.0) -> AmaxHistories:
    histories = AmaxHistories(model)
    for seed in range(2):
        x = inputs_of(model, seed)
        step(model, histories, x * scale if x.is_floating_point() else x)
    model.zero_grad()
    return histories


FOLDED = {name: make for name, make in MODELS.items() if name in ("llama-bias", "gemma", "named")} | {
    "conv1d": lambda: Net(lambda: MLP(layer=conv1d)),
    "dropout": lambda: Net(lambda: MLP(bias=True, between=nn.Dropout(0.5))),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", FOLDED)
def test_fold_keeps_the_function(name: str, autocast: bool) -> None:
    """To the bit, in float32 and bfloat16: of the converted model, unquantised, and of an unconverted copy."""
    plain = FOLDED[name]()
    with torch.no_grad():
        for mlp in swiglus(plain).values():
            if mlp.up_proj.bias is not None:
                nn.init.normal_(mlp.up_proj.bias)
    x = inputs_of(plain, 7)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    amaxes = trained(model).state_dict()["channel_amax"]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    modes = {name: module.training for name, module in model.named_modules()}
    random = torch.get_rng_state()
    twin = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert fold(model) is model
        assert fold(twin, amaxes) is twin
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random), "folding drew random numbers"
    after = model.state_dict()
    assert after.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in after.items()), "the two ways differ"
    parts = ("up_proj.weight", "up_proj.bias", "down_proj.weight", "w1.weight", "w1.bias", "w3.weight")
    for key, value in after.items():
        assert torch.equal(value, before[key]) != key.endswith(parts), key
    assert not any(casts.smooth for casts in casts_by_name(model).values())

    fresh = FOLDED[name]()
    fresh.load_state_dict(after)
    set_phase(model, "bf16")
    for dtype in (torch.float32, torch.bfloat16):
        expected = output_of(copy.deepcopy(plain).to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x)
        for what, folded in {"converted": model, "unconverted": twin, "loaded": fresh}.items():
            found = output_of(copy.deepcopy(folded).to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x)
            assert torch.equal(found, expected), f"{what}, {dtype}: off by {(found - expected).abs().max()}"


def test_fold_multiplies_by_s() -> None:
    """``up`` by s, weight and bias; ``down`` by 1/s; with s from the last training step."""
    for layer in (plain_linear, conv1d):
        mlp = convert(MLP(bias=True, layer=layer), DELAYED, smooth_swiglu="channel")
        histories = AmaxHistories(mlp)
        step(mlp, histories, 100 * torch.randn(9, 16))
        step(mlp, histories, torch.randn(9, 16))
        s = down_power(histories.state_dict()["channel_amax"]["down_proj"])
        assert len(s.unique()) > 1
        up, down = mlp.up_proj, mlp.down_proj
        expected = up.weight_matrix() * s[:, None], up.bias * s, down.weight_matrix() / s, down.bias.clone()
        fold(mlp)
        for found, wanted in zip((up.weight_matrix(), up.bias, down.weight_matrix(), down.bias), expected, strict=True):
            assert torch.equal(found, wanted)


def test_fold_of_some_mlps() -> None:
    """Those that are given, or smoothed; the others stay as they are."""
    plain = Net()
    amax = {"layers.1.down_proj": torch.full((24,), 3.0)}
    folded = fold(copy.deepcopy(plain), amax)
    for key, value in folded.state_dict().items():
        expected = plain.state_dict()[key] * {"layers.1.up_proj.weight": 0.25, "layers.1.down_proj.weight": 4.0}.get(
            key, 1.0
        )
        assert torch.equal(value, expected), key
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    trained(model)
    fold(model, amax)
    assert [layer.down_proj.casts.smooth for layer in model.layers] == ["channel", None]


@pytest.mark.parametrize("phase", ["qaf", "bf16"])
def test_fold_in_a_phase(phase: str) -> None:
    """What is smoothed only outside the phase is folded too."""
    model = convert(MLP(), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(model)
    step(model, histories, torch.randn(9, 16))
    set_phase(model, phase)
    fold(model)
    assert model.down_proj.casts == model.down_proj.full_casts.phase(phase)
    assert model.down_proj.full_casts.smooth is None


def test_fold_is_done_once() -> None:
    model = convert(MLP(), DELAYED, smooth_swiglu="channel")
    step(model, AmaxHistories(model), torch.randn(9, 16))
    fold(model)
    before = everything(model)
    with pytest.raises(ValueError, match="nothing to fold"):
        fold(model)
    unchanged(model, before)


class Norm(nn.Module):
    """What BitNet puts between product and down projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Masked(MLP):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


def smoothed(model: nn.Module, steps: bool = True, kind: Any = "channel") -> nn.Module:
    convert(model, DELAYED, smooth_swiglu=kind)
    if steps:
        trained(model)
    else:
        AmaxHistories(model)
    return model


GOOD = {"layers.0.down_proj": torch.full((24,), 3.0)}


@pytest.mark.parametrize(
    ("make", "amax", "message"),
    [
        (Net, None, "nothing to fold"),
        (Net, {}, "nothing to fold"),
        (lambda: convert(Net(), DELAYED), None, "nothing to fold"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), None, "nothing to fold"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), GOOD, "no down projection of this model; they are: none"),
        (lambda: smoothed(Net(), kind="token"), None, r"layers\.0\.down_proj smooths tokens"),
        (lambda: convert(Net(), CURRENT, smooth_swiglu="channel"), None, "has not been trained"),
        (lambda: smoothed(Net(), steps=False), None, r"layers\.0\.down_proj has not been trained"),
        (Net, {**GOOD, "layers.2.down_proj": torch.ones(24)}, r"they are: layers\.0\.down_proj, layers\.1\.down_proj"),
        (Net, {**GOOD, "layers.1": torch.ones(24)}, "of 'layers.1', no down projection"),
        (Net, {**GOOD, "layers.1.up_proj": torch.ones(24)}, "of 'layers.1.up_proj', no down projection"),
        (Net, {**GOOD, "layers.1.down_proj": torch.ones(16)}, r"has 24 channels; its channel_amax is of shape \(16,\)"),
        (Net, {**GOOD, "layers.1.down_proj": torch.ones(1, 24)}, r"is of shape \(1, 24\)"),
        (lambda: Net(lambda: MLP(between=Norm())), GOOD, r"layers\.0\.down_proj: .* not linear"),
        (lambda: smoothed(Net(lambda: MLP(between=Norm()))), None, r"layers\.0\.down_proj: .* not linear"),
        (lambda: Net(Swapped), GOOD, "not linear"),
        (lambda: Net(lambda: MLP(between=nn.Tanh())), GOOD, "not linear"),
        (lambda: Net(lambda: MLP(between=nn.Hardtanh(-7, 7))), GOOD, "not linear"),  # that of common numbers
        (lambda: Net(Masked), GOOD, r"layers\.0\.down_proj: its MLP must take x alone"),
    ],
    ids=[
        "unconverted",
        "no amaxes",
        "not smoothed",
        "no SwiGLU",
        "amaxes of no SwiGLU",
        "tokens",
        "no histories",
        "untrained",
        "unknown layer",
        "MLP's name",
        "up projection's name",
        "too few channels",
        "wrong shape",
        "norm",
        "norm, converted",
        "activation of up",
        "tanh",
        "clamp",
        "two arguments",
    ],
)
def test_fold_refuses(make: Callable[[], nn.Module], amax: dict[str, Tensor] | None, message: str) -> None:
    """And has changed nothing, though layers before the one that is refused are fine."""
    model = make()
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        fold(model, amax)
    unchanged(model, before)


@pytest.mark.parametrize("order", [0, 1])
def test_fold_refuses_as_a_whole(order: int) -> None:
    """One MLP of two has a norm: neither is folded."""
    makes = [MLP, lambda: MLP(between=Norm())]
    model = Net(iter([makes[order](), makes[1 - order]()]).__next__)
    before = everything(model)
    with pytest.raises(ValueError, match=rf"layers\.{1 - order}\.down_proj: .* not linear"):
        fold(model, {f"layers.{i}.down_proj": torch.full((24,), 3.0) for i in range(2)})
    unchanged(model, before)


def test_fold_keeps_the_mode_of_each_module() -> None:
    """A frozen dropout of a model in training stays frozen."""
    model = Net(lambda: MLP(between=nn.Dropout(0.5)))
    model.layers[0].between.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    fold(model, GOOD)
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_after_folding_quantised_evaluation_is_close(scale: float) -> None:
    """The up projection's weight is another one now, and its former amax would saturate or flush it."""
    plain = MLP()
    with torch.no_grad():
        plain.gate_proj.weight.mul_(scale)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(model)
    for _ in range(3):
        step(model, histories, torch.randn(2000, 16))  # few tokens would tell little of the range of a channel
    x = torch.randn(2000, 16)
    with torch.no_grad():
        expected, before = plain(x), model(x)
        after = fold(model)(x)
    errors = relative(before, expected), relative(after, expected)
    assert max(errors) < 0.1, f"relative errors before and after: {errors}"
    assert relative(after, before) < 0.1


def test_training_goes_on_after_folding() -> None:
    """With the gradients of the folded function: none saturates at an amax from before."""
    plain = MLP()
    with torch.no_grad():
        plain.gate_proj.weight.mul_(30.0)
        plain.up_proj.weight.mul_(30.0)
    model = convert(copy.deepcopy(plain), DELAYED, smooth_swiglu="channel")
    histories = AmaxHistories(model)
    x = torch.randn(40, 16)
    for _ in range(3):
        step(model, histories, x)
    amaxes = histories.state_dict()["channel_amax"]
    fold(model)
    fold(plain, amaxes)
    model.zero_grad()
    for mlp in (model, plain):
        mlp(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        error = relative(model.get_parameter(name).grad, parameter.grad)
        assert error < 0.3, f"the gradient of {name} is off by {error:.2f}"


# --- the leap of a channel --------------------------------------------------------------------------------------------

HIDDEN, CHANNELS, TOKENS, STEPS = 64, 128, 256, 20


@dataclass
class Plant:
    mlp: MLP
    direction: Tensor

    def batch(self, turned: int = 0) -> Tensor:
        """Tokens of the usual kind, of which the first few are turned towards the direction."""
        x = torch.randn(TOKENS, HIDDEN).clamp(-3, 3)
        along = 0.25 + 0.25 * torch.rand(TOKENS, 1)
        x = x + (along - (x @ self.direction)[:, None]) * self.direction
        x[:turned] = self.direction.sign() * (2 + torch.rand(turned, HIDDEN))
        return x


def plant(sign: int) -> Plant:
    torch.manual_seed(0)
    mlp = MLP(HIDDEN, CHANNELS)
    direction = F.normalize(torch.randn(HIDDEN), dim=0)
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight.normal_(std=HIDDEN**-0.5)
        mlp.down_proj.weight.normal_(std=CHANNELS**-0.5)
        mlp.gate_proj.weight[0] = 4 * direction
        mlp.up_proj.weight[0] = sign * 4 * direction
    return Plant(mlp, direction)


ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"smooth_swiglu": "channel"},
    "down projection in bf16": {"overrides": {"down_proj": "bf16"}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [1, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_leap_in_the_middle_of_a_run(sign: int, turned: int, dtype: torch.dtype) -> None:
    """FP8 with delayed scaling loses what leaps; smoothed channels, or a down projection in bf16, keep it.

    The three are rows of the paper's table 3. The plant: in channel 0 gate and up projection have one direction u,
    ``w1 = ±w2 = ±4 u``, four times as long as all other rows. For 20 steps the tokens are clipped normal numbers whose
    component along u lies between 0.25 and 0.5, so that the product ``4p * silu(4p)`` stays below 4, the size of other
    channels. Then some tokens turn towards u, element by element ``sign(u) * [2, 3]``, within the amax of the steps
    before: no weight changes, and x, which gate and up projection quantise, does not leave its history. The component
    along u is some 16 now, and the product, quadratic in it, a thousand times what it was. What leaps is what enters
    the down projection, and nothing before it.
    """
    planted = plant(sign)
    models = {row: convert(copy.deepcopy(planted.mlp), DELAYED, **settings) for row, settings in ROWS.items()}
    histories = {row: AmaxHistories(model) for row, model in models.items()}
    torch.manual_seed(1)
    usual, largest_x = 0.0, 0.0
    for _ in range(STEPS):
        x, g = planted.batch(), torch.randn(TOKENS, HIDDEN)
        usual = max(usual, product_amax(planted.mlp, x)[0].item())
        largest_x = max(largest_x, x.abs().max().item())
        for row, model in models.items():
            with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
                y = model(x)
            y.backward(g.to(y.dtype))
            histories[row].advance_()
    errors = {}
    for name, x in (("usual", planted.batch()), ("leap", leaping := planted.batch(turned))):
        with torch.no_grad(), torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            reference = planted.mlp(x)
            outputs = {row: model(x) for row, model in models.items()}
        errors[name] = {row: relative(y, reference) for row, y in outputs.items()}
    others = relative(outputs["smooth"][turned:], reference[turned:])
    leap = product_amax(planted.mlp, leaping)
    assert leap[0] >= 1000 * usual, "the channel does not leap as it should"
    assert leap[0] > 10 * leap[1:].max(), "other channels leap as well"
    assert leaping.abs().max() <= largest_x, "x left its history: the projections before saturate, too"
    told = "; ".join(f"{row}: {errors['usual'][row]:.4f}, then {error:.4f}" for row, error in errors["leap"].items())
    for row in ("smooth", "down projection in bf16"):
        assert errors["leap"][row] <= errors["leap"]["plain"] / 10, f"relative errors: {told}"
        assert errors["usual"][row] <= 2 * errors["usual"]["plain"], f"relative errors: {told}"
    assert errors["leap"]["plain"] > 0.9, f"relative errors: {told}"
    assert others <= 2 * errors["usual"]["plain"], f"the other tokens suffer from the leap of these: {others:.3f}"


def test_the_leap_would_only_move_into_a_weight_with_delayed_scaling() -> None:
    """``W · diag(1/s)`` scaled by former steps is as far off as without smoothing; by itself, it is not.

    The plant is that above, with products and weights as they are, quantised by hand.
    """
    planted = plant(1)
    torch.manual_seed(1)
    cast = Cast("e4m3", Scale("fp32", "tensor"))
    weight = planted.mlp.down_proj.weight.detach()
    of_h, of_weight = [], []
    for _ in range(STEPS):
        x = planted.batch()
        with torch.no_grad():
            of_h.append(planted.mlp.product(x).abs().max())
        of_weight.append((weight / down_power(product_amax(planted.mlp, x))).abs().max())
    x = planted.batch(1)
    with torch.no_grad():
        h, expected = planted.mlp.product(x), planted.mlp(x)
    s = down_power(h.abs().amax(0))

    def error(h: Tensor, weight: Tensor, amax_h: Tensor | None, amax_weight: Tensor | None) -> float:
        q = quantize(h, cast, amax=amax_h).dequantize() @ quantize(weight, cast, amax=amax_weight).dequantize().t()
        return relative(q, expected)

    plain = error(h, weight, torch.stack(of_h).max(), None)
    delayed = error(h * s, weight / s, None, torch.stack(of_weight).max())
    current = error(h * s, weight / s, None, None)
    told = f"plain {plain:.3f}, delayed {delayed:.3f}, current {current:.3f}"
    assert delayed > 0.9 * plain > 0.8, told
    assert current < plain / 10, told


@pytest.mark.parametrize("sign", [1, -1])
def test_the_metric_sees_the_alignment_before_the_leap(sign: int) -> None:
    planted = plant(sign)
    torch.manual_seed(1)
    seen = swiglu_alignment(planted.mlp.gate_proj.weight, planted.mlp.up_proj.weight, planted.batch())
    assert seen.cosine[0] > 0.999
    assert seen.cosine[1:].max() < 0.6
    assert seen.gate_norm.argmax() == 0
    assert seen.active is not None
    assert seen.active[0] > 0.99 > seen.active[1:].max()
