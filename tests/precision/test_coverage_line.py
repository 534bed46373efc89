"""One line where little is quantized: when it comes, what it counts, and what it says."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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
from tests.lightning_imports import BoringModel, LightningModule, quiet_trainer
from tests.precision.ranks_coverage_line import Special
from tests.ranks import RANKS


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 64, 16) * 0.1)

    def forward(self, x):
        return torch.stack([(x @ self.up[i]).relu() @ self.down[i] for i in range(4)]).mean(0)


class Odd(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Model(LightningModule):
    """Tokens ``[2, 8, 16]`` through ``nn.Linear(16, 16)`` and what is to be counted."""

    def __init__(self, *rest):
        super().__init__()
        self.first, self.rest = nn.Linear(16, 16), nn.ModuleList(rest)

    def forward(self, x):
        x = self.first(x)
        for module in self.rest:
            x = module(x)
        return x

    def training_step(self, batch):
        return self(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(1)), batch_size=2)


def special():
    return nn.Sequential(Special(16, 64), nn.ReLU(), Special(64, 16))


def plain():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def lines(told):
    texts = [record.getMessage() for record in told.records if "are in quantized layers" in record.getMessage()]
    told.clear()
    return texts


def train(model, plugin=None, *callbacks):
    plugin = FP4Precision("nvfp4", seed=1, quantize_output=True) if plugin is None else plugin
    quiet_trainer(plugin, callbacks=[*callbacks], max_steps=3).fit(model)
    return plugin.coverage_line.text


def test_little_coverage_is_said_once_with_its_reasons(told):
    text = train(Model(special()))
    (line,) = lines(told)
    assert line == f"{text} PrecisionSummary() among the callbacks counts FLOPs, and lists all."
    assert "11.1% of the weights of matrix products are in quantized layers. The rest: 89% Special (" in text
    assert "with a forward of its own: register_linear takes it, given that forward), such as rest.0.0" in text


def test_each_kind_of_layer_has_its_reason():
    cases = {
        "Odd (a subclass of a convolution, with a forward of its own)": [Odd(16, 16, 9, padding=4)],
        "Experts (a stack of experts, no nn.Linear": [Experts()],
        "LSTM (recurrent)": [Recurrent()],
    }
    for reason, rest in cases.items():
        assert reason in weights_line(convert(Model(*rest), "nvfp4"))
    line = weights_line(convert(Model(plain(), plain()), "nvfp4", skip=["rest"]))
    assert line.count("left out by skip or only") == 1, "what has one reason is one reason"
    line = weights_line(convert(Model(Multihead()), "nvfp4", skip=["rest"]))
    assert "MultiheadAttention (left out by skip or only), such as rest.0.attention" in line
    line = weights_line(convert(Model(special(), Odd(16, 16, 9, padding=4), Experts(), Recurrent()), "nvfp4"))
    assert line.count("%") == 1 + 3, "the three largest"


def test_nothing_is_said_where_most_is_quantized_or_little_is_meant_to_be(told):
    train(Model(plain(), Multihead()))
    train(Model(plain()), TernaryPrecision())
    train(Model(plain(), special()), LowBitPrecision("bf16"))
    for phase in ("qaf", "bf16"):
        plugin = FP4Precision("nvfp4")
        plugin.set_phase(phase)
        train(Model(special()), plugin)
    train(BoringModel())
    assert lines(told) == []


def test_it_comes_with_full_quantization(told):
    plugin = FP4Precision("nvfp4")
    plugin.set_phase("bf16")
    train(Model(special()), plugin, PrecisionSwitch("fqt", step=1))
    assert len(lines(told)) == 1


def test_a_summary_says_it_instead(told, capsys):
    assert train(Model(special()), None, PrecisionSummary()) == ""
    assert lines(told) == []
    assert "Coverage: " in capsys.readouterr().out


def test_another_trainer_is_told_again(told):
    plugin = FP4Precision("nvfp4")
    for _ in range(2):
        train(Model(special()), plugin)
        assert len(lines(told)) == 1


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
    base = pack_frozen(nn.Sequential(nn.Linear(32, 32), odd).requires_grad_(False), "nvfp4-nvidia", only=["0"])
    assert "20.0% of the weights" in weights_line(base), "codes"
    heads = line(nn.MultiheadAttention(32, 2), overrides={"0.in_proj": "bf16"})
    assert "25.0% of the weights" in heads and "such as 0.in_proj" in heads, "a part of a module"


def test_under_every_strategy_one_process_says_it(tmp_path):
    results = launch("tests.precision.ranks_coverage_line", RANKS, tmp_path)
    for name in ("ddp", "fsdp1", "fsdp2"):
        first, second = (result[name] for result in results)
        (text,) = first
        assert "10.0% of the weights" in text and "Special" in text, name
        assert second == [], name
