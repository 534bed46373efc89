"""Layers that conversion cannot take: complex, integer and float8 parameters, sparse ones, and computed weights."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import convert, register_linear
from lightning_lowbit.nn import GroupedLinear, QuantizedLayer
from lightning_lowbit.nn.conversion.reasons import Reasons
from tests.tables import each

MAKE = {
    "linear": lambda: nn.Linear(32, 32),
    "Conv1D": lambda: Conv1D(32, 32),
    "convolution": lambda: nn.Conv2d(16, 16, 3),
    "transposed": lambda: nn.ConvTranspose1d(16, 16, 3),
    "multihead": lambda: nn.MultiheadAttention(32, 4),
    "separate": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=16),
    "stack": lambda: GroupedLinear(2, 32, 32),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64),
}
DTYPES = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool)


def of_parameters(module, change):
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(change(parameter.detach()), requires_grad=False))
    return module


def beside(odd):
    return nn.ModuleDict({"usual": nn.Linear(32, 32), "odd": odd})


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)]


@each("kind", MAKE)
@each("dtype", DTYPES)
def test_parameters_of_odd_dtypes(dtype, kind):
    def model():
        return beside(of_parameters(MAKE[kind](), lambda w: w.to(dtype)))

    name = "odd.self_attn" if kind == "encoder" else "odd"
    why = rf"its \w+ is {str(dtype).removeprefix('torch.')}"
    found = convert(model(), "nvfp4")
    assert converted(found) == ["usual"]
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
    model = convert(beside(odd), "nvfp4")
    assert converted(model) == ["usual"]
    assert str(Reasons(model).of("odd")) == f"its weight is {str(layout).removeprefix('torch.')}"
    model["odd"](torch.randn(2, 32))


def test_complex_layers_compute_as_before():
    odd, x = nn.Linear(32, 32, dtype=torch.complex64), torch.randn(4, 32, dtype=torch.complex64)
    expected = odd(x)
    model = convert(beside(odd), "nvfp4")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model["odd"](x), expected)


PARAMETRIZATIONS = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
COMPUTED = "its weight is computed (torch.nn.utils.parametrize)"


@each("kind", ["linear", "Conv1D", "convolution", "transposed"])
@each("parametrize", PARAMETRIZATIONS)
def test_computed_weights(parametrize, kind):
    odd = parametrize(MAKE[kind]())
    model = convert(beside(odd), "nvfp4")
    assert converted(model) == ["usual"]
    assert str(Reasons(model).of("odd")) == COMPUTED
    with pytest.raises(ValueError, match=re.escape(f"{type(odd).__name__} ({COMPUTED}), such as 0. Layers")):
        convert(nn.Sequential(odd), "nvfp4")
    if kind == "linear":
        register_linear(type(odd))  # which changes nothing
    only = re.escape(f"only: the pattern 'odd' matches odd, which stays in high precision: {COMPUTED}")
    with pytest.raises(ValueError, match=only):
        convert(beside(odd), "nvfp4", only=["odd"])


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
    found = {name for name in converted(model) if str(model.get_submodule(name).casts) == "mxfp8"}
    assert found == matched
    convert(model, "nvfp4", skip=[pattern])
    assert {name for name in converted(model) if not model.get_submodule(name).casts.traits.is_empty} == EVERY - matched


def test_a_module_that_holds_itself_has_names_too():
    model = nn.Module()
    model.layer, model.child = nn.Linear(32, 32), nn.Module()
    model.child.layer, model.child.parent = model.layer, model
    convert(model, "nvfp4", only=[r"child\.layer"])
    assert converted(model) == ["layer"]
