"""Which layer of a model is its output layer, and when ``quantize_output=False`` leaves it out."""

import copy

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_lowbit import convert
from lightning_lowbit.nn import plan
from lightning_lowbit.nn.conversion.defaults import output_layers
from lightning_lowbit.nn.layers.classes import convertible
from tests.nn.conversion.test_defaults import experts, mlp, named
from tests.tables import each


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


def of_transformers(kind, **sizes):
    import transformers

    settings = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    config = getattr(transformers, kind.split(":")[0])(**settings)
    return named("Module", model=getattr(transformers, kind.split(":")[1])(config), loss=linear())


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
    "LLaMA": (lambda: of_transformers("LlamaConfig:LlamaForCausalLM", intermediate_size=64), ["model.lm_head"]),
    "GPT-2": (lambda: of_transformers("GPT2Config:GPT2LMHeadModel"), ["model.lm_head"]),
    "T5": (lambda: of_transformers("T5Config:T5ForConditionalGeneration", d_model=64, d_ff=64), ["model.lm_head"]),
    "BERT": (
        lambda: of_transformers("BertConfig:BertForMaskedLM", intermediate_size=64),
        ["model.cls.predictions.decoder"],
    ),
    "no language model": (
        lambda: of_transformers("BertConfig:BertForSequenceClassification", intermediate_size=64).model,
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
