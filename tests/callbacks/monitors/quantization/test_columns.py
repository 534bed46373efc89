"""Columns that the quantization monitor logs."""

import pytest
import torch

from lightning_lowbit import IntegerPrecision, LowBitPrecision
from lightning_lowbit.callbacks.monitors import quantization
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.metrics import flip_rate, is_ternary, ternary_shares, threshold_distance
from lightning_lowbit.quant import quantize
from tests.callbacks.monitors.quantization.runs import LAYERS, TERNARY, WEIGHTS, AtStep, Two, rows
from tests.callbacks.monitors.quantization.runs import ternary_trainer as trainer
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


def columns(before, after, cast):
    """What is logged of one weight."""
    before, after = (weight.to(torch.bfloat16) for weight in (before, after))
    old, new = quantize(before, cast), quantize(after, cast)
    shares = zip(("minus", "zeros", "plus"), ternary_shares(new).tolist(), strict=True) if is_ternary(cast) else ()
    distance = threshold_distance(after, cast)
    return {**dict(shares), "flips": flip_rate(old, new).item(), "distance": distance.item()}


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
    "plugin",
    [
        TERNARY,
        lambda: LowBitPrecision("int4", compute_dtype="bf16"),
        lambda: IntegerPrecision(4, 8, group="row", symmetric=False, compute_dtype="bf16"),
    ],
    ids=["ternary", "int4", "zero points"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_columns_are_those_of_the_step(plugin, accumulate):
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
            found = columns(before[layer], after[layer], run.precision_plugin.casts.fprop_w)
            expected |= {f"{name}/fprop_w/{layer}": value for name, value in found.items()}
            flips.append(found["flips"])
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
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
            assert flips == pytest.approx(columns(before[layer], after[layer], TERNARY().casts.fprop_w)["flips"])
            assert flips > 0, "the run does not test what it should"


def test_a_batch_without_a_step():
    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            if batch_idx < 2:
                super().training_step(batch, batch_idx)

    run = trainer(QuantizationMonitor(), max_steps=-1, max_epochs=1, limit_train_batches=4)
    run.fit(Skips())
    with_step, without = rows(run).values()
    assert {name.partition("/")[0] for name in with_step} == WEIGHTS
    assert {name.partition("/")[0] for name in without} == WEIGHTS - {"flips"}, (
        "those of the last step are logged again"
    )


def test_nothing_is_computed_in_other_steps():
    steps = []

    class Noted(QuantizationMonitor):
        def _latent(self, run):
            steps.append(run.global_step)
            return super()._latent(run)

    trainer(Noted(), accumulate_grad_batches=2, log_every_n_steps=3, max_steps=7).fit(Two())
    assert steps == [2, 3, 5, 6], "before and after the third and the sixth step"


@pytest.mark.slow
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


@pytest.mark.fast("phase")
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
    run = trainer(monitor := QuantizationMonitor(weights=True))
    with pytest.warns(UserWarning, match=r"Not measured: QuantizationMonitor\(weights=True\) needs weights that are"):
        run.fit(Two())
    assert rows(run) == {} and set(monitor.report_data(run)["quantized_operands"]["layers"]) == set(LAYERS)
