"""Resets in real runs, resumed runs, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitAdamW, LowBitPrecision, TernaryPrecision, quantize
from lightning_lowbit.callbacks import osci_reset
from lightning_lowbit.callbacks.osci_reset import OsciReset
from tests.callbacks.osci_reset.weights import WEIGHT, Row, Watch, fit, logged, trainer
from tests.lightning_imports import BoringModel, CSVLogger, MisconfigurationException, RandomDataset
from tests.precision.regression_model import On
from tests.tables import each


class Small(BoringModel):
    """Steps that are small beside the bins, on data that differ from step to step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.layer(x).relu())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64), batch_size=2)


def slow(path, cast, threshold):
    """Whether each element oscillates, by a loop over the steps of a window."""
    quantized = [quantize(weight.bfloat16(), cast) for weight in path]
    codes = [q.codes.flatten().tolist() for q in quantized]
    values = [q.dequantize().flatten().tolist() for q in quantized]
    weights = [weight.flatten().tolist() for weight in path]
    for i in range(path[0].numel()):
        steps = range(1, len(path))
        moved = sum(abs(weights[t][i] - weights[t - 1][i]) for t in steps)
        jumped = sum(abs(values[t][i] - values[t - 1][i]) for t in steps if codes[t][i] != codes[t - 1][i])
        yield moved > 0 and jumped >= threshold * moved


@each("plugin", [TernaryPrecision, partial(LowBitPrecision, "nvfp4")], fast=1)
def test_a_real_run(plugin):
    before, after, model = Watch(), Watch(), Small()
    first = model.layer.weight.detach().clone()
    plugin = plugin(compute_dtype="bf16")
    trainer(before, OsciReset(window=6, every=8), after, plugin=plugin, max_steps=16).fit(model)
    cast = model.layer.casts.fprop_w
    number = 0
    for begin, end in ((0, 6), (8, 14)):
        path = [after.weights[begin - 1] if begin else first, *before.weights[begin:end]]
        expected = torch.tensor(list(slow(path, cast, 8.0))).view_as(first)
        number += expected.sum().item()
        centers = quantize(path[-1].bfloat16(), cast).dequantize()
        torch.testing.assert_close(after.weights[end - 1], torch.where(expected, centers, path[-1]), rtol=0, atol=0)
    assert number > 0, "the run does not test what it should"
    for step in {*range(16)} - {5, 13}:
        assert torch.equal(before.weights[step], after.weights[step]), f"reset in step {step}"


def test_the_moments_stay():
    def note(trainer, pl_module, *_):
        state = trainer.optimizers[0].state[pl_module.layer.weight]
        moments.append(torch.stack([state["exp_avg"], state["exp_avg_sq"]]).clone())

    moments, look = [], On(on_train_batch_end=note)
    run = trainer(look, OsciReset(window=2, every=2), look, plugin=TernaryPrecision(quantize_output=True), max_steps=4)
    run.fit(Small())
    assert len(moments) == 8 and all(map(torch.equal, moments[::2], moments[1::2]))
    assert run.callback_metrics["reset/fprop_w/layer"] > 0, "the run does not test what it should"


@each("at", [3, 4, 5, 6, 9, 10], fast=2)
def test_a_resumed_run_goes_on_with_its_window(at):
    """Windows are open from 0 to 5 and from 10 to 15; checkpoints lie within, at the ends and in between.

    Were paths of the first four steps lost, the fifth alone would not reach the threshold, or too easily.
    """

    def keep(trainer, *_):
        if trainer.global_step == at:
            trainer.save_checkpoint("x.ckpt")

    def run(*callbacks, **kwargs):
        options = {"max_steps": 16, "limit_train_batches": 1, "logger": CSVLogger("logs")}
        one, model = trainer(OsciReset(window=5, every=10, threshold=12), *callbacks, **options), Row()
        one.fit(model, **kwargs)
        return model.layer.weight.detach(), logged(one)

    whole, rows = run(On(on_train_batch_end=keep))
    resumed, more = run(ckpt_path="x.ckpt", weights_only=True)
    assert list(rows) == [4, 14], "the run does not test what it should"
    assert rows[4] == {"reset/fprop_w/layer": 2 / 8}
    assert more == {step: row for step, row in rows.items() if step >= at}
    assert torch.equal(whole, resumed)


def test_a_window_is_part_of_the_checkpoint_while_it_is_open():
    for steps, size in ((3, 2 * WEIGHT[0].numel()), (5, 0)):
        run = trainer(OsciReset(window=4, every=10), max_steps=steps)
        run.fit(Row())
        run.save_checkpoint("x.ckpt")
        (state,) = torch.load("x.ckpt", weights_only=True)["callbacks"].values()
        assert sum(tensor.numel() for paths in state["paths"].values() for tensor in paths.values()) == size
        loaded = OsciReset(window=4, every=10)
        loaded.load_state_dict(state)
        assert loaded.state_dict() == state, "what is loaded and saved again before training starts is lost"


def test_nothing_to_act_on():
    """Casts that round no weight to nearest, and a weight that is computed."""
    computed, stochastic = Row(), {"preset": "int4", "fprop_w": {"rounding": "stochastic"}}
    prune.identity(computed.layer, "weight")
    told = "OsciReset needs parameters .* and of 1 converted layers none has one"
    for model, casts in ((Row(), "bf16"), (Row(), "ufp4"), (Row(), stochastic), (computed, "int4")):
        with pytest.raises(MisconfigurationException, match=told):
            fit(OsciReset(), model=model, plugin=LowBitPrecision(casts))


def test_sharded_weights_are_refused(monkeypatch):
    def refuse(callback, run, module):
        raise MisconfigurationException("sharded")

    monkeypatch.setattr(osci_reset, "whole_layers", refuse)
    with pytest.raises(MisconfigurationException, match="sharded"):
        fit(OsciReset())


def test_weights_that_an_optimizer_has_copies_of_are_refused():
    class Masters(Small):
        def configure_optimizers(self):
            return LowBitAdamW(self.to(torch.bfloat16).parameters(), master_weights="fp16")

    with pytest.raises(MisconfigurationException, match="its own copies: .* Leave out master_weights or the callback"):
        fit(OsciReset(), model=Masters(), plugin=TernaryPrecision(quantize_output=True))


def test_a_window_of_another_model_is_refused():
    paths = {"layer": {"latent": torch.ones(3, 4), "quantized": torch.ones(3, 4)}}
    callback = OsciReset(window=6, every=8)
    load = On(on_train_start=lambda *_: callback.load_state_dict({"step": 1, "end": 9, "paths": paths}))
    with pytest.raises(ValueError, match=r"OsciReset's window.*another model.*layer.*\(3, 4\).*\(16, 32\)"):
        trainer(load, callback, plugin=TernaryPrecision(), max_steps=2).fit(Small())
