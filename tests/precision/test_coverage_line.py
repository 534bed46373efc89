"""One line where little is quantized: what it counts, what it says, and that it changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, LowBitPrecision, PrecisionSummary, TernaryPrecision, convert
from lightning_lowbit.nn import GemmCounter, LayerKeys
from lightning_lowbit.precision.coverage_line import CoverageLine, graph_coverage
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


class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(16, 64, 3, padding=1)
        self.back = nn.ConvTranspose1d(64, 16, 3, padding=1)

    def forward(self, x):
        return self.back(self.convolution(x.mT)).mT


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
    found = [record.getMessage() for record in told.records if "are in quantized layers" in record.getMessage()]
    told.clear()
    return found


def counted_by(line):
    plugin = FP4Precision("nvfp4", seed=1, quantize_output=True)
    plugin.coverage_line = line
    return plugin


class Silent(CoverageLine):
    def count(self, *_):
        return None


class Failing(CoverageLine):
    def count(self, *_):
        raise AttributeError("'MmBackward0' object has no attribute '_input_metadata'")


def train(model, plugin=None, *callbacks, **kwargs):
    plugin = counted_by(CoverageLine()) if plugin is None else plugin
    quiet_trainer(plugin, callbacks=[*callbacks], **{"max_steps": 3, **kwargs}).fit(model)
    return plugin.coverage_line


def test_little_coverage_is_said_once_with_its_reasons(told):
    cases = {
        "subclass": (
            [special()],
            "with a forward of its own: register_linear takes it, given that forward), such as rest.0.",
        ),
        "convolution": ([Odd(16, 16, 9, padding=4)], "Odd (a subclass of a convolution, with a forward of its own)"),
        "experts": ([Experts()], "Experts (a stack of experts, no nn.Linear"),
        "attention": ([Attention() for _ in range(8)], "products of activations with each other, as in attention"),
        "recurrent": ([Recurrent()], "LSTM (recurrent)"),
    }
    for name, (rest, reason) in cases.items():
        train(Model(*rest))
        (line,) = lines(told)
        assert reason in line, (name, line)
        assert "PrecisionSummary()" in line
    train(Model(plain(), plain()), FP4Precision("nvfp4", skip=["rest"]))
    (line,) = lines(told)
    assert line.count("left out by skip or only") == 1, "what has one reason is one reason"
    train(Model(Multihead()), FP4Precision("nvfp4", skip=["rest"]))
    (line,) = lines(told)
    assert "MultiheadAttention (left out by skip or only), such as rest.0.attention" in line
    train(Model(special(), Odd(16, 16, 9, padding=4), Experts(), Recurrent()))
    (line,) = lines(told)
    assert line.count("%") == 1 + 3, "the three largest"


def test_nothing_is_said_where_most_is_quantized_or_little_is_meant_to_be(told):
    train(Model(plain(), Attention()))
    train(Model(plain()), TernaryPrecision())
    train(Model(plain(), special()), LowBitPrecision("bf16"))
    for phase in ("qaf", "bf16"):
        plugin = FP4Precision("nvfp4")
        plugin.set_phase(phase)
        train(Model(special()), plugin)
    assert lines(told) == []


def test_a_summary_says_more(told, capsys):
    line = train(Model(special()), None, PrecisionSummary())
    assert lines(told) == []
    assert "Coverage: " in capsys.readouterr().out
    assert "Special" in line.text, "for a report"


def test_another_trainer_is_told_again(told):
    plugin = FP4Precision("nvfp4")
    for _ in range(2):
        train(Model(special()), plugin)
        assert len(lines(told)) == 1


def test_shares_are_near_those_of_all_that_was_computed():
    tokens = torch.randn(2, 8, 16)
    for rest in ([plain(), Attention()], [special()], [Wide()], [Experts(), plain()], [Recurrent()], [Multihead()]):
        model = convert(Model(*rest), "nvfp4")
        keys = LayerKeys(model, seed=0)
        keys.set_step(0) if hasattr(keys, "set_step") else None
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                with GemmCounter(model) as counter:
                    model.training_step(tokens).backward()
                found = graph_coverage(model.training_step(tokens), model)
            assert found.unit == "FLOPs"
            assert found.share == pytest.approx(counter.coverage().share, abs=0.06), rest


def test_manual_optimization_counts_all_backward_passes_of_a_step(told):
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch):
            for loss in (self.first(batch).mean(), self(batch).mean()):
                self.manual_backward(loss)
            self.optimizers().step()

    line = train(Manual(plain(), Odd(16, 16, 33, padding=16)))
    (text,) = lines(told)
    assert text.startswith(line.text)
    assert line.coverage.quantized == 2 * 16 * 16 * (16 + 16 + 2 * 64), "FLOPs of 16 tokens"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.13's Dynamo
def test_what_is_compiled_is_counted_by_weights(told):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = Special(16, 64), Special(64, 16)

        def forward(self, x):
            return self.down(self.up(x).relu())

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    block = Block()
    block.compile(backend=backend)
    line = train(Model(block))
    assert line.coverage.unit == "weights"
    assert line.coverage.share == 16 * 16 / (16 * 16 + 2 * 16 * 64)
    assert len(graphs) == 1, "nothing is compiled for the count"
    assert "the weights of matrix products" in lines(told)[0]


def test_a_run_is_the_same_and_nothing_is_computed_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = nn.Sequential(special(), nn.Dropout(0.5)), 0

        def forward(self, x):
            self.calls += 1
            return checkpoint(self._count, x, use_reentrant=False)

        def _count(self, x):
            self.calls += 1
            return self.inner(x)

    def run(line):
        torch.manual_seed(0)
        layer = Checkpointed()
        model = Model(layer)
        assert (train(model, counted_by(line)).coverage is None) == isinstance(line, Silent)
        return model.state_dict(), layer.calls, torch.get_rng_state()

    state, calls, random = run(CoverageLine())
    without, calls_without, random_without = run(Silent())
    assert calls == calls_without == 3 * 3, "of a step: the layer, its forward pass, and that again"
    assert torch.equal(random, random_without)
    assert all(torch.equal(state[name], without[name]) for name in state)


def test_training_goes_on_where_autograd_tells_other_things(told):
    model = Model(special())
    train(model, counted_by(Failing()))
    assert model.trainer.global_step == 3
    assert lines(told) == []


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_not_the_first(told):
    class Late(Model):
        def training_step(self, batch):
            self.steps = getattr(self, "steps", 0) + 1
            return None if self.steps == 1 else super().training_step(batch)

    train(Late(special()))
    assert len(lines(told)) == 1


def test_a_boring_model_is_told_nothing(told):
    train(BoringModel(), None, limit_val_batches=0)
    assert lines(told) == []


def test_under_every_strategy_one_process_says_it(tmp_path):
    results = launch("tests.precision.ranks_coverage_line", RANKS, tmp_path)
    for name in ("ddp", "fsdp1", "fsdp2"):
        first, second = (result[name] for result in results)
        assert first["share"] == second["share"] == pytest.approx(0.1), name
        assert len(first["said"]) == 1, name
        assert second["said"] == [], name
        if name != "fsdp1":  # whose weights are parts of flat buffers
            assert "Special" in first["said"][0], (name, first["said"])


def test_a_frozen_backbone_is_counted_by_weights():
    """Its products are not in the graph of a loss."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model, "int4", skip=["2"])
    model[:2].requires_grad_(False)
    coverage = graph_coverage(model(torch.randn(4, 16)).sum(), model)
    assert coverage.unit != "FLOPs" and coverage.share == 2 / 3
