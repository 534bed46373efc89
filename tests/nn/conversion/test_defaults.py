"""What stays in high precision unless it is named: routers, adapters, narrow layers."""

import pytest
import torch
from torch import nn

from lightning_lowbit import IntegerPrecision, LinearCasts, convert
from lightning_lowbit.nn import QuantizedLayer, plan
from lightning_lowbit.nn.conversion.defaults import default_reasons
from tests.tables import each

ROUTER, ADAPTER = "a router of experts", "an adapter"


def named(kind, base=nn.Module, module=__name__, **children):
    """A module of a new class of this name, with children."""
    made = type(kind, (base,), {"__module__": module})()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def mlp():
    return named("MLP", gate_proj=nn.Linear(64, 96), up_proj=nn.Linear(64, 96), down_proj=nn.Linear(96, 64))


def stack(count=4):
    experts = named("SomeExperts")
    experts.gate_up_proj = nn.Parameter(torch.zeros(count, 64, 64))
    return experts


def experts():
    return nn.ModuleList([mlp() for _ in range(4)])


def test_routers_of_experts_are_recognized_by_their_names():
    inner = nn.Linear(64, 8)  # no number of experts: the class around it tells
    models = {
        "litgpt": (named("LLaMAMoE", gate=nn.Linear(64, 4), experts=experts()), {"gate"}),
        "router": (named("Block", router=nn.Linear(64, 4), experts=stack(), mlp=mlp()), {"router"}),
        "afmoe": (named("MoE", router=named("AfmoeTokenChoiceRouter", gate=inner), experts=stack()), {"router.gate"}),
        "zaya": (
            named("MoE", router=named("ZayaRouter", router_mlp=nn.Sequential(inner)), experts=stack()),
            {"router.router_mlp.0"},
        ),
        "jetmoe": (
            named("MoE", router=named("TopKGating", layer=inner), input_linear=named("ParallelExperts")),
            {"router.layer"},
        ),
        "qwen2_moe": (
            named("Moe", experts=stack(), shared_expert=mlp(), shared_expert_gate=nn.Linear(64, 1)),
            {"shared_expert_gate"},
        ),
        "a gate of another size": (named("Block", gate=nn.Linear(64, 64), experts=stack()), set()),
        "a gate without experts": (named("Block", gate=nn.Linear(64, 4), mlp=mlp()), set()),
        "a classifier called router": (named("MailRouter", net=nn.Linear(64, 32), gate=nn.Linear(64, 4)), set()),
        "a gate of an expert": (
            named("MoE", experts=nn.ModuleList([named("Expert", gate=nn.Linear(64, 4)) for _ in range(4)])),
            set(),
        ),
    }
    for kind, (block, expected) in models.items():
        model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        found = default_reasons(model, dict.fromkeys(_linears(model), LinearCasts.preset("fp8-current")))
        assert found == {f"layers.0.{name}": ROUTER for name in expected}, kind


def _linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_adapters_are_recognized_by_what_is_around_them():
    low, high = nn.Linear(64, 8), nn.Linear(8, 64)
    adapted = {"base_layer": nn.Linear(64, 64)}
    adapted |= {"lora_A": nn.ModuleDict({"default": low}), "lora_B": nn.ModuleDict({"default": high})}
    other = named("Layer", module="peft.tuners.bottleneck", base_layer=nn.Linear(64, 64), down=nn.Linear(64, 32))
    model = nn.ModuleDict({"q_proj": named("Linear", **adapted), "v_proj": other, "saved": nn.Linear(64, 64)})
    found = default_reasons(model, dict.fromkeys(_linears(model), LinearCasts.preset("nvfp4")))
    assert found == dict.fromkeys(["q_proj.lora_A.default", "q_proj.lora_B.default", "v_proj.down"], ADAPTER)
    assert "q_proj.lora_A.default" in plan(model, "nvfp4", only=["lora_A", "saved"]), "named by what holds nothing else"


@each(
    "casts, inputs, outputs, why",
    [
        ("nvfp4", 64, 7, "narrow, 7 outputs for blocks of 16"),
        ("nvfp4", 7, 64, "narrow, 7 inputs for blocks of 16"),
        ("nvfp4", 64, 8, None),
        ("nvfp4", 63, 1, None),
        ("nvfp4", 4, 4, None),
        ("nvfp4-nvidia", 64, 7, "narrow, 7 outputs for blocks of 16"),
        ("mxfp4", 128, 15, "narrow, 15 outputs for blocks of 32"),
        ("mxfp4", 64, 7, None),
        ("fp8-current", 64, 1, None),
        ("ternary", 64, 1, None),
        (IntegerPrecision(4, 8).casts, 512, 63, None),
        (IntegerPrecision(4, 8).casts, 63, 512, "narrow, 63 inputs for blocks of 128"),
    ],
)
def test_a_layer_is_narrow_if_a_contraction_is_shorter_than_half_a_block(casts, inputs, outputs, why):
    """Only in forward and dgrad, only where something is quantized in blocks, and only beside four blocks."""
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(64, 64))
    found = default_reasons(model, dict.fromkeys(_linears(model), LinearCasts.of(casts)))
    assert found == ({} if why is None else {"0": why})


def test_patterns_that_name_a_layer_quantize_it():
    def model():
        return nn.ModuleDict(
            {"body": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), "head": nn.Sequential(nn.Linear(64, 1))}
        )

    everything = ["body.0", "body.1", "head.0"]
    assert list(plan(model(), "nvfp4")) == ["body.0"]
    assert list(plan(model(), "nvfp4", only=["body"])) == ["body.0"], "a module around it does not name it"
    assert list(plan(model(), "nvfp4", only=["body", "head"])) == ["body.0", "head.0"], "but one that has nothing else"
    assert list(plan(model(), "nvfp4", only=[".*"])) == everything
    assert list(plan(model(), "nvfp4", overrides={"body.1": "fp8-current", "head": "nvfp4"})) == everything
    assert list(plan(model(), "nvfp4", overrides={"body.-1": "nvfp4"})) == ["body.0", "body.1"]
    assert list(plan(model(), "nvfp4", only=["body.*"], skip=["body.1"])) == ["body.0"]
    with pytest.raises(ValueError, match=r"3 were found.* by default .*: head\.0 \(narrow, 1 output .*Name them in"):
        plan(model(), "nvfp4", skip=["body"])
    convert(converted := model(), "nvfp4")
    assert list(plan(converted, "nvfp4")) == ["body.0"], "converting again leaves it out again"
    assert type(convert(nn.Linear(64, 1), "nvfp4")).__name__ == "QuantLinear", "a model that is one layer was named"
    convert(converted, "nvfp4", only=[".*"])
    assert all(isinstance(layer, QuantizedLayer) for layer in (converted["head"][0], converted["body"][1]))
    convert(converted, "nvfp4")
    assert converted["head"][0].casts == LinearCasts()
