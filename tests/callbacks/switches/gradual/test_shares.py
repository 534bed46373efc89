"""λ of each step of a gradual switch, its schedules, and several switches."""

from itertools import product

import pytest
import torch

from lightning_lowbit import FP4Precision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.switches.precision import SCHEDULES
from lightning_lowbit.precision.layers import RunLayers
from tests.callbacks.switches.runs import RESUMES, fit
from tests.precision.regression_model import On, Regression, two_casts
from tests.tables import each

pytestmark = RESUMES


WHEN = [{"at": 0.25, "over": 0.5}, {"step": 2, "steps": 4}, {"at": 0.25, "steps": 4}]


@each("accumulate, when", product([1, 3], WHEN), fast=2)
def test_rises_step_by_step(accumulate, when):
    seen = fit(PrecisionSwitch("fqt", **when), accumulate_grad_batches=accumulate)
    assert seen.blends == [1, 1, 0, 0.25, 0.5, 0.75, 1, 1]


def test_lambda_is_set_once_a_step(monkeypatch):
    values, original = [], RunLayers.set_blend
    monkeypatch.setattr(RunLayers, "set_blend", lambda self, value: (values.append(value), original(self, value)))
    fit(PrecisionSwitch("fqt", step=2, steps=4), accumulate_grad_batches=3)
    assert values == [1, 0, 0.25, 0.5, 0.75, 1], "once by the plugin, then at each step of the switch"


@each("phase", ["qaf", "hp-forward"])
def test_to_another_phase(phase):
    seen = fit(PrecisionSwitch(phase, step=2, steps=2))
    assert seen.phases == ["fqt"] * 2 + [phase] * 6
    assert seen.blends == [1, 1, 0, 0.5, 1, 1, 1, 1]


@each("over, expected", [(0.01, [0, 1, 1, 1]), (0.99, [0, 0.125, 0.25, 0.375])])
def test_takes_one_step_at_least_and_the_run_at_most(over, expected):
    assert fit(PrecisionSwitch("fqt", at=0, over=over)).blends[:4] == expected


def test_what_is_trained_with_is_blended():
    """At λ = 0 the loss is that of high precision, at 1 that of the phase, and in between neither."""

    class Losses(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, 0) * 0  # the weights stay

    def losses(*switches):
        model = Losses()
        fit(*switches, model=model, plugin=FP4Precision(compute_dtype="fp32", exact=True), max_steps=3)
        return torch.stack(model.losses)

    hp, quantized = losses(PrecisionSwitch("bf16", step=0)), losses()
    blended = losses(PrecisionSwitch("fqt", step=0, steps=2))
    assert blended[0] == hp[0] != quantized[0]
    assert blended[1] != hp[1] != quantized[1] != blended[1]
    assert blended[2] == quantized[2] != hp[2]


@each(
    "schedule, expected",
    [
        ("linear", [0, 0.25, 0.5, 0.75, 1]),
        ("cosine", [0, 0.1464466, 0.5, 0.8535534, 1]),
        ("sigmoid", [0, 0.0701037, 0.5, 0.9298963, 1]),  # (1 / (1 + e^2.5) - 1 / (1 + e^5)) / (1 - 2 / (1 + e^5))
        ("delayed", [0, 0, 0, 0.5, 1]),
    ],
)
def test_schedules_rise_from_0_to_1(schedule, expected):
    seen = fit(PrecisionSwitch("fqt", step=1, steps=4, schedule=schedule))
    assert seen.blends == pytest.approx([1, *expected, 1, 1], abs=1e-6)
    assert (seen.blends[1], seen.blends[5]) == (0, 1), "not exactly 0 and 1 at its ends"
    values = [SCHEDULES[schedule](i / 1000) for i in range(1001)]
    assert values == sorted(values), "it falls"


@each("reverse", [False, True])
def test_the_last_one_due_holds_whatever_their_order(reverse):
    switches = [
        PrecisionSwitch("fqt", step=0, steps=4),
        QAFSwitch(step=2),
        PrecisionSwitch("hp-forward", step=4, steps=8),
        PrecisionSwitch("fqt", step=6, steps=2),
    ]
    seen = fit(*(reversed(switches) if reverse else switches))
    assert seen.phases == ["fqt", "fqt", "qaf", "qaf", "hp-forward", "hp-forward", "fqt", "fqt"]
    assert seen.blends == [0, 0.25, 1, 1, 0, 0.125, 0, 0.5]


def test_of_two_at_one_step_the_last_in_the_list_holds():
    def gradual():
        return PrecisionSwitch("fqt", step=0, steps=4)

    assert fit(gradual(), QAFSwitch(step=0)).blends[:2] == [1, 1]
    assert fit(QAFSwitch(step=0), gradual()).blends[:2] == [0, 0.25]


def test_changes_by_hand():
    def by_hand(trainer, *_):
        if trainer.global_step == 2:
            trainer.precision_plugin.set_phase("qaf")
        if trainer.global_step in (2, 6):
            trainer.precision_plugin.set_blend(0.875)

    seen = fit(PrecisionSwitch("fqt", step=0, steps=4), On(on_train_batch_start=by_hand))
    assert seen.phases == ["fqt"] * 2 + ["qaf"] * 6
    assert seen.blends == [0, 0.25, 0.875, 0.75, 1, 1, 0.875, 0.875]


@pytest.mark.filterwarnings("ignore:The run is at λ")
def test_a_sudden_switch_goes_all_the_way():
    plugin = two_casts()
    plugin.set_blend(0.5)
    assert fit(PrecisionSwitch("fqt", step=4), plugin=plugin).blends == [0.5] * 4 + [1] * 4
