"""The speed of GEMMs of codes in the precision summary: when it is measured, and by whom."""

import pytest
import torch

from lightning_lowbit import FP4Precision, PrecisionSummary
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn.layers.speed import Times, times_from
from lightning_lowbit.nn.native.devices import declared
from tests.callbacks.precision_summary.runs import Two, fit, trainer_with
from tests.lightning_imports import Callback, SingleDeviceStrategy

SAYS = "Native on this CPU: GEMMs of codes by "


class Steps(Callback):
    """Counts the steps that have begun."""

    begun = 0

    def on_train_batch_start(self, *_):
        self.begun += 1


@pytest.fixture
def asked(within):
    """The steps that had begun when the speed was measured."""
    within(declared("cpu", {"cpu"}))
    steps, moments = Steps(), []
    within(times_from(lambda _: moments.append(steps.begun) or Times(4.0, 2.0, 1.0)))
    return steps, moments


def test_it_is_measured_before_the_first_step(asked, capsys):
    steps, moments = asked
    fit(PrecisionSummary(), steps)
    assert steps.begun == 2 and moments == [0]
    words = " ".join(capsys.readouterr().out.split())
    assert words.count(SAYS) == 1
    assert "The emulation is faster here: backend='emulated' takes it." in words


def test_it_is_not_measured_without_a_summary(asked):
    steps, moments = asked
    fit(steps)
    assert steps.begun == 2 and moments == []


@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_it_is_said_of_models_that_have_such_gemms(asked, capsys, backend):
    steps, moments = asked
    fit(PrecisionSummary(), steps, plugin=FP4Precision(backend=backend, skip=["layer.2"]))
    assert len(moments) == (SAYS in capsys.readouterr().out) == (backend == "auto")


@pytest.mark.skipif(instructions() is None, reason="the C++ kernels cannot be built")
def test_gemms_that_are_left_out_are_measured_and_taken_by_no_measurement(monkeypatch, within, capsys):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    within(times_from(lambda _: Times(1.0, 2.0, 1.5)))
    summary = fit(PrecisionSummary(), plugin=FP4Precision(backend="auto", skip=["layer.2"]))
    words = " ".join(capsys.readouterr().out.split())
    assert "Emulated, fprop, dgrad, wgrad of nvfp4: this CPU has tile units (AMX)" in words
    assert "Left out on this CPU: GEMMs of codes by " in words
    assert "They are faster here: backend='native' takes them." in words
    assert summary.counter.native_shares(torch.device("cpu")) == {}


class Second(SingleDeviceStrategy):
    """As if another process were the first one."""

    is_global_zero = False


def test_the_first_process_alone_measures(asked):
    steps, moments = asked
    summary = PrecisionSummary()
    trainer = trainer_with(summary, steps, strategy=Second(device="cpu"))
    trainer.fit(Two())
    assert moments == []
    assert "gemms_of_codes" not in summary.report_data(trainer)
