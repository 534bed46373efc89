"""Why modules are in high precision, and what to do: each remedy does what it says."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import LinearCasts, LowBitPrecision, convert, register_linear
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion import reasons
from lightning_lowbit.nn.conversion.reasons import Reason, Reasons
from tests.precision.regression_model import Regression, trainer
from tests.tables import each


class Special(nn.Linear):
    def forward(self, input):
        return super().forward(input).relu()


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


class Kernel(nn.Module):
    """With a weight that register_linear does not take."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64, 3, 3))


class SomeTopKRouter(Matrix):
    pass


class SomeExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 64, 64))


class LoRALinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(8, 64))


def model():
    of_experts = nn.ModuleDict({"experts": SomeExperts(), "gate": nn.Linear(64, 4), "router": SomeTopKRouter()})
    return nn.ModuleDict(
        {
            "body": nn.Linear(64, 64),
            "kept": nn.Linear(64, 64),
            "later": nn.Linear(64, 64),
            "head": nn.Linear(64, 2),
            "special": Special(64, 64),
            "matrix": Matrix(),
            "kernel": Kernel(),
            "bilinear": nn.Bilinear(64, 64, 64),
            "moe": of_experts,
            "adapted": LoRALinear(),
            "embedding": nn.Embedding(8, 64),
            "recurrent": nn.LSTM(64, 64),
            "attention": nn.Identity(),
        }
    )


WHY = {
    "": "computed outside of modules: call an nn.Linear there",
    "kept": "left out by skip or only",
    "later": "its casts are those of high precision, by skip, only or overrides",
    "body (dgrad)": "its casts leave dgrad in high precision",
    "head": "narrow, 2 outputs for blocks of 16: name it in overrides or only",
    "special": "a subclass of nn.Linear with a forward of its own: register_linear",
    "matrix": "no nn.Linear: register_linear takes it for one, if it computes",
    "kernel": "no nn.Linear",
    "bilinear": "no nn.Linear",
    "moe.experts": "a stack of matrices, as of experts, no nn.Linear",
    "moe.gate": "a router of experts: name it in overrides or only",
    "moe.router": "a router of experts",
    "adapted": "an adapter",
    "embedding": "an embedding's weight as a matrix: an nn.Linear with that weight",
    "recurrent": "recurrent",
    "attention": "products of activations, as in attention",
}


def test_each_module_has_its_reason():
    converted = convert(model(), "nvfp4", skip=["kept"], overrides={"later": "bf16"})
    found = Reasons(converted)
    for name, why in WHY.items():
        assert str(found.of(name)).startswith(why), (name, str(found.of(name)))
    assert found.module_reason("body", converted["body"]) is None
    assert str(Reasons(model()).of("body")).startswith("not converted: a LowBitPrecision among the plugins")


def test_lazy_layers_wait_for_a_batch_and_say_so():
    waiting = nn.ModuleDict({"body": nn.Linear(64, 64), "lazy": nn.LazyLinear(64)})
    why = "no weight yet: run one batch before the Trainer starts"
    with pytest.warns(UserWarning, match=f"^lazy: {why}. It is left in high precision"):
        convert(waiting, "nvfp4")
    assert str(Reasons(waiting).of("lazy")) == why
    waiting["lazy"](torch.randn(2, 64))
    convert(waiting, "nvfp4")
    assert Reasons(waiting).module_reason("lazy", waiting["lazy"]) is None


@each("again", ["moe.gate", "head"])
def test_a_layer_that_is_converted_no_more_has_the_reason_of_one_that_never_was(again):
    converted = convert(convert(model(), "nvfp4", only=[".*"]), "nvfp4")
    assert converted.get_submodule(again).casts == LinearCasts()
    assert str(Reasons(converted).of(again)).startswith(WHY[again])


def relu_of(layer, multiply, x):
    return multiply(x).relu()


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Registered(Special):
    pass


class RegisteredMatrix(Matrix):
    def forward(self, x):
        return x @ self.weight.t()


def linear_of(weight):
    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight = nn.Parameter(weight.detach())
    return layer


def within(odd, **others):
    return nn.ModuleDict({"odd": odd, **others})


def of_a_trainer(layer):
    model = Regression()
    model.odd = layer
    trainer(LowBitPrecision("nvfp4", compute_dtype="fp32")).fit(model)
    return model


# What a remedy says, the module that it is for, and what is done; "odd" is quantized then.
REMEDIES = [
    (
        "register_linear takes it, given that forward",
        lambda: Registered(64, 64),
        lambda odd: (register_linear(Registered, forward=relu_of), convert(within(odd), "nvfp4"))[1],
    ),
    (
        "register_linear takes it for one, if it computes x · Wᵀ + b",
        RegisteredMatrix,
        lambda odd: (register_linear(RegisteredMatrix), convert(within(odd), "nvfp4"))[1],
    ),
    (
        "nn.Linear and GroupedLinear are quantized",
        SomeExperts,
        lambda odd: convert(within(nn.ModuleList(map(linear_of, odd.up))), "nvfp4"),
    ),
    (
        "an nn.Linear with that weight is quantized",
        lambda: nn.Embedding(64, 64),
        lambda odd: convert(within(linear_of(odd.weight)), "nvfp4"),
    ),
    (
        "run one batch before the Trainer starts",
        lambda: nn.LazyLinear(64),
        lambda odd: (odd(torch.randn(2, 64)), convert(within(odd), "nvfp4"))[1],
    ),
    (
        "name it in overrides or only to quantize it",
        lambda: nn.Linear(64, 2),
        lambda odd: convert(within(odd), "nvfp4", only=["odd"]),
    ),
    (
        "name it in overrides or only to quantize it",
        lambda: nn.Linear(64, 2),
        lambda odd: convert(within(odd), "nvfp4", overrides={"odd": "nvfp4"}),
    ),
    (
        "attention= quantizes attention's",
        Attends,
        lambda odd: convert(within(odd, other=nn.Linear(64, 64)), "nvfp4", attention="nvfp4"),
    ),
    ("a LowBitPrecision among the plugins of the Trainer converts layers", lambda: nn.Linear(64, 64), of_a_trainer),
]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@each("remedy, make, apply", REMEDIES)
def test_each_remedy_does_what_it_says(remedy, make, apply):
    model = within(make(), usual=nn.Linear(64, 64))
    is_converted = not remedy.startswith("a LowBitPrecision")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy layers
        found = Reasons(convert(model, "nvfp4") if is_converted else model)
    assert found.of("odd").remedy == remedy
    converted = [n for n, m in apply(model["odd"]).named_modules() if isinstance(m, QuantizedLayer)]
    assert any(name.startswith("odd") for name in converted)


def test_the_table_has_every_remedy():
    written = {value.remedy for value in vars(reasons).values() if isinstance(value, Reason)} - {""}
    assert written - {row[0] for row in REMEDIES} == {"call an nn.Linear there"}


def test_a_model_without_layers_is_told_what_it_has_instead():
    message = (
        r"^ModuleDict holds no layer to quantize: .* It has Special \(a subclass .* register_linear .*\), such as one, "
        r"LSTM \(recurrent\), such as two\. Layers that are created in configure_model"
    )
    with pytest.raises(ValueError, match=message):
        convert(nn.ModuleDict({"one": Special(4, 4), "two": nn.LSTM(4, 4), "three": nn.Embedding(4, 4)}), "nvfp4")
