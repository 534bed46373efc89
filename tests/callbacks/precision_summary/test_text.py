"""What the precision summary says and measures."""

import re
import sys

import pytest
import torch
from torch import nn

from lightning_lowbit import (
    FP4Precision,
    LowBitPrecision,
    LowBitProgressBar,
    PrecisionSummary,
    PrecisionSwitch,
    QAFSwitch,
    convert,
)
from lightning_lowbit.callbacks.layer_table import host_notes, layer_table
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import plain
from lightning_lowbit.units import cpu_without
from tests.callbacks.precision_summary.runs import (
    AVERAGE,
    BITS,
    CAPTION,
    COVERAGE,
    FIRST,
    LAST,
    SKIP,
    TOTAL,
    Two,
    fit,
    report,
    trainer_with,
)
from tests.lightning_imports import BoringModel, RichProgressBar, TQDMProgressBar
from tests.tables import each


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


def assert_said_once(output):
    words = " ".join(output.split())  # a caption may be wrapped
    for part in (CAPTION, COVERAGE, AVERAGE):
        assert words.count(part) == 1, f"{part!r} was said {words.count(part)} times:\n{output}"


class Reads(Two):
    """Reads the weight of a layer instead of calling it."""

    def __init__(self):
        super().__init__()
        self.read = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(2, 2)  # the output layer

    def forward(self, x):
        return self.head(super().forward(x @ self.read[0].weight.t() @ self.read[1].weight.t()))


def test_layers_that_are_not_called_are_named(capsys):
    fit(PrecisionSummary(), model=Reads())
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("Converted, but not called in the counted step: read.{0-1}. Where a module reads their") == 1


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
    trainer_with(PrecisionSummary(), precision="32-true").fit(Two())
    assert f"{AVERAGE}32.00 bits per GEMM operand.\n" in capsys.readouterr().out, "a phase without a plugin"


@each("make, reason", [
    (lambda: FP4Precision(**SKIP),
     "nvfp4: GEMMs of codes on CPUs need the C++ kernels; 'cpu' is declared to have none."),
    (lambda: FP4Precision(**SKIP, backend="emulated"), "nvfp4: backend='emulated'."),
    (lambda: LowBitPrecision("mxfp6", **SKIP), "mxfp6: no native GEMM takes these casts."),
])  # fmt: skip
def test_says_why_gemms_are_emulated(capsys, make, reason):
    with declared("cpu", ()):
        fit(PrecisionSummary(), plugin=make())
    assert f"Emulated, fprop, dgrad, wgrad of {reason}" in " ".join(capsys.readouterr().out.split())


def test_says_that_small_layers_on_a_gpu_wait_for_python():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), "fp8-row")
    assert host_notes(model) == []
    (note,) = host_notes(model, "cpu")
    assert note.text.startswith("On a GPU layers of 3.07 k weights, as here on average, wait for Python")
    assert host_notes(convert(nn.Sequential(nn.Linear(4096, 4096, device="meta")), "fp8-row"), "meta") == []
    model.compile(backend="eager")
    assert host_notes(model, "cpu") == []


def test_tables_and_lines_fit_a_notebook_and_a_terminal(capsys, monkeypatch, within):
    """Names are folded at their dots; no column is cut, and none but that of names where that suffices."""
    within(declared("cpu", {"cpu"}))

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
    assert re.search(r"^layer\.a_name_that_is_long_enough\.0\.0 +QuantLinear +32 → 2 +66 .*native$", shown, re.M)
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        terminal.setenv("COLUMNS", "72")
        shown = said()
    assert max(map(len, shown.splitlines())) <= 72
    assert re.search(r"^layer\. +QuantLinear.*native\n  a_name_that_is_\w+\n  \w+\.0\.0$", shown, re.M)


