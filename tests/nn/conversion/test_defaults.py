"""What stays in high precision unless it is named: routers, adapters, narrow layers, and perhaps output layers."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_lowbit import IntegerPrecision, LinearCasts, convert
from lightning_lowbit.nn import QuantizedLayer, plan
from lightning_lowbit.nn.conversion.defaults import default_reasons, output_layers
from lightning_lowbit.nn.layers.classes import convertible
from tests.tables import each

ROUTER, ADAPTER = "a router of experts", "an adapter"


def named(kind, module=__name__, **members):
    """A module of a new class of this name, with children and parameters."""
    made = type(kind, (nn.Module,), {"__module__": module})()
    for name, member in members.items():
        setattr(made, name, member)
    return made


def mlp():
    return named("MLP", gate_proj=nn.Linear(64, 96), up_proj=nn.Linear(64, 96), down_proj=nn.Linear(96, 64))


def stack():
    return named("SomeExperts", gate_up_proj=nn.Parameter(torch.zeros(4, 64, 64)))


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
        found = default_reasons(model, dict.fromkeys(convertible(model), LinearCasts.preset("fp8-current")))
        assert found == {f"layers.0.{name}": ROUTER for name in expected}, kind


def test_adapters_are_recognized_by_what_is_around_them():
    low, high = nn.Linear(64, 8), nn.Linear(8, 64)
    adapted = {"base_layer": nn.Linear(64, 64)}
    adapted |= {"lora_A": nn.ModuleDict({"default": low}), "lora_B": nn.ModuleDict({"default": high})}
    other = named("Layer", module="peft.tuners.bottleneck", base_layer=nn.Linear(64, 64), down=nn.Linear(64, 32))
    model = nn.ModuleDict({"q_proj": named("Linear", **adapted), "v_proj": other, "saved": nn.Linear(64, 64)})
    found = default_reasons(model, dict.fromkeys(convertible(model), LinearCasts.preset("nvfp4")))
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
    found = default_reasons(model, dict.fromkeys(convertible(model), LinearCasts.of(casts)))
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


# --- the output layer: found whatever its name, and left out with `quantize_output=False` -----------------------------


def linear(inputs=64, outputs=64, frozen=False):
    layer = nn.Linear(inputs, outputs)
    return layer.requires_grad_(not frozen)


def perceptron():
    return nn.Sequential(linear(), nn.ReLU(), linear())


def tied():
    head, embedding = linear(64, 256), nn.Embedding(256, 64)
    embedding.weight = head.weight
    return named("LM", decoder=head, embedding=embedding, block=mlp())


def adapted():
    lora = nn.ModuleDict({"default": linear(64, 8)}), nn.ModuleDict({"default": linear(8, 64)})
    head = named("Linear", base_layer=linear(frozen=True), lora_A=lora[0], lora_B=lora[1])
    return named("Adapted", body=linear(frozen=True), head=head)


def of_transformers(kind, head, **sizes):
    settings = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    config = getattr(transformers, f"{kind}Config")(**settings)
    return named("Module", model=getattr(transformers, f"{kind}{head}")(config), loss=linear())


def wide():
    return nn.Sequential(linear(64, 128), nn.ReLU(), linear(128, 64))


def averaged(model):
    model.average = AveragedModel(model.net)
    return model


MODELS = {
    "a stack": (perceptron, ["2"]),
    "one layer within a module": (lambda: nn.Sequential(linear()), ["0"]),
    "one layer": (linear, []),
    "by registration": (lambda: named("Net", top=linear(), bottom=linear()), ["bottom"]),
    "a head that is registered first": (lambda: named("Net", head=linear(), body=linear()), ["head"]),
    "a frozen one": (lambda: named("Net", old_head=linear(frozen=True), body=perceptron()), ["body.2"]),
    "U-Net": (
        lambda: named("UNet", up=nn.ConvTranspose2d(64, 64, 2), middle=linear(), out=nn.Conv2d(64, 64, 1)),
        ["out"],
    ),
    "GAN": (lambda: named("GAN", generator=perceptron(), discriminator=wide()), ["discriminator.2"]),
    "a target network": (lambda: named("DQN", net=perceptron(), target=perceptron()), ["net.2", "target.2"]),
    "an average": (lambda: averaged(named("Net", net=wide())), ["net.2", "average.module.2"]),
    "two heads": (
        lambda: named("Net", body=linear(), policy_head=linear(64, 8), value_head=linear(64, 32)),
        ["policy_head", "value_head"],
    ),
    "actor and critic": (lambda: named("AC", actor=linear(64, 8), critic=linear(64, 1)), ["actor", "critic"]),
    "a list of heads": (
        lambda: named("Net", body=linear(), heads=nn.ModuleList([linear(64, 8), linear(64, 16)])),
        ["heads.0", "heads.1"],
    ),
    "layers by name": (
        lambda: named("Net", net=nn.ModuleDict({"first": linear(32, 64), "h": perceptron(), "out": linear(64, 8)})),
        ["net.out"],
    ),
    "heads by name": (
        lambda: named("Net", body=linear(), heads=nn.ModuleDict({"a": linear(), "b": linear()})),
        ["heads.a", "heads.b"],
    ),
    "a list of layers": (lambda: named("Net", layers=nn.ModuleList([linear(), linear(), linear()])), ["layers.2"]),
    "experts, and a router behind them": (
        lambda: named("Net", block=named("MoE", experts=experts(), router=linear(64, 4))),
        ["block.experts.3.down_proj"],
    ),
    "a frozen teacher": (
        lambda: named("Distilled", student=perceptron(), teacher=perceptron().requires_grad_(False)),
        ["student.2", "teacher.2"],
    ),
    "all frozen": (lambda: perceptron().requires_grad_(False), ["2"]),
    "adapters": (adapted, ["head.base_layer"]),
    "tied to the embedding, registered first": (tied, ["decoder"]),
    "a block of torch": (lambda: nn.TransformerEncoderLayer(64, 2, 64), ["linear2"]),
    "attention alone": (lambda: nn.MultiheadAttention(64, 2), ["out_proj"]),
}
LARGE = {
    "LLaMA": (lambda: of_transformers("Llama", "ForCausalLM", intermediate_size=64), ["model.lm_head"]),
    "GPT-2": (lambda: of_transformers("GPT2", "LMHeadModel"), ["model.lm_head"]),
    "T5": (lambda: of_transformers("T5", "ForConditionalGeneration", d_model=64, d_ff=64), ["model.lm_head"]),
    "BERT": (lambda: of_transformers("Bert", "ForMaskedLM", intermediate_size=64), ["model.cls.predictions.decoder"]),
    "no language model": (
        lambda: of_transformers("Bert", "ForSequenceClassification", intermediate_size=64).model,
        ["classifier"],
    ),
}


@each("name", [*MODELS, *LARGE])
def test_the_output_layer_is_found_whatever_its_name(name):
    make, expected = {**MODELS, **LARGE}[name]
    model = make()
    assert output_layers(model, convertible(model)) == expected
    if name in MODELS and expected:  # converted, and with the names that wrappers give
        wrapped = named("Around", _fsdp_wrapped_module=convert(copy.deepcopy(model), "fp8-current"))
        names = [layer.removeprefix("_fsdp_wrapped_module.") for layer in output_layers(wrapped, convertible(wrapped))]
        assert names == expected


@pytest.mark.parametrize("casts", ["nvfp4", "ternary"])
def test_it_is_left_out_unless_it_is_named_or_nothing_else_is_left(casts):
    def planned(model, **settings):
        return list(plan(model, casts, **{"quantize_output": False, **settings}))

    model = nn.ModuleDict({"body": perceptron(), "out": nn.Sequential(linear())})
    everything = ["body.0", "body.2", "out.0"]
    assert list(plan(model, casts)) == planned(model, quantize_output=True) == everything
    assert planned(model) == everything[:2]
    assert planned(model, skip=["out"]) == everything[:2], "the layer before it has been taken for the output"
    for naming in ({"overrides": {r"out\.0": "fp8-current"}}, {"only": ["body", "out"]}):
        assert planned(model, **naming) == everything
    assert planned(model, only=["body|out"]) == everything[:2], "a pattern that matches much names nothing"
    assert planned(model, skip=["body"]) == ["out.0"], "nothing else is left"
    assert planned(nn.Sequential(linear())) == ["0"]
    assert planned(linear()) == [""]
