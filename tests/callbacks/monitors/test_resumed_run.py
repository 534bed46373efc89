"""A run that is interrupted and resumed is the uninterrupted one, and its monitor does not repeat itself."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from lightning_lowbit import GradientNoiseMonitor, GradientNormMonitor, LossScaleMonitor, OutlierMonitor
from tests.callbacks.monitors.gradient_noise import runs as noise
from tests.callbacks.monitors.gradient_norm import runs as norms
from tests.callbacks.monitors.loss_scale import runs as scales
from tests.callbacks.monitors.outliers import runs as outliers
from tests.curves import event_curves
from tests.lightning_imports import TensorBoardLogger
from tests.tables import each

SIX = dict.fromkeys(range(40), 6.0)
THIRD = {"log_every_n_steps": 3}

# Arguments of the Trainer, the monitor, the model, steps of the whole run and of its first part, what is warned of.
# Between two logged steps, with an overflow since the last.
SCALES = [
    (
        lambda *monitors, plugin=plugin, **kwargs: scales.trainer(*monitors, plugin=plugin(), **THIRD, **kwargs),
        partial(LossScaleMonitor, falls=1),
        partial(scales.Scripted, {1, 2, 4, 6}),
        (12, 5),
        "Loss scale, step 3: 1 overflows",
    )
    for plugin in scales.PLUGINS.values()
]
RUNS = [  # the first of each three is fast
    # After a spike, between two logged steps, and before another.
    (
        partial(norms.trainer, **THIRD),
        partial(GradientNormMonitor, ["layer"], 1),
        partial(norms.Constant, {12: 6.0, 16: 7.0, 17: 1.5}),
        (18, 14),
        "Gradient norm, step 13: it is 6 before",
    ),
    *SCALES[:2],
    (
        outliers.trainer,
        partial(OutlierMonitor, ["up_proj"], swiglu=False, takeoff=9.0),
        partial(outliers.Model, {**SIX, 9: 9.0, 12: 61.0, 16: 200.0}),
        (18, 14),
        "up_proj, step 13: channel 5",
    ),
    *SCALES[2:4],
    # Between a measurement and the step that logs it.
    (
        partial(noise.trainer, noise.NOISY, **THIRD),
        partial(GradientNoiseMonitor, 5, average=3, threshold=1e6, layers=[r"net\.0"]),
        partial(noise.Model, 0.1, 3),
        (9, 5),
        "the gradient, step 5",
    ),
    *SCALES[4:],
]


@each("trainer, make, model, steps, warning", RUNS, fast=3)
def test_a_resumed_run_is_the_uninterrupted_one(trainer, make, model, steps, warning):
    curves, states = [], []
    whole, half = steps
    for name, end in (("whole", whole), ("half", half), ("rest", whole)):
        monitor, is_rest = make(), name == "rest"
        torch.manual_seed(0)
        with nullcontext() if is_rest else pytest.warns(UserWarning, match=warning):
            # An epoch is a step: Lightning resumes with the next epoch.
            run = trainer(monitor, max_steps=end, logger=TensorBoardLogger(name), limit_train_batches=1)
            run.fit(model(), **({"ckpt_path": "half.ckpt", "weights_only": True} if is_rest else {}))
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(event_curves(run))
        states.append(monitor.state_dict())
    assert states[0] == states[2]
    assert torch.load("half.ckpt", weights_only=True)["callbacks"][type(monitor).__name__] == states[1]
    assert curves[0] == curves[1] | curves[2] and max(curves[0]) > half
