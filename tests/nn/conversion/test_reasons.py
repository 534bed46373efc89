"""Why modules are in high precision, and what to do: each remedy does what it says; layers that cannot be converted,
with complex, integer or float8 parameters, sparse ones, and computed weights; and modules with several names."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from lightning_lowbit import LinearCasts, LowBitPrecision, convert, register_linear
from lightning_lowbit.nn.conversion import reasons
from lightning_lowbit.nn.conversion.reasons import Reason, Reasons
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.nn.conversion.test_defaults import named
from tests.nn.passes.situations import SITUATIONS
from tests.precision.regression_model import Regression, fitted
from tests.tables import each


class Special(nn.Linear):
    def forward(self, input):
        return super().forward(input).relu()


def matrix(*shape):
    return nn.Parameter(torch.zeros(shape))


def model():
    experts, router = named("SomeExperts", up=matrix(4, 64, 64)), named("SomeTopKRouter", weight=matrix(64, 64))
    return nn.ModuleDict(
        {
            "body": nn.Linear(64, 64),
            "kept": nn.Linear(64, 64),
            "later": nn.Linear(64, 64),
            "head": nn.Linear(64, 2),
            "special": Special(64, 64),
            "matrix": named("Matrix", weight=matrix(64, 64)),
            "kernel": named("Kernel", weight=matrix(64, 64, 3, 3)),  # which register_linear does not take
            "bilinear": nn.Bilinear(64, 64, 64),
            "moe": nn.ModuleDict({"experts": experts, "gate": nn.Linear(64, 4), "router": router}),
            "adapted": named("LoRALinear", lora_A=matrix(8, 64)),
            "embedding": nn.Embedding(8, 64),
            "recurrent": nn.LSTM(64, 64),
            "attention": nn.Identity(),
        }
    )


WHY = {
    "": "computed outside of modules: call an nn.Linear there",
    "kept": "left out by skip or only",
    "later": "its casts are those of high precision, by preset, skip, only or overrides",
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


class RegisteredMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = matrix(64, 64)

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
    return fitted(LowBitPrecision("nvfp4", compute_dtype="fp32"), model).lightning_module


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
        lambda: named("SomeExperts", up=matrix(4, 64, 64)),
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
    assert any(name.startswith("odd") for name in quantized_layers(apply(model["odd"])))


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


# --- layers that conversion cannot take -------------------------------------------------------------------------------

MAKE = {name: SITUATIONS[name].make for name in ("linear", "Conv1D", "convolution", "transposed", "multihead", "stack")}
MAKE["separate"] = lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=16)
MAKE["encoder"] = lambda: nn.TransformerEncoderLayer(32, 4, 64)


@each("kind", MAKE)
@each("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
def test_parameters_of_odd_dtypes(dtype, kind):
    def model():
        odd = MAKE[kind]()
        for part in odd.modules():
            for name, weight in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
        return within(odd, usual=nn.Linear(32, 32))

    name = "odd.self_attn" if kind == "encoder" else "odd"
    why = rf"its \w+ is {str(dtype).removeprefix('torch.')}"
    found = convert(model(), "nvfp4")
    assert [*quantized_layers(found)] == ["usual"]
    assert re.fullmatch(why, str(Reasons(found).of(name)))
    for choice in ({"only": ["usual", name]}, {"overrides": {name: "int4"}}):
        (argument,) = choice
        with pytest.raises(ValueError, match=rf"^{argument}: .*{name}\S* which stays in high precision: {why}"):
            convert(model(), "nvfp4", **choice)
    with pytest.raises(ValueError, match=rf"holds no layer to quantize: .* \({why}\)"):
        convert(model()["odd"], "nvfp4")


@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
@each("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_weights(layout):
    odd = nn.Linear(32, 32, bias=False)
    odd.weight = nn.Parameter(odd.weight.detach().to_sparse(layout=layout))
    model = convert(within(odd, usual=nn.Linear(32, 32)), "nvfp4")
    assert [*quantized_layers(model)] == ["usual"]
    assert str(Reasons(model).of("odd")) == f"its weight is {str(layout).removeprefix('torch.')}"
    model["odd"](torch.randn(2, 32))


def test_complex_layers_compute_as_before():
    odd, x = nn.Linear(32, 32, dtype=torch.complex64), torch.randn(4, 32, dtype=torch.complex64)
    expected = odd(x)
    model = convert(within(odd, usual=nn.Linear(32, 32)), "nvfp4")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model["odd"](x), expected)


COMPUTED = "its weight is computed (torch.nn.utils.parametrize)"


@each("kind", ["linear", "Conv1D", "convolution", "transposed"])
@each("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
def test_computed_weights(parametrize, kind):
    odd = parametrize(MAKE[kind]())
    model = convert(within(odd, usual=nn.Linear(32, 32)), "nvfp4")
    assert [*quantized_layers(model)] == ["usual"]
    assert str(Reasons(model).of("odd")) == COMPUTED
    with pytest.raises(ValueError, match=re.escape(f"{type(odd).__name__} ({COMPUTED}), such as 0. Layers")):
        convert(nn.Sequential(odd), "nvfp4")
    if kind == "linear":
        register_linear(type(odd))  # which changes nothing
    only = re.escape(f"only: the pattern 'odd' matches odd, which stays in high precision: {COMPUTED}")
    with pytest.raises(ValueError, match=only):
        convert(within(odd, usual=nn.Linear(32, 32)), "nvfp4", only=["odd"])


class Shared(nn.Module):
    """Holds a layer, a block and an attention twice each."""

    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ModuleDict({"up": nn.Linear(32, 32)}))
        self.alias, self.net, self.block = net[2], net, net[3]
        self.first = self.second = nn.MultiheadAttention(32, 4)
        self.inside = nn.Module()
        self.inside.around = self.net


EVERY = {"alias", "net.0", "net.3.up", "first.out_proj", "first._products.in_proj"}


@each(
    "pattern, matched",
    [
        ("alias", {"alias"}),
        (r"net\.2", {"alias"}),
        (r"around\.2", {"alias"}),
        (r"net\.-2", {"alias"}),
        ("block", {"net.3.up"}),
        (r"block\.up", {"net.3.up"}),
        ("second", {"first.out_proj", "first._products.in_proj"}),
        (r"second\.in_proj", {"first._products.in_proj"}),
        ("net", EVERY - {"first.out_proj", "first._products.in_proj"}),
        ("inside", EVERY - {"first.out_proj", "first._products.in_proj"}),
    ],
)
@each("again", [False, True])
def test_a_pattern_matches_any_name_of_a_layer(again, pattern, matched):
    model = convert(Shared(), "int4") if again else Shared()
    convert(model, "nvfp4", overrides={pattern: "mxfp8"})
    assert {name for name, layer in quantized_layers(model).items() if str(layer.casts) == "mxfp8"} == matched
    convert(model, "nvfp4", skip=[pattern])
    rest = {name for name, layer in quantized_layers(model).items() if not layer.casts.traits.is_empty}
    assert rest == EVERY - matched


def test_a_module_that_holds_itself_has_names_too():
    model = nn.Module()
    model.layer, model.child = nn.Linear(32, 32), nn.Module()
    model.child.layer, model.child.parent = model.layer, model
    convert(model, "nvfp4", only=[r"child\.layer"])
    assert [*quantized_layers(model)] == ["layer"]
