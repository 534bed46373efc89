"""Switching phases: when, in which order, under compilation, and what is refused."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbit import FP4Precision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.nn import PRESETS
from tests.callbacks.switches import runs
from tests.curves import csv_curves
from tests.lightning_imports import BoringModel, CSVLogger, MisconfigurationException, pytorch, quiet_trainer
from tests.precision.regression_model import On, Regression
from tests.tables import each

Accumulation = pytorch.callbacks.GradientAccumulationScheduler
EPOCHS = {"max_steps": -1, "limit_train_batches": 4}


class Streamed(Regression):
    """Its data have no length."""

    def train_dataloader(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(4))

        return DataLoader(Stream())


def fit(*callbacks, **kwargs):
    return runs.fit(*callbacks, **{"max_steps": 6, **kwargs}).phases


@each(
    "callbacks, kwargs, full, qaf",
    [
        ([QAFSwitch(at=2 / 3)], {"accumulate_grad_batches": 3}, 4, 2),
        ([QAFSwitch(step=4)], {"accumulate_grad_batches": 3}, 4, 2),
        ([QAFSwitch(at=0.0)], {}, 0, 6),
        ([QAFSwitch(at=1.0)], {}, 6, 0),
        ([QAFSwitch(at=0.5)], {**EPOCHS, "max_epochs": 2}, 4, 4),
        ([QAFSwitch(at=2 / 3), Accumulation({0: 4, 1: 1})], {**EPOCHS, "max_epochs": 3}, 6, 3),
        ([QAFSwitch(at=2 / 3), Accumulation({0: 1, 1: 4})], {**EPOCHS, "max_epochs": 3}, 4, 2),
    ],
    fast=3,
)
def test_switches_all_layers_at_a_step(callbacks, kwargs, full, qaf):
    assert fit(*callbacks, **kwargs) == ["fqt"] * full + ["qaf"] * qaf


@each("switch, line", [
    (lambda: QAFSwitch(step=4), "QAFSwitch(step=4) has not acted: training ended at step 3 and it is due at step 4."),
    (lambda: PrecisionSwitch("bf16", tokens=10**9), "tokens=1000000000) has not acted: training ended at step 3."),
    (lambda: QAFSwitch(step=2), None),
])  # fmt: skip
def test_a_run_that_ends_before_the_switch_says_so(switch, line, told):
    told.clear()
    fit(switch(), On(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == 3)))
    assert (line or "") in told.text and ("has not acted" in told.text) == (line is not None), told.text


def test_a_later_change_by_hand_stands():
    by_hand = On(on_train_batch_start=lambda run, *_: run.global_step == 4 and run.precision_plugin.set_phase("bf16"))
    assert fit(QAFSwitch(step=2), by_hand) == ["fqt", "fqt", "qaf", "qaf", "bf16", "bf16"]


def test_overrides_survive_a_switch_and_a_switch_back():
    plugin, model = FP4Precision(overrides={"head": {"fprop_w": {"element": "e1m2"}}}), Regression()
    fit(QAFSwitch(step=2), PrecisionSwitch("fqt", step=4), plugin=plugin, model=model)
    assert model.first.casts == PRESETS["nvfp4"]()
    assert model.head.casts.fprop_w.element == "e1m2"
    assert model.head.casts.fprop_x is None


class Twice(Regression):
    """Two optimizer steps in a batch, which loggers count as one."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


@each("kind, step", [(Regression, 4), (Twice, 2)])
def test_the_phase_is_logged_at_the_step_of_other_metrics(kind, step):
    fit(QAFSwitch(step=4), logger=CSVLogger("logs"), log_every_n_steps=1, model=(model := kind()))
    assert csv_curves(model.trainer, "phase".__eq__) == {step: {"phase": 1.0}}


def test_a_switch_after_the_end_of_the_run_says_that_it_will_not_act(told):
    fit(QAFSwitch(step=2), QAFSwitch(at=1.0), PrecisionSwitch("bf16", step=9), max_steps=4)
    assert [line.split(" will")[0] for line in told.messages if "is due at" in line] == [
        "QAFSwitch(at=1) is due at step 4 and",
        "PrecisionSwitch(step=9) is due at step 9 and",
    ]


def test_needs_the_plugin():
    trainer = quiet_trainer(max_steps=1, callbacks=[QAFSwitch(at=0.5)])
    with pytest.raises(MisconfigurationException, match="QAFSwitch needs a LowBitPrecision plugin"):
        trainer.fit(BoringModel())


@pytest.mark.filterwarnings("ignore:SGD steps itself")  # the plugin's warning of the same steps
def test_steps_that_nothing_counts_get_a_warning():
    class Raw(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers(use_pl_optimizer=False).step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2)

    switches = [QAFSwitch(step=4), PrecisionSwitch("bf16", step=5)]
    with pytest.warns(UserWarning, match="QAFSwitch goes by trainer.global_step, which is still 0") as warned:
        runs.trainer(runs.two_casts(), callbacks=switches, max_steps=-1, max_epochs=1).fit(Raw())
    assert sum("goes by trainer.global_step" in str(warning.message) for warning in warned) == 1


@each("model, epochs", [(Regression, -1), (Streamed, 2)])
@each("name, arguments", [("at", {"at": 0.9}), ("over", {"step": 1, "over": 0.5})])
def test_fraction_of_a_run_whose_end_is_not_known(model, epochs, name, arguments):
    message = (
        rf"PrecisionSwitch\({name}=0..\) is a fraction of all optimizer steps, and the end of this run is not known"
    )
    message += ": set max_steps, or max_epochs for data with a length, or give steps? "
    with pytest.raises(MisconfigurationException, match=message):
        fit(
            PrecisionSwitch("qaf", **arguments), model=model(), max_steps=-1, max_epochs=epochs, limit_train_batches=1.0
        )


def test_a_step_of_a_run_whose_end_is_not_known(told):
    seen = fit(QAFSwitch(step=6), model=Streamed(), max_steps=-1, max_epochs=2, limit_train_batches=1.0)
    assert seen == ["fqt"] * 6 + ["qaf"] * 2
    assert "will not act" not in told.text
