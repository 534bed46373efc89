"""A run is the same with a monitor and without: its numbers, its random numbers, and how often the host waits."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowbit import (
    FP4Precision,
    GradientNoiseMonitor,
    GradientNormMonitor,
    LossScaleMonitor,
    LowBitPrecision,
    OutlierMonitor,
    QuantizationMonitor,
)
from tests.callbacks.monitors.device_reads import HOOKS, Operations, counted
from tests.callbacks.monitors.gradient_noise import runs as noise
from tests.callbacks.monitors.gradient_norm.runs import RULES, Planned
from tests.callbacks.monitors.loss_scale.runs import Scripted, conservative, lowbit
from tests.callbacks.monitors.outliers.runs import Model
from tests.callbacks.monitors.quantization.runs import Two
from tests.lightning_imports import Callback, quiet_trainer
from tests.tables import each

# By monitor: its arguments, a model, and arguments of the Trainer.
RUNS = {
    GradientNormMonitor: (
        {"layers": ["layer"], "every_n_steps": 1, "limit": None},
        lambda: Planned({3: 9.0}, RULES["Stable-SPAM"]),
        lambda: {"gradient_clip_val": 0.1},
    ),
    OutlierMonitor: ({}, lambda: Model({3: 9.0}), lambda: {"plugins": [FP4Precision(compute_dtype="fp32")]}),
    LossScaleMonitor: ({}, lambda: Scripted({1, 5}), lambda: {"plugins": [lowbit(conservative())]}),
    QuantizationMonitor: ({}, Two, lambda: {"plugins": [LowBitPrecision("nvfp4")]}),
}


class Stateful(noise.Model):
    """Its loss depends on all random numbers and on what normalization remembers."""

    def __init__(self):
        super().__init__(0.05, 4)
        up, down = self.net[0], self.net[2]
        self.net = nn.Sequential(up, nn.BatchNorm1d(64), nn.Dropout(0.2), nn.GELU(), down)

    def training_step(self, batch, batch_idx):
        batch *= 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(())
        loss = self.loss(batch)
        loss.register_hook(lambda gradient: gradient + 0 * torch.rand(()))  # a backward pass draws, too
        return loss

    def on_before_backward(self, loss):
        """Between the step and the measurement."""
        self.between = float(torch.rand(())) + random.random() + np.random.rand()


RUNS_OF_OTHERS = [
    *(
        (
            GradientNoiseMonitor,
            {"every_n_steps": 2, "kind": kind},
            Stateful,
            lambda casts=casts, dtype=dtype: {"plugins": [LowBitPrecision(casts, compute_dtype=dtype, seed=2)]},
        )
        for kind in ("draws", "layers")
        for casts, dtype in (("nvfp4", "bf16"), ("nvfp4", "fp16"), ("fp8-delayed", "fp32"), (noise.NEAREST, "bf16"))
    ),
    (GradientNormMonitor, {}, Planned, dict),
    *(
        (QuantizationMonitor, {}, Two, lambda casts=casts: {"plugins": [LowBitPrecision(casts)]})
        for casts in ("fp8-delayed", "mxfp4-rht", "ternary")
    ),
]


class Witness(Callback):
    """What a run has after each batch: its model, gradients, random numbers and plugin."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        gradients = {name: p.grad.nan_to_num() for name, p in pl_module.named_parameters() if p.grad is not None}
        model = {name: tensor.detach().clone() for name, tensor in pl_module.state_dict().items()}
        numbers = [random.getstate(), str(np.random.get_state()), torch.get_rng_state()]
        plugin = trainer.precision_plugin
        state = [plugin.step, plugin.micro_batch] if isinstance(plugin, LowBitPrecision) else []
        self.seen.append([model, gradients, numbers, state])


def trainer(*callbacks, **kwargs):
    return quiet_trainer(callbacks=[*callbacks], limit_val_batches=0, **kwargs)


@each("monitor, arguments, make, options", [(kind, *run) for kind, run in RUNS.items()])
def test_watching_changes_nothing(monitor, arguments, make, options):
    compare(monitor, arguments, make, options)


@each("monitor, arguments, make, options", RUNS_OF_OTHERS, fast=3)
def test_other_options_change_nothing(monitor, arguments, make, options):
    compare(monitor, arguments, make, options)


def compare(monitor, arguments, make, options):
    """A run with a monitor and one without."""
    runs = []
    for monitors in ([], [monitor(**arguments)]):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        witness = Witness()
        run = trainer(*monitors, witness, max_steps=4, log_every_n_steps=2, accumulate_grad_batches=2, **options())
        run.fit(model := make())
        runs.append(witness.seen)
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"
    assert len(runs[0]) == 8
    noise.assert_equal(runs[1], runs[0])


@each("monitor, arguments, make, options", [(kind, *run) for kind, run in RUNS.items()], fast=2)
def test_nothing_is_read_but_the_numbers_of_the_last_logged_step(monkeypatch, monitor, arguments, make, options):
    trainer(monitor(**arguments), log_every_n_steps=1, max_steps=1, **options()).fit(make())  # tables are made once
    Watched, reads = counted(monitor, monkeypatch)
    trainer(Watched(**arguments), log_every_n_steps=4, max_steps=10, **options()).fit(make())
    assert all(reads.pop((hook, -1)) == 10 for hook in HOOKS), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_what_nobody_logs_is_read_at_last():
    monitor, lengths = GradientNormMonitor(every_n_steps=1), []

    class Look(Callback):
        def on_train_batch_end(self, *_):
            lengths.append(len(monitor._unread))

    trainer(monitor, Look(), log_every_n_steps=0, max_steps=120).fit(Planned())
    assert max(lengths) == 100, "steps pile up"


def test_hooks_go_after_an_error():
    class Breaks(Model):
        def on_before_zero_grad(self, *_):
            hooked.append(sum(len(module._forward_pre_hooks) for module in self.modules()))
            raise RuntimeError("broken")

    hooked, model = [], Breaks()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(OutlierMonitor(), log_every_n_steps=1, max_steps=2).fit(model)
    assert hooked == [4]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_read_nothing():
    class Watched(Model):
        def forward(self, x):
            with Operations() as operations:
                y = super().forward(x)
            calls.extend(map(str, operations.seen))
            return y

    calls = []
    trainer(OutlierMonitor(), log_every_n_steps=2, max_steps=2).fit(Watched())
    assert any("amax" in call for call in calls), "hooks were not watched"
    assert not [call for call in calls if "_local_scalar_dense" in call or "nonzero" in call]
