"""A run is the same with a monitor and without: its numbers, its random numbers, and how often the host waits."""

import pytest
import torch

from lightning_lowbit import (
    FP4Precision,
    GradientNormMonitor,
    LossScaleMonitor,
    LowBitPrecision,
    OutlierMonitor,
    QuantizationMonitor,
)
from tests.callbacks.monitors.device_reads import HOOKS, Operations, counted
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
RUNS_OF_OTHERS = [
    (GradientNormMonitor, {}, Planned, dict),
    *(
        (QuantizationMonitor, {}, Two, lambda casts=casts: {"plugins": [LowBitPrecision(casts)]})
        for casts in ("fp8-delayed", "mxfp4-rht", "ternary")
    ),
]


class Witness(Callback):
    """Weights, gradients and random numbers after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        gradients = [p.grad.nan_to_num() for p in pl_module.parameters() if p.grad is not None]
        weights = [p.detach().clone() for p in pl_module.parameters()]
        self.seen.append([*weights, *gradients, torch.random.get_rng_state()])


def trainer(*callbacks, **kwargs):
    return quiet_trainer(callbacks=[*callbacks], limit_val_batches=0, **kwargs)


@each("monitor, arguments, make, options", [*((kind, *run) for kind, run in RUNS.items()), *RUNS_OF_OTHERS])
def test_watching_changes_nothing(monitor, arguments, make, options):
    runs = []
    for monitors in ([], [monitor(**arguments)]):
        torch.manual_seed(1)
        witness = Witness()
        run = trainer(*monitors, witness, max_steps=4, log_every_n_steps=2, accumulate_grad_batches=2, **options())
        run.fit(model := make())
        runs.append(witness.seen)
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"
    assert len(runs[0]) == 8
    for batch, (one, other) in enumerate(zip(*runs, strict=True)):
        assert len(one) == len(other), "a gradient is left, or gone"
        assert all(map(torch.equal, one, other)), f"batch {batch}"


@each("monitor, arguments, make, options", [(kind, *run) for kind, run in RUNS.items()])
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
