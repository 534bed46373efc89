"""Which modules attend, and how their calls reach attention's products."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as renamed
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import GemmCounter, LayerKeys, set_phase
from lightning_lowbit.nn.attention.modules import attending
from lightning_lowbit.nn.layers.classes import restore_classes
from lightning_lowbit.nn.layers.layer import clean_name, quantized_layers

WIDTH, HEADS = 32, 4


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    def merged(self, o):
        return self.out(o.transpose(1, 2).flatten(2))


class InForward(Base):
    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


class InMethod(Base):
    def attend(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*self.heads(x))

    def forward(self, x):
        return self.merged(self.attend(x))


def helper(q, k, v):
    return renamed(q, k, v)


class InFunction(Base):
    def forward(self, x):
        return self.merged(helper(*self.heads(x)))


class Inherited(InMethod):
    pass


class ByHand(Base):
    """Attention that is not found: it calls no function of torch for it."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT).softmax(-1) @ v)


class Holds(Base):
    """Calls attention outside of its forward pass, which only runs a module that attends."""

    def __init__(self):
        super().__init__()
        self.attention = InForward()

    def other(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))

    def forward(self, x):
        return self.attention(x)


class WithDropout(InForward):
    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), dropout_p=0.2))


def x_of(tokens=20):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(0))


def model_of(*classes, casts="nvfp4", **kwargs):
    torch.manual_seed(0)
    model = convert(nn.Sequential(*(cls() for cls in classes)), "bf16", attention=casts, **kwargs)
    keys = LayerKeys(model)
    keys.fill_(0)
    return model, keys


def names(model):
    return {clean_name(name) for name in quantized_layers(model)}


def test_modules_attend_where_their_forward_pass_calls_it():
    for cls in (InForward, InMethod, InFunction, Inherited):
        assert list(attending(cls())) == ["_products.qk", "_products.pv"], cls
    assert not attending(ByHand())
    assert list(attending(Holds())) == ["attention._products.qk", "attention._products.pv"]
    assert list(attending(nn.MultiheadAttention(WIDTH, HEADS))) == ["_products.qk", "_products.pv"]


