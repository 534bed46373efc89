"""What is said about a run's precision: at the start, after the first step and at its end; and that saying it changes
nothing."""

import json
import re
import sys
from dataclasses import asdict

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
    LowBitProgressBar,
    PrecisionSummary,
    QAFSwitch,
    convert,
)
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.report.console import Table, plain
from tests.lightnings import BoringModel, Callback, RichProgressBar, TensorBoardLogger, TQDMProgressBar, Trainer

# Of Two, with one sample in a batch: the first layer's input needs no gradient.
FIRST, LAST = 2 * 32 * 32, 2 * 32 * 2
TOTAL = 2 * FIRST + 3 * LAST
SKIP = {"skip": ["layer.2"]}
BITS = {
    "fqt": (4.5 * 2 * FIRST + 16 * 3 * LAST) / TOTAL,
    "qaf": (4.5 * FIRST + 16 * (FIRST + 3 * LAST)) / TOTAL,
}


class Two(BoringModel):
    """Two layers, the second of which the runs here leave alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class Manual(Two):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Multiplies(torch.optim.SGD):
    """An optimizer with arithmetic of its own."""

    def step(self, closure=None):
        result = super().step(closure)
        torch.ones(64, 64) @ torch.ones(64, 64)
        return result


def trainer_with(*callbacks, plugin=None, **kwargs):
    defaults = {
        "max_steps": 2,
        "limit_train_batches": 4,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if "precision" not in kwargs:
        kwargs["plugins"] = [plugin or FP4Precision(**SKIP)]
    return Trainer(accelerator="cpu", callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(*callbacks, model=None, ckpt_path=None, **kwargs):
    """Runs, and returns the summary among the callbacks."""
    trainer_with(*callbacks, **kwargs).fit(model or Two(), ckpt_path=ckpt_path)
    return next((callback for callback in callbacks if isinstance(callback, PrecisionSummary)), None)


def traces():
    hooks = [len(getattr(module_globals, name)) for name in vars(module_globals) if name.endswith("_hooks")]
    return hooks, list(_get_current_dispatch_mode_stack())


CAPTION, COVERAGE, AVERAGE = "weights and biases of converted layers", "Coverage: ", "Average over the run: "


def assert_said_once(output):
    words = " ".join(output.split())  # a caption may be wrapped
    for part in (CAPTION, COVERAGE, AVERAGE):
        assert words.count(part) == 1, f"{part!r} was said {words.count(part)} times:\n{output}"


# --- what is said -----------------------------------------------------------------------------------------------------


def test_says_layers_coverage_and_average_once(capsys):
    fit(PrecisionSummary())
    output = capsys.readouterr().out
    assert_said_once(output)
    assert re.search(r"layer\.0 +QuantLinear +32 → 32 +1\.06 k +nvfp4", output)
    assert re.search(r"layer\.2 +Linear +66 +high precision", output)
    assert "1.06 k of 1.12 k parameters (94.1%)" in output
    assert f"Coverage: {2 * FIRST / TOTAL:.1%} of 4480 FLOPs per micro-batch and process" in output
    assert f"{BITS['fqt']:.2f} bits per GEMM operand." in output
    assert re.search(rf"layer\.2 +1 +{3 * LAST} FLOPs +{3 * LAST / TOTAL:.1%}", output)
    assert f"Average over the run: {BITS['fqt']:.2f} bits per GEMM operand (optimizer steps in fqt: 2)." in output
    assert output.index("1.06 k of") < output.index(COVERAGE) < output.index(AVERAGE)


def test_tables_and_lines_fit_a_notebook_and_a_terminal(capsys, monkeypatch):
    """Names are folded at their dots; no column is cut, and none but that of names where that suffices."""

    class Deep(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential()
            self.layer.add_module("a_name_that_is_long_enough", nn.Sequential(nn.Sequential(nn.Linear(32, 2))))

    def said():
        fit(PrecisionSummary(), model=Deep(), plugin=FP4Precision())
        return capsys.readouterr().out

    assert max(map(len, said().splitlines())) > 88, "what is in a file need not be folded"
    with monkeypatch.context() as notebook:
        notebook.setitem(sys.modules, "ipykernel", object())
        shown = said()
    assert max(map(len, shown.splitlines())) <= 88
    assert_said_once(shown)
    assert re.search(r"^layer\.a_name_that_is_long_enough\.0\.0 +QuantLinear +32 → 2 +66 .*emulated$", shown, re.M)
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        terminal.setenv("COLUMNS", "72")
        shown = said()
    assert max(map(len, shown.splitlines())) <= 72
    assert re.search(r"^layer\. +QuantLinear.*emulated\n  a_name_that_is_\w+\n  \w+\.0\.0$", shown, re.M)


def test_columns_that_are_wide_together_are_folded():
    casts = ["e2m1/e4m3:1x16+fp32~"] * 4
    lines = plain(Table(["operand", "a", "b", "c", "d"], [["fprop_x", *casts]], "caption " * 12), width=64).splitlines()
    assert max(map(len, lines)) <= 64
    assert "".join("".join(line.split()) for line in lines[2:4]).count("e2m1/e4m3:") == 4
    assert len(plain(Table(["operand"], [["x" * 100]])).splitlines()[2]) == 100, "nothing has to be folded"


def test_quiet(capsys):
    summary = fit(PrecisionSummary(quiet=True))
    assert capsys.readouterr().out == ""
    assert summary.coverage().flops == TOTAL, "quiet, and yet it counts"


@pytest.mark.parametrize(
    "bar", [LowBitProgressBar, TQDMProgressBar, lambda: LowBitProgressBar(refresh_rate=0), RichProgressBar]
)
@pytest.mark.parametrize("bar_first", [False, True])
def test_above_a_progress_bar(capsys, bar, bar_first):
    """All of it, whatever the order of callbacks, and no line has a piece of the bar in it."""
    order = [bar(), PrecisionSummary()] if bar_first else [PrecisionSummary(), bar()]
    fit(*order, enable_progress_bar=True)
    output = capsys.readouterr().out
    assert_said_once(output)
    [line] = [line for line in re.split(r"[\n\r]", output) if COVERAGE in line]
    assert re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line).strip().startswith(COVERAGE)
    assert "it/s" not in line


def test_above_the_default_progress_bar(capsys):
    fit(PrecisionSummary(), enable_progress_bar=True)
    assert_said_once(capsys.readouterr().out)


@pytest.mark.parametrize(("precision", "bits"), [("bf16-mixed", 16), ("32-true", 32), ("64-true", 64)])
def test_without_the_plugin(capsys, precision, bits):
    summary = fit(PrecisionSummary(), precision=precision)
    coverage = summary.coverage()
    assert coverage.share == 0
    assert coverage.average_bits == summary.average_bits() == bits
    assert coverage.uncovered == {"layer.0": 2 * FIRST, "layer.2": 3 * LAST}
    assert "Coverage: 0.0% of 4480 FLOPs" in capsys.readouterr().out


def test_high_precision_is_that_of_the_plugin():
    summary = fit(PrecisionSummary(quiet=True), plugin=FP4Precision(compute_dtype="fp32", **SKIP))
    assert summary.coverage().average_bits == pytest.approx((4.5 * 2 * FIRST + 32 * 3 * LAST) / TOTAL)


def test_layers_alike_are_one_row():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12)))
    table = layer_table(model)
    assert [row[:2] for row in table.rows] == [["{0-11}.0", "Linear"], ["{0-11}.1", "LayerNorm"]]
    assert "0 of 336 parameters (0.0%)" in table.caption
    assert "none" in layer_table(nn.Identity()).caption


def test_an_operation_without_a_formula_is_named(capsys):
    class Trilinear(Two):
        def training_step(self, batch, batch_idx):
            nn.functional.bilinear(batch, batch, batch.new_ones(1, 32, 32))
            return super().training_step(batch, batch_idx)

    fit(PrecisionSummary(), model=Trilinear())
    said = capsys.readouterr().out
    assert "Matrix products whose FLOPs are not known are left out of all numbers: aten._trilinear." in said


@pytest.mark.parametrize("filename", ["summary.txt", "folder/summary.json", "../summary.json", "/summary.json", ""])
def test_a_wrong_filename(filename):
    with pytest.raises(ValueError, match=re.escape(f"got {filename!r}")):
        PrecisionSummary(filename)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_step():
    summary = PrecisionSummary()
    for ask in (summary.coverage, summary.average_bits):
        with pytest.raises(RuntimeError, match="there was none yet"):
            ask()
    trainer = trainer_with()
    assert summary.report_sections(trainer) == []
    assert summary.report_data(trainer) == {"layers": []}


def test_average_over_phases():
    summary = fit(PrecisionSummary(quiet=True), QAFSwitch(step=2), max_steps=5)
    assert summary.coverage("fqt").average_bits == pytest.approx(BITS["fqt"])
    assert summary.coverage("qaf").average_bits == pytest.approx(BITS["qaf"])
    assert summary.average_bits() == pytest.approx((2 * BITS["fqt"] + 3 * BITS["qaf"]) / 5)


def test_a_resumed_run_continues_the_average(tmp_path):
    """The first step after the resume is in another phase, and the coverage said is that of full quantization."""

    def run(steps, ckpt_path=None):
        summary = PrecisionSummary(quiet=True)
        trainer = trainer_with(summary, QAFSwitch(step=2), max_steps=steps)
        trainer.fit(Two(), ckpt_path=ckpt_path)
        return summary, trainer

    _, trainer = run(4)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    summary, trainer = run(8, tmp_path / "x.ckpt")
    assert summary.average_bits() == pytest.approx((2 * BITS["fqt"] + 6 * BITS["qaf"]) / 8)
    data = summary.report_data(trainer)
    assert data["optimizer_steps_by_phase"] == {"fqt": 2, "qaf": 6}
    assert data["coverage"] == pytest.approx(2 * FIRST / TOTAL)


def test_another_run_begins_anew():
    """A callback that is used in a second fit without a checkpoint does not add to the first."""
    summary = fit(PrecisionSummary(quiet=True), max_steps=3)
    trainer = trainer_with(summary)
    trainer.fit(Two())
    assert summary.report_data(trainer)["optimizer_steps_by_phase"] == {"fqt": 2}


def test_accumulated_gradients():
    """FLOPs are those of one micro-batch, steps those of the optimizer."""
    summary = PrecisionSummary(quiet=True)
    trainer = trainer_with(summary, accumulate_grad_batches=2)
    trainer.fit(Two())
    assert summary.coverage().flops == TOTAL
    assert summary.report_data(trainer)["optimizer_steps_by_phase"] == {"fqt": 2}


def assert_manual(summary, trainer):
    trainer.fit(model := Manual())
    assert not model.automatic_optimization
    assert dict(summary.counter.others) == {"layer.2": 3 * LAST}
    assert summary.counter.model_flops == summary.coverage().flops == TOTAL
    assert summary.report_data(trainer)["optimizer_steps_by_phase"] == {"fqt": 2}


def test_manual_optimization():
    summary = PrecisionSummary(quiet=True)
    assert_manual(summary, trainer_with(summary))


def test_manual_optimization_under_ddp():
    """Its forward runs the whole training step, and the backward pass with it."""
    summary = PrecisionSummary(quiet=True)
    try:
        assert_manual(summary, trainer_with(summary, strategy="ddp", devices=1))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("base", [Two, Manual])
def test_the_optimizers_own_arithmetic_is_not_counted(base):
    class Model(base):
        def configure_optimizers(self):
            return Multiplies(self.parameters(), lr=0.1)

    summary = fit(PrecisionSummary(quiet=True), model=Model())
    assert summary.coverage().uncovered == {"layer.2": 3 * LAST}


def test_two_manual_steps_in_a_batch():
    """As in adversarial training: all of the batch counts."""

    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    summary = fit(PrecisionSummary(quiet=True), model=Twice())
    assert summary.coverage().flops == 2 * TOTAL


def test_a_penalty_on_gradients_with_respect_to_the_input():
    """autograd.grad works while it counts. A converted layer computes the weight's gradient too, and throws it away."""

    class Penalty(Manual):
        def training_step(self, batch, batch_idx):
            batch = batch.requires_grad_()
            torch.autograd.grad(self.layer(batch).sum(), batch)
            super().training_step(batch.detach(), batch_idx)

    summary = fit(PrecisionSummary(quiet=True), model=Penalty())
    assert summary.coverage().flops == TOTAL + 3 * FIRST + 2 * LAST


