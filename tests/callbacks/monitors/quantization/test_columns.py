"""Columns that the quantization monitor logs."""

import pytest
import torch

from lightning_lowbit import IntegerPrecision, LowBitPrecision
from lightning_lowbit.callbacks.monitors import quantization
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from tests.callbacks.monitors.quantization.runs import ALL, LAYERS, SHARES, TERNARY, AtStep, Two, rows, trainer
from tests.lightning_imports import Callback


class Manual(Two):
    """Two optimizers, each of which steps in every batch; the first one twice."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in (*self.optimizers(), self.optimizers()[0]):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.layer[i].parameters(), lr=self.lr) for i in (0, 2)]


def codes(weight, kind):
    """Levels, and the weight in units of its scale before it is rounded. A group of 128 is a row here."""
    w = weight.detach().to(torch.bfloat16).float()
    if kind == "ternary":
        w = w * torch.ones(()).div(w.abs().mean())
        return w.round().clamp(-1, 1), w
    if kind == "int4":
        amax = w.abs().amax(1, keepdim=True)
        w = w * torch.full_like(amax, 7).div(amax)
        return w.round(), w
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)  # on either side of 0
    steps = torch.full_like(low, 15).div(high - low)
    zero = (-low * steps).round()
    return torch.minimum(torch.maximum((w * steps).round(), -zero), 15 - zero), w * steps


def columns(before, after, kind):
    """What is logged of one weight; distances with zero points are left to the tests of the metric."""
    (old, _), (new, w) = codes(before, kind), codes(after, kind)
    found = {"flips": (old != new).float().mean().item()}
    if kind == "ternary":
        shares = {"minus": new == -1, "zeros": new == 0, "plus": new == 1}
        found |= {name: where.float().mean().item() for name, where in shares.items()}
        found["distance"] = (w.abs() - 0.5).abs().mean().item()
    elif kind == "int4":
        thresholds = torch.arange(-6.5, 7)
        found["distance"] = (w[..., None] - thresholds).abs().amin(-1).mean().item()
    return found


class Witness(Callback):
    """Weights before and after every batch."""

    def __init__(self):
        self.weights = []

    @staticmethod
    def _copies(module):
        return {name: module.get_submodule(name).weight.detach().clone() for name in LAYERS}

    def on_train_batch_start(self, trainer, pl_module, *_):
        self._before = self._copies(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append((self._before, self._copies(pl_module)))


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        ("ternary", TERNARY),
        ("int4", lambda: LowBitPrecision("int4", compute_dtype="bf16")),
        ("zero points", lambda: IntegerPrecision(4, 8, group="row", symmetric=False, compute_dtype="bf16")),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_columns_are_those_of_the_step(kind, plugin, accumulate):
    witness = Witness()
    run = trainer(witness, QuantizationMonitor(), plugin=plugin(), accumulate_grad_batches=accumulate, max_steps=5)
    run.fit(Two())
    logged = rows(run)
    assert list(logged) == [1, 3], "Lightning numbers the first step 0, and every second one is logged"
    flips = []
    for step, row in logged.items():
        before, after = witness.weights[(step + 1) * accumulate - 1]
        expected = {}
        for layer in LAYERS:
            found = columns(before[layer], after[layer], kind)
            expected |= {f"{name}/fprop_w/{layer}": value for name, value in found.items()}
            flips.append(found["flips"])
        names = ALL if kind == "ternary" else ALL - SHARES
        assert set(row) == {f"{name}/fprop_w/{layer}" for name in names for layer in LAYERS}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    assert max(flips) > 0, "the run does not test what it should"


def test_several_optimizers():
    """Flips of a batch are those from before its first step to after its last one."""
    witness = Witness()
    run = trainer(witness, QuantizationMonitor(), max_steps=12)
    run.fit(Manual())
    logged = rows(run)
    assert list(logged) == [1, 3], "three optimizer steps a batch"
    for step, row in logged.items():
        before, after = witness.weights[step]
        for layer in LAYERS:
            flips = row[f"flips/fprop_w/{layer}"]
            assert flips == pytest.approx(columns(before[layer], after[layer], "ternary")["flips"])
            assert flips > 0, "the run does not test what it should"


def test_a_batch_without_a_step():
    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            if batch_idx < 2:
                super().training_step(batch, batch_idx)

    run = trainer(QuantizationMonitor(), max_steps=-1, max_epochs=1, limit_train_batches=4)
    run.fit(Skips())
    with_step, without = rows(run).values()
    assert {name.partition("/")[0] for name in with_step} == ALL
    assert {name.partition("/")[0] for name in without} == ALL - {"flips"}, "those of the last step are logged again"


def test_nothing_is_computed_in_other_steps():
    steps = []

    class Noted(QuantizationMonitor):
        def _latent(self, run):
            steps.append(run.global_step)
            return super()._latent(run)

    trainer(Noted(), accumulate_grad_batches=2, log_every_n_steps=3, max_steps=7).fit(Two())
    assert steps == [2, 3, 5, 6], "before and after the third and the sixth step"


def test_codes_are_kept_for_a_step_only():
    """Also where the phase has changed by its end."""
    kept = []

    class Look(Callback):
        def on_train_batch_start(self, *_):
            kept.append(len(monitor._before))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.precision_plugin.set_phase("bf16" if batch_idx == 2 else "fqt")

    monitor = QuantizationMonitor()
    trainer(Look(), monitor, log_every_n_steps=1).fit(Two())
    assert kept == [0] * 6


@pytest.mark.parametrize("off", ["phase", "λ"])
def test_nothing_is_logged_while_weights_are_not_quantized(off):
    def switch(on):
        if off == "phase":
            return lambda run: run.precision_plugin.set_phase("fqt" if on else "bf16")
        return lambda run: run.precision_plugin.set_blend(0.5 if on else 0.0)

    run = trainer(AtStep(2, switch(False)), AtStep(4, switch(True)), QuantizationMonitor(), log_every_n_steps=1)
    run.fit(Two())
    assert list(rows(run)) == [0, 1, 4, 5], "what Lightning logged before it logs again"


def test_flat_weights_are_left_out(monkeypatch):
    """Those of FSDP1, of which no stretch is a matrix; operands are there as they always are."""
    monkeypatch.setattr(quantization, "has_flat_weights", lambda run: True)
    run = trainer(monitor := QuantizationMonitor())
    run.fit(Two())
    assert rows(run) == {}
    data = monitor.report_data(run)
    assert data["quantized_weights"]["layers"] == {}
    assert set(data["quantized_operands"]["layers"]) == set(LAYERS)
    run = trainer(monitor := QuantizationMonitor(weights=True))
    with pytest.warns(UserWarning, match=r"Not measured: QuantizationMonitor\(weights=True\) needs weights that are"):
        run.fit(Two())
    assert set(monitor.report_data(run)["quantized_operands"]["layers"]) == set(LAYERS)
