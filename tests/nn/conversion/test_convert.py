"""Conversion: which layers, with which casts, in place."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, convert
from lightning_lowbit.nn import GroupedLinear, QuantizedLayer, QuantLinear, plan, set_phase
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.tables import each

NVFP4 = LinearCasts.preset("nvfp4")
INT4 = LinearCasts(fprop_w=Cast("int4"))
INT8 = LinearCasts(fprop_w=Cast("int8"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4, bias=False)})


class Model(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(4, 7, bias=False)


ALL = {f"layers.{i}.{name}" for i in range(2) for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
ALL |= {"lm_head"}


def with_layer(layer):
    return nn.ModuleDict({"first": nn.Linear(4, 4), "last": layer})


def classes(model):
    return {name: type(module) for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}


def test_nothing_is_skipped_by_default():
    model = Model()
    assert convert(model, "nvfp4") is model
    assert quantized_layers(model).keys() == ALL
    assert {(type(layer), layer.casts) for layer in quantized_layers(model).values()} == {(QuantLinear, NVFP4)}
    assert type(convert(nn.Linear(2, 3), NVFP4)) is QuantLinear, "a layer by itself"


@each(
    ("pattern", "matched"),
    [
        ("lm_head", {"lm_head"}),
        ("layers.0.mlp.up", {"layers.0.mlp.up"}),
        (r"layers\.0\.mlp\.up", {"layers.0.mlp.up"}),
        ("up", {"layers.0.mlp.up", "layers.1.mlp.up"}),
        ("mlp.up", {"layers.0.mlp.up", "layers.1.mlp.up"}),
        ("mlp", {name for name in ALL if ".mlp." in name}),
        (r"layers\.1", {name for name in ALL if name.startswith("layers.1.")}),
        (r"1\.attention", {"layers.1.attention.qkv", "layers.1.attention.out"}),
        ("layers", ALL - {"lm_head"}),
        ("(up|down)", {name for name in ALL if ".mlp." in name}),
        (r".*\.out", {"layers.0.attention.out", "layers.1.attention.out"}),
        (r"layers\.\d+\.attention\.qkv", {"layers.0.attention.qkv", "layers.1.attention.qkv"}),
        (".*", ALL),
        (r"layers\.-1", {name for name in ALL if name.startswith("layers.1.")}),
        (r"layers\.(0|-1)", ALL - {"lm_head"}),
        (r"-2\.mlp\.up", {"layers.0.mlp.up"}),
        (r"layers\.[0-9]\.mlp", {name for name in ALL if ".mlp." in name}),
        (r"layers\.(?!0).*", {name for name in ALL if name.startswith("layers.1.")}),  # 0 is not -2 here
    ],
)
def test_patterns(pattern, matched):
    assert set(plan(Model(), NVFP4, only=[pattern])) == matched
    if matched != ALL:
        assert set(plan(Model(), NVFP4, skip=[pattern])) == ALL - matched
    casts = plan(Model(), NVFP4, overrides={pattern: INT4})
    assert {name for name, value in casts.items() if value == INT4} == matched
    assert set(casts) == ALL


@each("pattern", ["head", "lm", "m_head", "p", "ayers", "layers.", "0.mlp.u", "embed", "", "UP", "layers.-3"])
@each("argument", ["skip", "only", "overrides"])
def test_a_pattern_that_matches_nothing(pattern, argument):
    """Parts of a word do not match, nor do modules that hold no linear layer; nothing has been changed then."""
    model = Model()
    before = classes(model)
    given = {pattern: INT4} if argument == "overrides" else ["lm_head", pattern]
    with pytest.raises(ValueError, match=f"{argument}: the pattern '{pattern}' matches no linear layer. There are 9"):
        convert(model, NVFP4, **{argument: given})
    assert classes(model) == before


def test_numbers_count_from_the_end_of_each_list():
    model = nn.ModuleDict({"encoder": Model(3), "decoder": Model(5)})
    model["net"] = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    found = set(plan(model, NVFP4, only=[r"layers\.-1\.mlp\.up", r"net\.-1"]))
    assert found == {"encoder.layers.2.mlp.up", "decoder.layers.4.mlp.up", "net.2"}  # the last one that holds a layer


def test_skip_and_only_together():
    for pack in (list, iter):
        model = convert(Model(), NVFP4, skip=pack(["down"]), only=pack(["mlp", "lm_head"]))
        assert quantized_layers(model).keys() == {"layers.0.mlp.up", "layers.1.mlp.up", "lm_head"}


def test_first_override_wins():
    overrides = {r"layers\.0\.mlp\.up": INT4, "mlp": INT8, "lm_head": "bf16"}
    casts = plan(Model(), NVFP4, overrides=overrides)
    assert casts["layers.0.mlp.up"] == INT4
    assert casts["layers.0.mlp.down"] == casts["layers.1.mlp.up"] == INT8
    assert casts["lm_head"] == LinearCasts()
    assert casts["layers.0.attention.out"] == NVFP4


def test_plan_is_what_convert_does_again_and_again():
    model, arguments = Model(), {"skip": ["qkv"], "overrides": {"mlp": {"preset": "nvfp4", "dgrad_w": "fprop"}}}
    before = classes(model)
    expected = plan(model, NVFP4, **arguments)
    assert classes(model) == before, "plan changed the model"
    for _ in range(2):
        convert(model, NVFP4, **arguments)
        assert {name: layer.casts for name, layer in quantized_layers(model).items()} == expected
        assert plan(model, NVFP4, **arguments) == expected
        assert {type(model.get_submodule(name)) for name in expected} == {QuantLinear}


PROJECTIONS = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("x", "up_proj", "down_proj")})
SMOOTHED = {"preset": "nvfp4", "smooth": "channel"}
NO_EFFECT = r"overrides: '(up|lm_head)' gives no layer its casts. It names .*(up|lm_head)"
PIECE = "must match one or more whole parts of a name.*"


@each(
    ("arguments", "message"),
    [
        ({"skip": "lm_head"}, r"skip is a list .* 'lm_head'. Write \['lm_head'\]"),
        ({"only": "lm_head"}, r"only is a list .* 'lm_head'. Write \['lm_head'\]"),
        ({"skip": None}, "skip.*a list of patterns.*got None"),
        ({"skip": [3]}, "skip.*a pattern is a string.*got 3"),
        ({"only": [3]}, "only.*a pattern is a string.*got 3"),
        ({"overrides": {3: INT4}}, "overrides.*a pattern is a string.*got 3"),
        ({"skip": ["("]}, r"skip: '\(' is not a regular expression"),
        ({"overrides": {"[": INT4}}, r"overrides: '\[' is not a regular expression"),
        ({"overrides": "mlp"}, "overrides maps name patterns to casts, .*; got 'mlp'"),
        ({"overrides": {"mlp": INT8, "up": INT4}}, NO_EFFECT),
        ({"overrides": {"lm_head": INT8}, "skip": ["lm_head"]}, NO_EFFECT),
        ({"overrides": {"lm_head": INT8}, "only": ["mlp"]}, NO_EFFECT),
        ({"skip": [".*"]}, "No layer is left to quantize: 9 were found"),
        ({"only": []}, "No layer is left to quantize"),
        ({"only": ["mlp"], "skip": ["up", "down"]}, "No layer is left to quantize"),
        ({"casts": "nvfp5"}, "Unknown preset 'nvfp5'"),
        ({"overrides": {"mlp": "nvfp5"}}, "Unknown preset 'nvfp5'"),
        ({"model": nn.Embedding(7, 4)}, "Embedding holds no layer to quantize"),
        ({"model": Model}, "an instance of nn.Module; got"),
        ({"model": "model"}, "an instance of nn.Module; got"),
        ({"model": PROJECTIONS, "skip": ["down_"]}, PIECE + r"'down_\.\*' matches down_proj"),
        ({"model": PROJECTIONS, "skip": ["_proj"]}, PIECE + r"'\.\*_proj' matches down_proj, up_proj"),
        ({"model": PROJECTIONS, "skip": ["q"]}, PIECE + "such as 'x'"),
        ({"model": with_layer(nn.Conv2d(4, 4, 3)), "casts": SMOOTHED}, "last is of the kind 'convolution'. Give"),
        ({"model": with_layer(GroupedLinear(2, 4, 4)), "casts": SMOOTHED}, "last is of the kind 'experts'. Give"),
        (
            {"casts": "mxfp6", "backend": "native", "only": ["layers"]},
            r"fprop of .*0.*mlp.* and \d more has no native GEMM.*backend='auto', skip such layers, .* overrides",
        ),
    ],
)
def test_errors_change_nothing(arguments, message):
    arguments = {"model": Model(), "casts": NVFP4, **arguments}
    before = classes(arguments["model"])
    with pytest.raises(ValueError, match=message):
        convert(**arguments)
    assert classes(arguments["model"]) == before


def test_conv1d():
    layer = Conv1D(6, 4)
    weight = layer.weight
    convert(layer, NVFP4)
    assert isinstance(layer, Conv1D) and isinstance(layer, QuantizedLayer) and layer.weight is weight
    assert type(layer) is type(convert(Conv1D(2, 2), NVFP4)), "one class for all of them"


def test_parameters_and_references_stay():
    model = Model()
    model.lm_head.weight = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head, parameters, names = model.lm_head, dict(model.named_parameters()), list(model.state_dict())
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    convert(model, NVFP4)
    assert model.lm_head is head and head.weight is model.embed.weight, "tied weights stay tied"
    assert isinstance(head, nn.Linear)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert list(model.state_dict()) == names
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    head(torch.randn(2, 4))
    assert calls == [1], "forward hooks were lost"
    Model().load_state_dict(model.state_dict())


def test_a_layer_with_two_names_is_one_layer():
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    model["second"] = model["first"]
    assert list(plan(model, NVFP4)) == ["first"]
    assert type(convert(model, NVFP4)["second"]) is QuantLinear


def test_other_casts():
    model = convert(Model(), NVFP4)
    convert(model, INT4, overrides={"lm_head": INT8}, exact=True)
    for name, layer in quantized_layers(model).items():
        assert layer.casts == layer.full_casts == (INT8 if name == "lm_head" else INT4), name
        assert layer.lowbit.exact


def test_phases_of_a_model():
    model = convert(Model(), NVFP4, overrides={"lm_head": INT4})
    for phase in ("qaf", "hp-forward", "bf16", "qaf", "fqt"):
        set_phase(model, phase)
        for name, layer in quantized_layers(model).items():
            full = INT4 if name == "lm_head" else NVFP4
            assert (layer.casts, layer.full_casts) == (full.phase(phase), full), f"{name} in {phase}"
    with pytest.raises(ValueError, match="Unknown phase 'qat'"):
        set_phase(model, "qat")
    assert model.lm_head.casts == INT4