# --- JSON and reports -------------------------------------------------------------------------------------------------


def test_writes_json_beside_the_log(tmp_path):
    summary = fit(
        PrecisionSummary("bits.json", quiet=True), QAFSwitch(step=1), logger=TensorBoardLogger(tmp_path), max_steps=2
    )
    folder = tmp_path / "lightning_logs" / "version_0"
    data = json.loads((folder / "bits.json").read_text())
    casts = data["layers"][0].pop("casts")
    assert data.pop("layers") == [{"name": "layer.0", "in": 32, "out": 32, "native": []}]
    assert casts["fprop_x"] == "e2m1/e4m3:1x16+fp32"
    assert casts["wgrad_g"].endswith("~")
    assert data == {
        "flops_per_micro_batch": TOTAL,
        "coverage": pytest.approx(2 * FIRST / TOTAL),
        "bits_by_phase": {"fqt": pytest.approx(BITS["fqt"]), "qaf": pytest.approx(BITS["qaf"])},
        "average_bits": pytest.approx(summary.average_bits()),
        "optimizer_steps_by_phase": {"fqt": 1, "qaf": 1},
        "uncovered": {"layer.2": 3 * LAST},
        "uncounted": [],
    }
    assert not list(folder.glob(".*")), "a partial file was left"


@pytest.mark.parametrize(
    ("plugin", "has_tensor_cores", "where", "native"),
    [
        (lambda: FP8Precision("current"), True, "native", ["fprop", "dgrad", "wgrad"]),
        (lambda: FP8Precision("current"), False, "emulated", []),
        (lambda: FP8Precision("current", backend="emulated"), True, "emulated", []),
        (lambda: FP8Precision("mx"), True, "emulated", []),
        (lambda: FP8Precision("row", overrides={r"layer\.\d": "bf16"}), True, "", []),
        (
            lambda: LowBitPrecision({"preset": "fp8-row", "dgrad_w": "fprop"}),  # rows along the other axis
            True,
            "native fprop, wgrad; emulated dgrad",
            ["fprop", "wgrad"],
        ),
    ],
)
def test_says_which_layers_run_natively(monkeypatch, plugin, has_tensor_cores, where, native):
    obstacle = None if has_tensor_cores else "no tensor cores"
    monkeypatch.setattr("lightning_lowbit.nn.linear.native_obstacle", lambda device, kind: obstacle)
    summary, model = PrecisionSummary(quiet=True), Two()
    trainer = trainer_with(summary, plugin=plugin())
    trainer.fit(model)
    assert [row[-1] for row in layer_table(model).rows] == [where, where]
    assert [layer["native"] for layer in summary.report_data(trainer)["layers"]] == [native, native]
    share = sum(summary.counter.native_shares(torch.device("cpu")).values())
    assert (share == 1) == (where == "native"), f"{share:.0%} of the FLOPs are said to be native"


