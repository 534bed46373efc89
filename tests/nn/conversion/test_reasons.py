"""Why modules are in high precision, and what to do: each remedy does what it says."""

import inspect
import re

import pytest
import torch
from torch import Tensor, nn

import lightning_lowbit
from lightning_lowbit import LinearCasts, LowBitPrecision, convert
from lightning_lowbit.nn.conversion import reasons
from lightning_lowbit.nn.conversion.reasons import Reason, Reasons


class Special(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


class SomeTopKRouter(Matrix):
    pass


class SomeExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 64, 64))


class LoRALinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(8, 64))


def model() -> nn.Module:
    of_experts = nn.ModuleDict({"experts": SomeExperts(), "gate": nn.Linear(64, 4), "router": SomeTopKRouter()})
    return nn.ModuleDict(
        {
            "body": nn.Linear(64, 64),
            "kept": nn.Linear(64, 64),
            "later": nn.Linear(64, 64),
            "head": nn.Linear(64, 2),
            "special": Special(64, 64),
            "matrix": Matrix(),
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
    "later": "its casts are those of high precision",
    "body (dgrad)": "its casts leave dgrad in high precision",
    "head": "narrow, 2 outputs for blocks of 16: name it in overrides or only",
    "special": "a subclass of nn.Linear with a forward of its own: register_linear",
    "matrix": "no nn.Linear: register_linear takes it for one, if it computes",
    "moe.experts": "a stack of experts, no nn.Linear",
    "moe.gate": "a router of experts: name it in overrides or only",
    "moe.router": "a router of experts",
    "adapted": "an adapter",
    "embedding": "an embedding's weight as a matrix: an nn.Linear with that weight",
    "recurrent": "recurrent",
    "attention": "products of activations, as in attention",
}


def test_each_module_has_its_reason() -> None:
    converted = convert(model(), "nvfp4", skip=["kept"], overrides={"later": "bf16"})
    found = Reasons(converted)
    for name, why in WHY.items():
        assert str(found.of(name)).startswith(why), (name, str(found.of(name)))
    assert found.of_module("body", converted["body"]) is None


def test_without_a_plugin_layers_are_not_converted() -> None:
    assert str(Reasons(model()).of("body")).startswith("not converted: a LowBitPrecision among the plugins")


def test_lazy_layers_wait_for_a_batch_and_say_so() -> None:
    waiting = nn.ModuleDict({"body": nn.Linear(64, 64), "lazy": nn.LazyLinear(64)})
    why = "no weight yet: run one batch before the Trainer starts"
    with pytest.warns(UserWarning, match=f"^lazy: {why}. It is left in high precision"):
        convert(waiting, "nvfp4")
    assert str(Reasons(waiting).of("lazy")) == why
    waiting["lazy"](torch.randn(2, 64))
    convert(waiting, "nvfp4")
    assert Reasons(waiting).of_module("lazy", waiting["lazy"]) is None


@pytest.mark.parametrize("again", ["moe.gate", "head"])
def test_a_layer_that_is_converted_no_more_has_the_reason_of_one_that_never_was(again: str) -> None:
    converted = convert(convert(model(), "nvfp4", only=[".*"]), "nvfp4")
    assert converted.get_submodule(again).casts == LinearCasts()
    assert str(Reasons(converted).of(again)).startswith(WHY[again])


def test_remedies_name_what_there_is() -> None:
    remedies = [value.remedy for value in vars(reasons).values() if isinstance(value, Reason)]
    remedies.append(str(Reasons(convert(model(), "nvfp4")).of("head")))
    arguments = inspect.signature(LowBitPrecision).parameters
    for remedy in remedies:
        for name in re.findall(r"(\w+)=|\b(overrides|only|skip)\b", remedy):
            assert "".join(name) in arguments, remedy
        for name in re.findall(r"\bregister_\w+", remedy):
            assert hasattr(lightning_lowbit, name), remedy


def test_a_model_without_layers_is_told_what_it_has_instead() -> None:
    message = (
        r"^ModuleDict holds no layer to quantize: .* It has Special \(a subclass .* register_linear .*\), such as one, "
        r"LSTM \(recurrent\), such as two\. Layers that are created in configure_model"
    )
    with pytest.raises(ValueError, match=message):
        convert(nn.ModuleDict({"one": Special(4, 4), "two": nn.LSTM(4, 4), "three": nn.Embedding(4, 4)}), "nvfp4")
