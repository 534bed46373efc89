"""The dtype of what is not quantized: its names, and what "auto" is on a device, on several, and after a resume."""

import itertools

import pytest
import torch

from lightning_lowbit import FP4Precision, FP8Precision, LowBitPrecision, TernaryPrecision, restore
from lightning_lowbit._lightning import say_once
from lightning_lowbit.units import cpu_without, has_units
from tests.launch import launch
from tests.lightning_imports import from_yaml
from tests.operations import Operations
from tests.precision.checkpoints.ranks import RANKS
from tests.precision.regression_model import Regression, fitted, flat, state, trainer
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def cpu(bf16):
    """A context in which this CPU has instructions for bf16, or not."""
    return cpu_without(*([] if bf16 else [BF16]))


def begin(told):
    told.clear()
    say_once.cache_clear()


@each(
    "names, dtype, precision",
    [
        (("bf16", "bf16-mixed", "bfloat16", BF16, "torch.bfloat16"), BF16, "bf16-mixed"),
        (("fp16", "16-mixed", "16", 16, "float16", FP16), FP16, "16-mixed"),
        (("fp32", "32-true", "32", 32, "float32", FP32, "torch.float32"), FP32, "32-true"),
    ],
)
def test_names_of_lightning_and_torch_are_taken(names, dtype, precision):
    for name in names:
        for plugin in (FP4Precision(compute_dtype=name), LowBitPrecision("fp8-current", compute_dtype=name)):
            assert (plugin.compute_dtype, plugin.precision) == (dtype, precision)
            assert (plugin.scaler is not None) == (dtype == FP16)
            assert plugin.trained.compute_dtype == names[0], "a checkpoint has one name for each"


@each(
    "name, message",
    [
        ("bf16-true", r"parameters 16 bits wide.* Give 'bf16' for the computation"),
        ("16-true", r"parameters 16 bits wide.* Give 'fp16' for the computation"),
        ("64-true", r"float32 at most. Give 'fp32'"),
        (64, r"compute_dtype=64: .*Give 'fp32'"),
        (torch.float64, r"compute_dtype=torch.float64: .*Give 'fp32'"),
        ("transformer-engine", r"FP8Precision quantizes the layers; here give 'auto' or 'bf16'"),
        (torch.float8_e4m3fn, r"FP8Precision quantizes the layers"),
        ("bfloat", r"Unknown compute_dtype 'bfloat'"),
        ("Bf16", r"Unknown compute_dtype 'Bf16'. Did you mean 'bf16'"),
        (torch.int8, r"Unknown compute_dtype torch.int8. Choose one of: 'auto', 'bf16', 'fp16', 'fp32'"),
        (8, r"Unknown compute_dtype 8"),
        (True, r"Unknown compute_dtype True"),
        (None, r"Unknown compute_dtype None"),
        (["bf16"], r"Unknown compute_dtype \['bf16'\]"),
        ("", r"Unknown compute_dtype ''"),
    ],
)
def test_others_are_refused_with_what_to_give(name, message):
    with pytest.raises(ValueError, match=message):
        FP4Precision(compute_dtype=name)


@each(
    "plugin, text, dtype",
    [
        ("FP4Precision", "auto", BF16),
        ("IntegerPrecision", "32-true", FP32),
        ("TernaryPrecision", "'32'", FP32),
        ("LowBitPrecision", "16", FP16),
    ],
    fast=2,
)
def test_a_recipe_has_the_same_names(plugin, text, dtype):
    casts = "casts: nvfp4, " if plugin == "LowBitPrecision" else ""
    plugins = f"{{class_path: lightning_lowbit.{plugin}, init_args: {{{casts}compute_dtype: {text}}}}}"
    assert from_yaml(f"{{plugins: {plugins}, accelerator: cpu}}").precision_plugin.compute_dtype == dtype


@each("has, dtype", [(True, BF16), (False, FP32)])
def test_auto_is_bf16_where_the_cpu_has_it(told, has, dtype):
    begin(told)
    plugin = TernaryPrecision()
    with cpu(has):
        run, same = fitted(plugin), fitted(TernaryPrecision(compute_dtype=dtype))
    assert torch.equal(flat(run.lightning_module), flat(same.lightning_module))
    assert plugin.compute_dtype == dtype and run.precision == plugin.precision
    assert state(plugin)["trained"]["compute_dtype"] == ("bf16" if has else "fp32")
    expected = [] if has else ["compute_dtype='auto': float32, as this CPU has no bf16 instructions."]
    assert [text for text in told.messages if "compute_dtype=" in text] == expected


@each(
    "recompute, plugin, dtype",
    itertools.product([False, True], [LowBitPrecision("bf16"), FP8Precision("current", skip=["head"])], [BF16, FP16]),
    fast=2,
)
def test_a_cpu_without_instructions_multiplies_in_float32_and_rounds(dtype, plugin, recompute):
    def train(*lacking):
        same = LowBitPrecision(plugin.casts, skip=plugin.skip, compute_dtype=dtype)
        with cpu_without(*lacking), Operations() as seen:
            run = fitted(same, Regression(recompute))
        return flat(run.lightning_module), seen.dtypes

    (expected, native), (found, wide) = train(), train(dtype)
    assert dtype in native and wide == {FP32}
    start = flat(Regression())
    assert (found - expected).norm() < 0.05 * (expected - start).norm(), "it is a run of another dtype"