def test_writes_nothing_without_a_logger(tmp_path):
    fit(PrecisionSummary(quiet=True))
    assert not list(tmp_path.rglob("*.json"))


def test_reports_are_plain_data():
    summary = PrecisionSummary(quiet=True)
    trainer = trainer_with(summary)
    trainer.fit(Two())
    data = summary.report_data(trainer)
    assert json.loads(json.dumps(data)) == data
    sections = summary.report_sections(trainer)
    assert [section.title for section in sections] == ["Layers and casts", "Coverage"]
    text = json.dumps([asdict(section) for section in sections])
    assert "layer.0" in text
    assert COVERAGE in text
    assert AVERAGE in text


def test_a_report_without_a_step():
    summary = PrecisionSummary(quiet=True)
    trainer = trainer_with(summary)
    summary.on_train_start(trainer, Two())
    assert "No training step was taken." in json.dumps(
        [asdict(section) for section in summary.report_sections(trainer)]
    )
    assert json.dumps(summary.report_data(trainer))


# --- that it changes nothing ------------------------------------------------------------------------------------------


def test_results_are_the_same_to_the_bit():
    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(outputs["loss"].detach().clone())

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen += [p.grad.clone() for p in pl_module.parameters()]

    def run(*callbacks):
        torch.manual_seed(1)
        watch = Watch()
        fit(*callbacks, watch)
        return watch.seen

    found, expected = run(PrecisionSummary(quiet=True)), run()
    assert len(found) == 2 * 5
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("order", [1, -1])
def test_a_further_draw_is_not_counted(order):
    summary = PrecisionSummary(quiet=True)
    fit(*[summary, GradientNoiseMonitor(1)][::order], model=Two())
    assert summary.coverage().flops == summary.counter.model_flops == TOTAL
    assert summary.coverage().uncovered == {"layer.2": 3 * LAST}
    assert not summary.coverage().uncounted


