"""Switching phases: when, in which order, under compilation, and what is refused."""

import csv

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbit import FP4Precision, PrecisionSwitch, QAFSwitch
from lightning_lowbit.nn import PRESETS
from tests.callbacks.switches import runs
from tests.lightning_imports import (
    BoringModel,
    Callback,
    CSVLogger,
    MisconfigurationException,
    pytorch,
    quiet_trainer,
)
from tests.tables import each


class Two(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def fit(*switches, model=None, plugin=None, **kwargs):
    plugin = plugin or FP4Precision(quantize_output=True)
    return runs.fit(*switches, model=model or Two(), plugin=plugin, **{"max_steps": 6, **kwargs}).phases


@pytest.mark.parametrize("switch", [lambda: QAFSwitch(at=2 / 3), lambda: QAFSwitch(step=4)])
def test_switches_all_layers_at_an_accumulation_boundary(switch):
    assert fit(switch(), accumulate_grad_batches=3) == ["fqt"] * 4 + ["qaf"] * 2


def test_fraction_of_epochs():
    seen = fit(QAFSwitch(at=0.5), max_steps=-1, max_epochs=2, limit_train_batches=4)
    assert seen == ["fqt"] * 4 + ["qaf"] * 4


def test_a_later_change_by_hand_stands():
    class ByHand(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 4:
                trainer.precision_plugin.set_phase("bf16")

    seen = fit(QAFSwitch(step=2), ByHand())
    assert seen == ["fqt", "fqt", "qaf", "qaf", "bf16", "bf16"]


def test_a_longer_run_from_a_checkpoint_in_the_phase_says_so(tmp_path):
    def run(steps, switch, ckpt_path=None):
        trainer = quiet_trainer(
            FP4Precision(quantize_output=True),
            max_steps=steps,
            limit_train_batches=4,
            callbacks=[switch],
            limit_val_batches=0,
        )
        trainer.fit(Two(), ckpt_path=ckpt_path)
        return trainer

    run(4, QAFSwitch(at=0.5)).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="in phase 'qaf' already.*due at step 6"):
        trainer = run(8, QAFSwitch(at=0.75), tmp_path / "x.ckpt")
    assert trainer.precision_plugin.phase == "qaf"


def test_fraction_of_manual_optimization():
    class Manual(Two):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="set max_steps, or give step"):
        fit(QAFSwitch(at=0.5), model=Manual(), max_steps=-1, max_epochs=1)


@pytest.mark.parametrize(("at", "phases"), [(0.0, {"qaf"}), (1.0, {"fqt"})])
def test_ends_of_the_run(at, phases):
    assert {*fit(QAFSwitch(at=at))} == phases


def test_overrides_survive_a_switch_and_a_switch_back():
    plugin, model = FP4Precision(overrides={"layer.2": {"fprop_w": {"element": "e1m2"}}}, quantize_output=True), Two()
    fit(QAFSwitch(step=2), PrecisionSwitch("fqt", step=4), plugin=plugin, model=model)
    assert model.layer[0].casts == PRESETS["nvfp4"]()
    assert model.layer[2].casts.fprop_w.element == "e1m2"
    assert model.layer[2].casts.fprop_x is None


def test_the_phase_is_logged():
    logger = CSVLogger("logs")
    fit(QAFSwitch(step=3), logger=logger, log_every_n_steps=1)
    with open(logger.experiment.metrics_file_path, newline="") as file:
        logged = [(int(row["step"]), float(row["phase"])) for row in csv.DictReader(file) if row["phase"]]
    assert logged == [(3, 1.0)]


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
    class Raw(Two):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            self.optimizers(use_pl_optimizer=False).step()

    switches = [QAFSwitch(step=4), PrecisionSwitch("bf16", step=5)]
    with pytest.warns(UserWarning, match="QAFSwitch goes by trainer.global_step, which is still 0") as warned:
        runs.trainer(runs.two_casts(), callbacks=switches, max_steps=-1, max_epochs=1).fit(Raw())
    assert sum("goes by trainer.global_step" in str(warning.message) for warning in warned) == 1


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))


class Streamed(Two):
    def train_dataloader(self):
        return DataLoader(Stream())


@each("model, epochs", [(Two, -1), (Streamed, 2)])
@pytest.mark.parametrize("switch", [lambda: QAFSwitch(at=0.9), lambda: PrecisionSwitch("fqt", step=1, over=0.5)])
def test_fraction_of_a_run_whose_end_is_not_known(model, epochs, switch):
    message = "the end of this run is not known: set max_steps, or max_epochs for data with a length, or give steps? "
    with pytest.raises(MisconfigurationException, match=message):
        fit(switch(), model=model(), max_steps=-1, max_epochs=epochs, limit_train_batches=1.0)


def test_a_step_of_a_run_whose_end_is_not_known(told):
    seen = fit(QAFSwitch(step=6), model=Streamed(), max_steps=-1, max_epochs=2, limit_train_batches=1.0)
    assert seen == ["fqt"] * 6 + ["qaf"] * 2
    assert "will not act" not in told.text


@each("schedule, expected", [({0: 4, 1: 1}, ["fqt"] * 6 + ["qaf"] * 3), ({0: 1, 1: 4}, ["fqt"] * 4 + ["qaf"] * 2)])
def test_fraction_of_a_run_whose_accumulation_changes(schedule, expected):
    schedule = pytorch.callbacks.GradientAccumulationScheduler(schedule)
    assert fit(QAFSwitch(at=2 / 3), schedule, max_steps=-1, max_epochs=3, limit_train_batches=4) == expected
