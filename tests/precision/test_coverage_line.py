"""One line where little is quantized: when it comes, what it counts, and what it says."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_lowbit import (
    FP4Precision,
    LowBitPrecision,
    PrecisionSummary,
    PrecisionSwitch,
    TernaryPrecision,
    convert,
    pack_frozen,
)
from lightning_lowbit.precision.coverage_line import weights_line
from tests.launch import launch
from tests.lightning_imports import BoringModel, quiet_trainer
from tests.precision.ranks_coverage_line import Model, Reading, Special, special
from tests.ranks import RANKS


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(4, 16, 64)), nn.Parameter(torch.zeros(4, 64, 16))


class Odd(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.mT).mT


def plain():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def train(told, model, plugin=None, *callbacks):
    """Trains, and returns the lines that are logged."""
    told.clear()
    plugin = FP4Precision("nvfp4", seed=1, quantize_output=True) if plugin is None else plugin
    quiet_trainer(plugin, callbacks=[*callbacks], max_steps=3).fit(model)
    lines = [message for message in told.messages if "are in quantized layers" in message]
    end = " PrecisionSummary() among the callbacks counts FLOPs, and lists all."
    assert lines == ([f"{plugin.coverage_line.text}{end}"] if plugin.coverage_line.text else [])
    return lines


def test_little_coverage_is_said_once_with_its_reasons(told):
    (line,) = train(told, Model(special()))
    assert "11.1% of the weights of matrix products are in quantized layers. The rest: 89% Special (" in line
    assert "with a forward of its own: register_linear takes it, given that forward), such as rest.0.0" in line


def test_each_kind_of_layer_has_its_reason():
    odd, attention = Odd(16, 16, 9, padding=4), nn.MultiheadAttention(16, 2)
    cases = {
        "Odd (a subclass of a convolution, with a forward of its own)": odd,
        "Experts (a stack of matrices, as of experts, no nn.Linear": Experts(),
        "LSTM (recurrent)": nn.LSTM(16, 16),
    }
    for reason, layer in cases.items():
        assert reason in weights_line(convert(Model(layer), "nvfp4"))
    line = weights_line(convert(Model(plain(), plain()), "nvfp4", skip=["rest"]))
    assert line.count("left out by skip or only") == 1, "what has one reason is one reason"
    line = weights_line(convert(Model(attention), "nvfp4", skip=["rest"]))
    assert "MultiheadAttention (left out by skip or only), such as rest.0" in line
    line = weights_line(convert(Model(special(), *cases.values()), "nvfp4"))
    assert line.count("%") == 1 + 3, "the three largest"


def test_nothing_is_said_where_most_is_quantized_or_little_is_meant_to_be(told):
    runs = [(Model(plain()), TernaryPrecision()), (Model(plain(), special()), LowBitPrecision("bf16"))]
    for phase in ("qaf", "bf16"):
        runs.append((Model(special()), FP4Precision("nvfp4")))
        runs[-1][1].set_phase(phase)
    for model, plugin in (*runs, (BoringModel(), None)):
        assert not train(told, model, plugin)
    assert weights_line(convert(Model(plain(), nn.MultiheadAttention(16, 2)), "nvfp4")) == ""


def test_it_comes_with_full_quantization_and_again_with_another_trainer(told):
    plugin = FP4Precision("nvfp4")
    plugin.set_phase("bf16")
    assert train(told, Model(special()), plugin, PrecisionSwitch("fqt", step=1))
    assert train(told, Model(special()), plugin)


def test_a_summary_says_it_instead(told, capsys):
    assert not train(told, Model(special()), None, PrecisionSummary())
    assert "Coverage: " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
@pytest.mark.slow
def test_compiled_layers_are_not_taken_for_such_that_are_not_called(told):
    for model in (Model(plain()), Reading(plain()), Model(plain())):  # the last one runs in the graph of the first
        model.rest.compile(backend="eager")
        assert not train(told, model)


def test_a_layer_without_a_weight_yet_is_no_obstacle(told, capsys):
    with pytest.warns(UserWarning, match=r"rest.0.0: no weight yet"):
        train(told, Model(nn.Sequential(nn.LazyLinear(16)), plain()), FP4Precision("nvfp4"), PrecisionSummary())
    assert re.search(r"\nrest\.0\.0 .* new since the model was converted; the next", capsys.readouterr().out)


def test_weights_count_once_and_as_what_they_are():
    def line(*modules, **kwargs):
        return weights_line(convert(nn.Sequential(*modules), "nvfp4", **kwargs))

    odd = Special(64, 64)
    assert "20.0% of the weights" in line(nn.Linear(32, 32), odd, odd), "a layer that is used twice"
    embedding, output = nn.Embedding(128, 32), nn.Linear(32, 128)
    output.weight = embedding.weight
    assert "20.0% of the weights" in line(embedding, nn.Linear(32, 32), output, skip=["2"]), "a tied one is a matrix"
    assert line(nn.Embedding(128, 32), nn.Linear(32, 32)) == "", "an embedding is not"
    with pytest.warns(UserWarning, match="no weight yet"):
        assert "20.0% of the weights" in line(nn.Linear(32, 32), odd, nn.LazyConv1d(8, 1)), "an unknown one does not"
    norm, computed = nn.LayerNorm([32, 128]), weight_norm(nn.Linear(32, 126))  # 4032 of directions, 126 lengths
    assert "20.0% of the weights" in line(nn.Linear(32, 32), odd, norm), "a norm has no product"
    assert "19.8% of the weights" in line(nn.Linear(32, 32), computed), "what a weight is made of"
    base = pack_frozen(nn.Sequential(nn.Linear(32, 32), odd).requires_grad_(False), "nvfp4-nvidia", only=["0"])
    assert "20.0% of the weights" in weights_line(base), "codes"
    heads = line(nn.MultiheadAttention(32, 2), overrides={"0.in_proj": "bf16"})
    assert "25.0% of the weights" in heads and "such as 0.in_proj" in heads, "a part of a module"


def test_under_every_strategy_one_process_says_it(tmp_path):
    (first, warned), (second, others) = launch("tests.precision.ranks_coverage_line", RANKS, tmp_path)
    for name, texts in first.items():
        assert ["10.0% of the weights" in text and "Special" in text for text in texts] == [True], name
        assert second[name] == [], name
    (text,) = warned
    assert text.startswith("Converted, and trained without a call in the first step: first. Where a module reads")
    assert others == []