@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_an_exception_in_the_first_step(where, error):
    """It arrives as it was, no counter stays, and what was half measured is not told as if it were all."""
    model, summary, before = Two(), PrecisionSummary(), traces()

    def fail(*_):
        raise error("broken")

    setattr(model, where, fail)
    trainer = trainer_with(summary)
    with pytest.raises(error, match="broken") as caught:
        trainer.fit(model)
    assert caught.value.__context__ is None, "masked by another exception"
    assert traces() == before
    if where != "on_before_optimizer_step":
        with pytest.raises(RuntimeError, match="there was none yet"):
            summary.coverage()
        assert "coverage" not in summary.report_data(trainer)


def test_nothing_is_left_behind():
    before = traces()
    fit(PrecisionSummary(quiet=True))
    assert traces() == before


def test_counts_the_first_step_only():
    """The others run without a dispatch mode."""

    class Watch(Callback):
        def __init__(self):
            self.modes = []

        def on_before_backward(self, *_):
            self.modes.append(len(_get_current_dispatch_mode_stack()))

    watch = Watch()
    fit(PrecisionSummary(quiet=True), watch, max_steps=3)
    assert watch.modes == [1, 0, 0]


def test_names_in_the_tables(capsys):
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
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[summary],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Skips())
    assert summary.counter is None and not _get_current_dispatch_mode_stack()