def test_parameters_of_a_dtype_without_instructions_multiply_in_float32():
    class Narrow(Regression):
        def forward(self, x):
            return super().forward(x.bfloat16())

    with cpu_without(BF16), Operations() as seen:
        fitted(LowBitPrecision("bf16", compute_dtype="fp32"), Narrow().bfloat16())
    assert seen.dtypes == {FP32}


def test_devices_are_asked_for_their_own_instructions(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: asked.append(1) or False)
    assert not has_units(BF16, torch.device("cuda", 0)) and asked
    for version, has in {(14, 0): True, (13, 0): False}.items():
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *least, is_=version: is_ >= least)
        assert has_units(BF16, torch.device("mps")) == has
    assert has_units(BF16, torch.device("xla", 0)), "a device that does not tell"


@each("trained, has", [("bf16", False), ("fp32", True), ("fp32", False), ("bf16", True)], fast=1)
def test_a_run_that_resumes_computes_as_its_checkpoint_was_trained(told, tmp_path, trained, has):
    path = tmp_path / f"{trained}.ckpt"
    with cpu(True):
        fitted(FP8Precision(compute_dtype=trained), max_steps=1).save_checkpoint(path)
    with cpu(has):
        weights = []
        for asked in ("auto", trained):
            begin(told)
            run = fitted(plugin := FP8Precision(compute_dtype=asked), ckpt_path=path)
            weights.append(flat(run.lightning_module))
            assert state(plugin)["trained"]["compute_dtype"] == trained
            assert run.precision == plugin.precision
            follows = any("as the checkpoint was trained" in line for line in told.messages)
            assert follows == (asked == "auto" and (trained == "bf16") != has), told.messages
            is_slow = any("no instructions for torch.bfloat16" in line for line in told.messages)
            assert is_slow == (trained == "bf16" and not has)
        assert torch.equal(*weights)
        evaluation = trainer(FP8Precision(), limit_val_batches=1)  # another dtype would be an error
        evaluation.validate(Regression(), ckpt_path=path, verbose=False)
        assert state(evaluation.precision_plugin)["trained"]["compute_dtype"] == trained
        assert LowBitPrecision.from_checkpoint(path).trained.compute_dtype == trained
        fitted(plugin := FP8Precision(), restore(Regression(), path).train(), max_steps=1)
        assert plugin.trained.compute_dtype == trained, "a restored model"


def test_a_cpu_without_instructions_for_the_dtype_of_a_checkpoint_recommends_no_other_to_evaluations(told, tmp_path):
    path = tmp_path / "bf16.ckpt"
    with cpu(True):
        fitted(FP8Precision(compute_dtype="bf16"), max_steps=1).save_checkpoint(path)
    for plugin in (LowBitPrecision.from_checkpoint(path), FP8Precision()):
        begin(told)
        with cpu(False):
            trainer(plugin, limit_val_batches=1).validate(Regression(), ckpt_path=path, verbose=False)
        (line,) = [text for text in told.messages if "no instructions for torch.bfloat16" in text]
        assert line.endswith("are computed in float32 and rounded, as the checkpoint was trained.")


def test_an_explicit_dtype_is_kept_and_said_and_another_run_decides_anew(tmp_path):
    bf16, fp16 = tmp_path / "bf16.ckpt", tmp_path / "fp16.ckpt"
    with cpu(True):
        for path in (bf16, fp16):
            fitted(FP8Precision(compute_dtype=path.stem), max_steps=1).save_checkpoint(path)
        with pytest.warns(UserWarning, match="computed in bf16 in the checkpoint, in fp32 here"):
            fitted(plugin := FP8Precision(compute_dtype="32-true"), ckpt_path=bf16)
        assert plugin.compute_dtype == FP32
        with pytest.warns(UserWarning, match="computed in fp16 in the checkpoint, in bf16 here"):  # it has a loss scale
            fitted(FP8Precision(), ckpt_path=fp16)
    with cpu(False):
        fitted(plugin := FP8Precision(), ckpt_path=bf16)
        assert plugin.compute_dtype == BF16
        fitted(plugin, max_steps=1)
        assert plugin.compute_dtype == FP32


@pytest.mark.fast("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "tensor parallel"])
def test_processes_agree_and_follow_their_checkpoint(tmp_path, strategy):
    ranks = [result[strategy] for result in launch("tests.precision.ranks_defaults", RANKS, tmp_path, strategy)]
    for rank, whose in zip(ranks, ("the device of another process", "this CPU"), strict=True):
        assert rank["seed"] == 0, "the ranks round weights by different random bits"
        assert rank["dtypes"] == ["torch.float32"] * 3
        assert rank["told"][0] == f"compute_dtype='auto': float32, as {whose} has no bf16 instructions."
        assert rank["layers"] == [["body.0", "body.2"], ["body.0"], *[["body.0", "body.2"]] * 2]
        followed, explicit = rank["weights"]
        assert all(map(torch.equal, followed, explicit)), "with default arguments a resumed run computes otherwise"
