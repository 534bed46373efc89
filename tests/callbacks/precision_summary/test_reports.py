"""The precision summary as JSON and in reports, and when it measures the speed of GEMMs; it changes nothing."""

import json

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
    GradientNoiseMonitor,
    LowBitPrecision,
    PrecisionSummary,
    QAFSwitch,
    convert,
)
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn.layers.speed import Times, times_from
from lightning_lowbit.nn.native.devices import declared
from tests.callbacks.precision_summary.runs import (
    AVERAGE,
    BITS,
    COVERAGE,
    FIRST,
    LAST,
    TOTAL,
    Two,
    fit,
    report,
    sections_of,
    trainer_with,
)
from tests.lightning_imports import BoringModel, Callback, SingleDeviceStrategy, TensorBoardLogger, quiet_trainer
from tests.precision.regression_model import On
from tests.tables import each


def traces():
    hooks = [len(getattr(module_globals, name)) for name in vars(module_globals) if name.endswith("_hooks")]
    return hooks, list(_get_current_dispatch_mode_stack())


def test_writes_json_beside_the_log(tmp_path, within):
    within(declared("cpu", {"cpu"}))
    within(times_from(lambda _: Times(native=2.0, emulated=3.5, unquantized=3.0)))
    summary = fit(PrecisionSummary("bits.json", quiet=True), QAFSwitch(step=1), logger=TensorBoardLogger(tmp_path))
    folder = tmp_path / "lightning_logs" / "version_0"
    data = json.loads((folder / "bits.json").read_text())
    casts = data["layers"][0].pop("casts")
    native = ["fprop", "dgrad", "wgrad"]
    assert data.pop("layers") == [{"name": "layer.0", "in": 32, "out": 32, "native": native, "saved_bits": 16.0}]
    assert casts["fprop_x"] == "e2m1/e4m3:1x16+fp32"
    assert casts["wgrad_g"].endswith("~")
    assert data == {
        "compute_dtype": "bfloat16",
        "compute_dtype_because": "as compute_dtype='bf16' says",
        "gemms_of_codes": {
            "is_native": True,
            "instructions": instructions(),
            "threads": 1,
            "speed": 1.5,
            "speed_over_emulation": 1.75,
            "is_quiet": True,
        },
        "flops_per_micro_batch": TOTAL,
        "coverage": pytest.approx(2 * FIRST / TOTAL),
        "bits_by_phase": {"fqt": pytest.approx(BITS["fqt"]), "qaf": pytest.approx(BITS["qaf"])},
        "average_bits": pytest.approx(summary.average_bits()),
        "optimizer_steps_by_phase": {"fqt": 1, "qaf": 1},
        "uncovered": {"layer.2": 3 * LAST},
        "uncovered_because": {"layer.2": "left out by skip or only"},
        "uncounted": [],
    }
    assert not list(folder.glob(".*")), "a partial file was left"


@each(
    "make, has_tensor_cores, where, native",
    [
        (lambda: FP8Precision("current"), True, "native", ["fprop", "dgrad", "wgrad"]),
        (lambda: FP8Precision("current"), False, "emulated", []),
        (lambda: FP8Precision("current", backend="emulated"), True, "emulated", []),
        (lambda: LowBitPrecision("mxfp6"), True, "emulated", []),
        (lambda: FP8Precision("row", overrides={r"layer\.\d": "bf16"}), True, "", []),
        (
            lambda: LowBitPrecision({"preset": "fp8-row", "dgrad_w": "fprop"}),  # rows along the other axis
            True,
            "native fprop, wgrad; emulated dgrad",
            ["fprop", "wgrad"],
        ),
    ],
)
def test_says_which_layers_run_natively(make, has_tensor_cores, where, native):
    with declared("cpu", {"fp8", "int8"} if has_tensor_cores else ()):
        summary, data, *_ = report(model=(model := Two()), plugin=make())
        assert [row[-1] for row in layer_table(model).rows] == [where, where]
        assert [layer["native"] for layer in data["layers"]] == [native, native]
        share = sum(summary.counter.native_shares(torch.device("cpu")).values())
        assert (share == 1) == (where == "native"), f"{share:.0%} of the FLOPs are said to be native"