@pytest.mark.parametrize("cls", [InForward, InMethod, InFunction])
def test_calls_reach_the_products_and_nothing_stays_behind(cls):
    model, _ = model_of(cls)
    assert inspect.signature(model[0].forward) == inspect.signature(cls().forward)
    plain = restore_classes(copy.deepcopy(model))
    assert type(plain[0]) is cls
    with GemmCounter(model) as counter:
        y = model(x_of())
    assert {"0.qk", "0.pv"} <= {name for name, _ in counter.gemms}
    assert not counter.others
    y.sum().backward()
    assert not torch.equal(y, plain(x_of()))
    for phase in ("bf16", "fqt"):
        set_phase(model, phase)
        assert torch.equal(model(x_of()), plain(x_of())) is (phase == "bf16")
    q = torch.randn(1, 2, 8, 16)
    assert F.scaled_dot_product_attention is renamed
    assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(RuntimeError):
        model(x_of()[..., :8])
    assert torch._C._len_torch_function_stack() == 0, "after an error, too"
    assert torch.equal(renamed(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_none_by_default():
    model = convert(nn.Sequential(InForward(), nn.MultiheadAttention(WIDTH, HEADS)), "nvfp4")
    assert type(model[0]) is InForward
    assert not {name for name in names(model) if name.endswith(("qk", "pv"))}


def test_names_hold_for_patterns():
    classes = (InForward, InMethod, InFunction)
    model, _ = model_of(*classes, skip=["0"], overrides={"2\\.pv": "mxfp8"})
    of_each = {clean_name(name): layer.casts for name, layer in quantized_layers(model).items()}
    assert {name: str(of_each[name]) for name in of_each if name.endswith(("qk", "pv"))} == {
        "1.qk": "nvfp4",
        "1.pv": "nvfp4",
        "2.qk": "nvfp4",
        "2.pv": "mxfp8",
    }
    convert(model, "nvfp4")
    assert all(layer.casts == LinearCasts() for layer in quantized_layers(model).values() if layer.kind == "attention")


def test_state_dict_copies_and_pickles():
    model, _ = model_of(InForward, InMethod)
    assert model.state_dict().keys() == nn.Sequential(InForward(), InMethod()).state_dict().keys()
    y = model(x_of())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        LayerKeys(copied).fill_(0)
        assert type(copied[0]) is type(model[0])
        assert torch.equal(copied(x_of()), y)
        nn.init.zeros_(copied[0].qkv.weight)
        assert not torch.equal(copied(x_of()), y)


def gradients(model, keys, call):
    keys.fill_(3)
    torch.manual_seed(3)
    model.zero_grad()
    y = call(x_of())
    y.float().square().sum().backward()
    return [y, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_have_the_same_bits(use_reentrant):
    model, keys = model_of(InForward, WithDropout)

    def call(x):
        for module in model:
            x = checkpoint(module, x.requires_grad_(), use_reentrant=use_reentrant)
        return x

    wanted, got = gradients(model, keys, model), gradients(model, keys, call)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.13's Dynamo
def test_compiled_models_run_the_modules_eagerly():
    model, keys = model_of(InForward, InMethod)
    wanted = gradients(model, keys, model)
    got = gradients(model, keys, torch.compile(model, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_nn_multihead_attention_is_compiled_as_one_graph():
    model = convert(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "bf16", attention="nvfp4")
    keys = LayerKeys(model)

    def call(x):
        return model(x, x, x, need_weights=False)[0]

    wanted = gradients(model, keys, call)
    got = gradients(model, keys, torch.compile(call, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    plain = restore_classes(copy.deepcopy(model))
    assert not torch.equal(wanted[0], plain(x_of(), x_of(), x_of())[0])


def test_weights_that_are_asked_for_are_in_high_precision():
    model = convert(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "bf16", attention="nvfp4")
    LayerKeys(model).fill_(0)
    x = x_of()
    with_weights, without = model(x, x, x), model(x, x, x, need_weights=False)
    plain = restore_classes(copy.deepcopy(model))(x, x, x)
    assert torch.equal(with_weights[0], without[0])
    assert torch.equal(with_weights[1], plain[1])
    assert not torch.equal(with_weights[0], plain[0])


def test_flops_of_both_products():
    """The backward pass computes scores once more; a second pass over tiles for one scale would count likewise."""
    model, _ = model_of(InMethod)
    with GemmCounter(model) as counter:
        model(x_of()).sum().backward()
    product = 2 * (2 * 20 * 20 * WIDTH)
    assert counter.gemms["0.qk", "fprop"] == 2 * product
    for gemm in (("0.pv", "fprop"), ("0.qk", "dgrad"), ("0.qk", "wgrad"), ("0.pv", "dgrad"), ("0.pv", "wgrad")):
        assert counter.gemms[gemm] == product, gemm
    assert counter.recomputed == product
    assert not counter.others


class Config:
    _attn_implementation = "eager"


class Eager(InForward):
    config = Config()


def test_refusals():
    cases = {
        "has none": (nn.Linear(4, 4), {"attention": "nvfp4"}),
        "skip and only leave none": (InForward(), {"attention": "nvfp4", "only": ["qkv"]}),
        "'fp8-current'": (InForward(), {"attention": "fp8-delayed"}),
        "requantize": (InForward(), {"attention": "quartet2"}),
        "tiles for fprop_x": (
            InForward(),
            {"attention": {"fprop_x": {"element": "e4m3", "scale": {"format": "fp32", "block": [128, 128]}}}},
        ),
        "by 'eager'": (Eager(), {"attention": "nvfp4"}),
        "no native GEMM": (InForward(), {"attention": "fp8-current", "backend": "native"}),
    }
    for message, (model, given) in cases.items():
        with pytest.raises(ValueError, match=message):
            convert(model, "fp8-current", **given)
        assert type(model) in (nn.Linear, InForward, Eager), "the model has changed"