def test_columns_that_are_wide_together_are_folded():
    casts = ["e2m1/e4m3:1x16+fp32~"] * 4
    lines = plain(Table(["operand", "a", "b", "c", "d"], [["fprop_x", *casts]], "caption " * 12), width=64).splitlines()
    assert max(map(len, lines)) <= 64
    assert "".join("".join(line.split()) for line in lines[2:4]).count("e2m1/e4m3:") == 4
    assert len(plain(Table(["operand"], [["x" * 100]])).splitlines()[2]) == 100, "nothing has to be folded"


@each("bar", [LowBitProgressBar, TQDMProgressBar, lambda: LowBitProgressBar(refresh_rate=0), RichProgressBar])
@each("order", [1, -1])
def test_above_a_progress_bar(capsys, bar, order):
    fit(*[bar(), PrecisionSummary()][::order], enable_progress_bar=True)
    output = capsys.readouterr().out
    assert_said_once(output)
    [line] = [line for line in re.split(r"[\n\r]", output) if COVERAGE in line]
    assert re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line).strip().startswith(COVERAGE)
    assert "it/s" not in line


@each("precision, bits", [("bf16-mixed", 16), ("32-true", 32), ("64-true", 64)])
def test_without_the_plugin(precision, bits):
    summary, _, text, _ = report(precision=precision)
    coverage = summary.coverage()
    assert coverage.share == 0
    assert coverage.average_bits == summary.average_bits() == bits
    assert coverage.uncovered == {"layer.0": 2 * FIRST, "layer.2": 3 * LAST}
    assert "Coverage: 0.0% of 4480 FLOPs" in text


def test_high_precision_is_that_of_the_plugin():
    summary = fit(PrecisionSummary(quiet=True), plugin=FP4Precision(compute_dtype="fp32", **SKIP))
    assert summary.coverage().average_bits == pytest.approx((4.5 * 2 * FIRST + 32 * 3 * LAST) / TOTAL)


def test_layers_alike_are_one_row():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12)))
    table = layer_table(model)
    assert [row[:2] for row in table.rows] == [["{0-11}.0", "Linear"], ["{0-11}.1", "LayerNorm"]]
    assert "0 of 336 parameters (0.0%)" in table.caption
    assert "none" in layer_table(nn.Identity()).caption


def test_an_operation_without_a_formula_is_named():
    class Trilinear(Two):
        def training_step(self, batch, batch_idx):
            nn.functional.bilinear(batch, batch, batch.new_ones(1, 32, 32))
            return super().training_step(batch, batch_idx)

    _, _, text, _ = report(model=Trilinear())
    assert "Matrix products whose FLOPs are not known are left out of all numbers: aten._trilinear." in text