def test_reports_are_plain_data(tmp_path):
    summary, data, text, trainer = report()
    assert json.loads(json.dumps(data)) == data
    assert [section.title for section in summary.report_sections(trainer)] == ["Layers and casts", "Coverage"]
    assert all(part in text for part in ("layer.0", COVERAGE, AVERAGE))
    assert not list(tmp_path.rglob("*.json")), "it writes without a logger"


def test_a_report_without_a_step():
    trainer = trainer_with(summary := PrecisionSummary(quiet=True))
    for ask in (summary.coverage, summary.average_bits):
        with pytest.raises(RuntimeError, match="there was none yet"):
            ask()
    assert (summary.report_sections(trainer), summary.report_data(trainer)) == ([], {"layers": []})
    summary.on_train_start(trainer, Two())
    assert "No training step was taken." in sections_of(summary, trainer)
    assert json.dumps(summary.report_data(trainer))
    assert summary.report_alerts(trainer) == []


def test_results_are_the_same_to_the_bit():
    def run(*callbacks):
        torch.manual_seed(1)
        seen = []
        watch = On(
            on_train_batch_end=lambda trainer, model, outputs, *_: seen.append(outputs["loss"].detach().clone()),
            on_before_optimizer_step=lambda trainer, model, _: seen.extend(p.grad.clone() for p in model.parameters()),
        )
        fit(*callbacks, watch)
        return seen

    found, expected = run(PrecisionSummary(quiet=True)), run()
    assert len(found) == 2 * 5
    assert all(map(torch.equal, found, expected))


@each("order", [1, -1])
def test_a_further_draw_is_not_counted(order):
    summary = fit(*[PrecisionSummary(quiet=True), GradientNoiseMonitor(1)][::order])
    assert summary.coverage().flops == summary.counter.model_flops == TOTAL
    assert summary.coverage().uncovered == {"layer.2": 3 * LAST}
    assert not summary.coverage().uncounted


@each("where", ["training_step", "on_after_backward", "on_before_optimizer_step"])
def test_an_exception_in_the_first_step(where):
    """It arrives as it was, no counter stays, and what was half measured is not told as if it were all."""
    model, summary, before = Two(), PrecisionSummary(), traces()

    def fail(*_):
        raise KeyError("broken")

    setattr(model, where, fail)
    trainer = trainer_with(summary)
    with pytest.raises(KeyError, match="broken") as caught:
        trainer.fit(model)
    assert caught.value.__context__ is None, "masked by another exception"
    assert traces() == before
    if where != "on_before_optimizer_step":
        with pytest.raises(RuntimeError, match="there was none yet"):
            summary.coverage()
        assert "coverage" not in summary.report_data(trainer)


def test_counts_the_first_step_only():
    modes = []
    watch = On(on_before_backward=lambda *_: modes.append(len(_get_current_dispatch_mode_stack())))
    fit(PrecisionSummary(quiet=True), watch, max_steps=3)
    assert modes == [1, 0, 0]


def test_names_in_the_tables():
    """Numbers that are missing in a row are not in its name; tied weights are counted once."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5))
    convert(model, "nvfp4", overrides={r"layers\.(0|2|4)": "bf16"})
    names = [row[0] for row in layer_table(model).rows]
    assert names == ["layers.{0,2,4}", "layers.{1,3}"]
    model.layers[1].weight = model.layers[0].weight
    assert "1.02 k of 1.02 k parameters" in layer_table(model).caption


def test_a_skipped_first_batch_leaves_no_counter():
    class Skips(BoringModel):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

        def configure_optimizers(self):  # without a schedule, which would step before it
            return torch.optim.SGD(self.parameters(), lr=0.1)

    summary = PrecisionSummary(quiet=True)
    quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=[summary]).fit(Skips())
    assert summary.counter is None and not _get_current_dispatch_mode_stack()


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
    fit(steps)
    assert steps.begun == 2 and moments == [], "measured without a summary"
    fit(PrecisionSummary(), steps)
    assert steps.begun == 4 and moments == [2]
    words = " ".join(capsys.readouterr().out.split())
    assert words.count(SAYS) == 1
    assert "The emulation is faster here: backend='emulated' takes it." in words


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


def test_the_first_process_alone_measures(asked):
    class Second(SingleDeviceStrategy):
        is_global_zero = False

    _, data, *_ = report(asked[0], strategy=Second(device="cpu"))
    assert asked[1] == []
    assert "gemms_of_codes" not in data