@each(
    "lacking, asked, end",
    [
        ([], "auto", "bfloat16, as all devices have bf16 instructions."),
        ([torch.bfloat16], "auto", "float32, as this CPU has no bf16 instructions."),
        ([torch.bfloat16], "bf16", "bfloat16, as compute_dtype='bf16' says."),
    ],
)
def test_says_in_what_else_is_computed_and_why(capsys, lacking, asked, end):
    with cpu_without(*lacking):
        fit(PrecisionSummary(), plugin=FP4Precision(**SKIP, compute_dtype=asked))
    assert f"What is not quantized is computed in {end}" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_continues_the_average(tmp_path):
    """The first step after the resume is in another phase, and the coverage said is that of full quantization."""
    *_, trainer = report(QAFSwitch(step=2), max_steps=4)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    summary, data, *_ = report(QAFSwitch(step=2), max_steps=8, ckpt_path=tmp_path / "x.ckpt")
    for phase, bits in BITS.items():
        assert summary.coverage(phase).average_bits == pytest.approx(bits)
    assert summary.average_bits() == pytest.approx((2 * BITS["fqt"] + 6 * BITS["qaf"]) / 8)
    assert data["optimizer_steps_by_phase"] == {"fqt": 2, "qaf": 6}
    assert data["coverage"] == pytest.approx(2 * FIRST / TOTAL)


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_does_not_tell_how_often_its_run_was_resumed(tmp_path):

    def run(steps, ckpt_path=None):
        switches = [QAFSwitch(step=4), PrecisionSwitch({".*": "bf16"}, step=3)]
        return report(*switches, max_steps=steps, ckpt_path=ckpt_path)[-1]

    states, last = [run(6).callbacks[0].state_dict()], None
    for steps in (1, 2, 5, 6):
        trainer = run(steps, last)
        trainer.save_checkpoint(last := tmp_path / f"{steps}.ckpt")
    states += [trainer.callbacks[0].state_dict(), torch.load(last)["callbacks"]["PrecisionSummary"]]
    assert states[0] == states[1] == states[2] and sum(row[1] for row in states[0]["past"]) == 6


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise than this plugin computes")
@pytest.mark.parametrize(("casts", "bits"), [("nvfp4", BITS["fqt"]), ("bf16", 16)])
def test_steps_before_a_resume_count_with_the_casts_that_they_had(casts, bits, tmp_path):
    report(max_steps=4)[-1].save_checkpoint(tmp_path / "x.ckpt")
    summary, _, text, _ = report(
        plugin=LowBitPrecision(casts, **SKIP, compute_dtype="bf16"), max_steps=6, ckpt_path=tmp_path / "x.ckpt"
    )
    assert summary.average_bits() == pytest.approx((4 * BITS["fqt"] + 2 * bits) / 6)
    assert ("with the last layers and casts" in text) == (casts == "bf16")


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
@each("saved", [None, 1, 2, 3])
def test_each_step_counts_with_its_casts(saved, tmp_path):
    """In one run, and resumed before, at and after a switch of layers: 2 steps, and 3 that are not quantized."""

    def run(steps, ckpt_path=None):
        switches = [PrecisionSwitch({".*": "bf16"}, step=2), QAFSwitch(step=1)]
        return report(*switches, max_steps=steps, ckpt_path=ckpt_path)

    if saved:
        run(saved)[-1].save_checkpoint(tmp_path / "x.ckpt")
    summary, data, text, _ = run(5, tmp_path / "x.ckpt" if saved else None)
    assert summary.average_bits() == pytest.approx((BITS["fqt"] + BITS["qaf"] + 3 * 16) / 5)
    assert data["bits_by_phase"] == pytest.approx({"fqt": BITS["fqt"], "qaf": (BITS["qaf"] + 3 * 16) / 4})
    assert "16.00 bits per GEMM operand, with the last layers and casts." in text


@each("kind, options", [(Two, {"accumulate_grad_batches": 2}), (Manual, {}), (Manual, {"strategy": "ddp"})])
def test_flops_of_a_micro_batch_and_steps_of_the_optimizer(kind, options):
    """Under DDP the forward pass of manual optimization is the whole training step, and the backward pass with it."""
    try:
        summary, data, *_ = report(model=kind(), devices=1, **options)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert dict(summary.counter.others) == {"layer.2": 3 * LAST}
    assert summary.counter.model_flops == summary.coverage().flops == TOTAL
    assert data["optimizer_steps_by_phase"] == {"fqt": 2}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@each("accumulated", [1, 2])
def test_a_first_micro_batch_without_a_loss_is_not_the_counted_one(accumulated):
    class Skips(Two):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx else None

    data = report(model=Skips(), accumulate_grad_batches=accumulated)[1]
    assert data["flops_per_micro_batch"] == TOTAL


@each("base", [Two, Manual])
def test_the_optimizers_own_arithmetic_is_not_counted(base):
    model = base()
    model.configure_optimizers = lambda: Multiplies(model.parameters(), lr=0.1)
    summary = fit(PrecisionSummary(quiet=True), model=model)
    assert summary.coverage().uncovered == {"layer.2": 3 * LAST}


def test_two_manual_steps_in_a_batch():
    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    summary = fit(PrecisionSummary(quiet=True), model=Twice())
    assert summary.coverage().flops == 2 * TOTAL
