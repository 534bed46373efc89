"""Plugins that leave the output layer in high precision: what they say, and which checkpoints they follow."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
    IntegerPrecision,
    LinearCasts,
    LowBitPrecision,
    TernaryPrecision,
    convert,
    restore,
)
from lightning_lowbit._lightning import say_once
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion.reasons import Reasons
from tests.lightning_imports import BoringModel
from tests.precision.regression_model import LAYERS, Regression, flat, state, trainer
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")

REST = {*LAYERS} - {"head"}
LEAVING = (FP4Precision, TernaryPrecision)


def layers(plugin):
    """Those that are quantized, by a checkpoint's record."""
    return {name for name, casts in state(plugin)["trained"]["layers"].items() if casts != "bf16"}


def rest_of(make, folder):
    """A checkpoint of a run that leaves the output layer out."""
    fit(make()).save_checkpoint(path := folder / "rest.ckpt")
    return path


def fit(plugin, steps=1, ckpt_path=None):
    made = trainer(plugin, max_steps=steps)
    made.fit(Regression(), ckpt_path=ckpt_path)
    return made


@each(
    "make, quantized, is_said",
    [
        *((make, REST, True) for make in LEAVING),
        *((lambda make=make: make(quantize_output=False), REST, True) for make in LEAVING),
        *((lambda make=make: make(quantize_output=True), {*LAYERS}, False) for make in LEAVING),
        *((lambda make=make: make(skip=["head"]), REST, False) for make in LEAVING),
        *((lambda make=make: make(overrides={"head": "int8"}), {*LAYERS}, False) for make in LEAVING),
        (lambda: TernaryPrecision(only=["head", "first"]), {"head", "first"}, False),
        (FP8Precision, {*LAYERS}, False),
        (lambda: IntegerPrecision(8, 8, "row"), {*LAYERS}, False),
        (lambda: LowBitPrecision("nvfp4"), {*LAYERS}, False),
        (lambda: LowBitPrecision("nvfp4", quantize_output=False), REST, True),
        (lambda: FP8Precision(quantize_output=False), REST, True),
    ],
)
def test_what_is_left_out_is_said(told, make, quantized, is_said):
    told.clear()
    say_once.cache_clear()
    plugin = make()
    run = fit(plugin)
    assert layers(plugin) == quantized
    line = (
        f"{type(plugin).__name__} leaves the output layer head in high precision (quantize_output=True quantizes it)."
    )
    assert [text for text in told.messages if "the output layer" in text] == ([line] if is_said else [])
    assert isinstance(run.lightning_module.head, QuantizedLayer) == ("head" in quantized)
    reasons = Reasons(run.lightning_module)
    why = str(reasons.module_reason("head", run.lightning_module.head))
    if "head" not in quantized:
        assert why == ("the output layer: quantize_output=True quantizes it" if is_said else "left out by skip or only")
    convert(run.lightning_module, "nvfp4", skip=["head"])
    head = run.lightning_module.head
    assert "quantize_output" not in str(Reasons(run.lightning_module).module_reason("head", head)), (
        "of another conversion"
    )


def test_what_is_no_flag_is_refused():
    for value in ("yes", 1):
        with pytest.raises(ValueError, match="quantize_output is true or false; got"):
            FP4Precision(quantize_output=value)


@each(
    "make",
    [
        *LEAVING,
        partial(FP4Precision, LinearCasts.preset("fp8-delayed"), smooth_swiglu="channel"),
        partial(FP4Precision, "nvfp4", shared_amax=["gate_proj|up_proj"], save="codes"),
        partial(FP4Precision, "nvfp4", overrides={"up_proj": "mxfp8"}, compute_dtype="fp32"),
    ],
)
def test_a_run_goes_on_with_the_output_layer_of_its_checkpoint(make, tmp_path):
    path = tmp_path / "all.ckpt"
    fit(make(quantize_output=True)).save_checkpoint(path)
    expected = fit(make(quantize_output=True), 3, path)
    run = fit(plugin := make(), 3, path)
    assert torch.equal(flat(run.lightning_module), flat(expected.lightning_module))
    assert layers(plugin) == {*LAYERS}


def test_what_comes_after_a_run_that_has_followed_its_checkpoint(tmp_path):
    make, path = FP4Precision, tmp_path / "all.ckpt"
    fit(make(quantize_output=True)).save_checkpoint(path)
    run = fit(plugin := make(), 3, path)
    run.save_checkpoint(later := tmp_path / "later.ckpt")
    assert "head" in layers(fit(make(), 4, later).precision_plugin), "of a run that had followed one"
    run.validate(run.lightning_module, verbose=False)
    assert isinstance(run.lightning_module.head, QuantizedLayer), "the same run evaluates"
    run.validate(run.lightning_module, ckpt_path=rest_of(make, tmp_path), verbose=False)
    assert layers(plugin) == REST, "the same run follows another checkpoint"
    fit(plugin)
    assert layers(plugin) == REST, "another run follows the checkpoint of the first"

    losses = []
    for evaluated in (make(), LowBitPrecision.from_checkpoint(path)):
        model = Regression()
        trainer(evaluated, limit_val_batches=2).validate(model, ckpt_path=path, verbose=False)
        losses.append(torch.stack(model.val_losses))
    assert torch.equal(*losses)
    assert isinstance(restore(Regression(), path).head, QuantizedLayer)
    restored = restore(Regression(), path).train()
    trainer(plugin := make()).fit(restored)
    assert layers(plugin) == {*LAYERS}, "of a restored model"


def test_an_explicit_argument_and_a_skipped_layer_are_kept_and_said(tmp_path):
    path = tmp_path / "all.ckpt"
    fit(FP4Precision(quantize_output=True)).save_checkpoint(path)
    for how in ({"quantize_output": False}, {"skip": ["head"]}):
        with pytest.warns(UserWarning, match="head: nvfp4 in the checkpoint, bf16 here"):
            run = fit(plugin := FP4Precision(**how), 2, path)
        assert layers(plugin) == REST and type(run.lightning_module.head) is nn.Linear
    fit(FP4Precision()).save_checkpoint(rest := tmp_path / "rest.ckpt")
    with pytest.warns(UserWarning, match="head: bf16 in the checkpoint, nvfp4 here"):
        fit(plugin := FP4Precision(quantize_output=True), 2, rest)
    assert layers(plugin) == {*LAYERS}


@pytest.mark.filterwarnings("ignore:.*trained otherwise")
def test_only_output_layers_that_the_checkpoint_has_quantized_are_followed(tmp_path):
    class Heads(Regression):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"a_head": nn.Linear(16, 16), "b_head": nn.Linear(16, 16)})

        def forward(self, x):
            h = super().forward(x)
            return h + sum(head(x).mean() for head in self.heads.values())

    made = trainer(FP4Precision(skip=["a_head"], quantize_output=True), max_steps=1)
    made.fit(Heads())
    made.save_checkpoint(path := tmp_path / "b.ckpt")
    plugin = FP4Precision()
    trainer(plugin).fit(Heads(), ckpt_path=path)
    assert layers(plugin) & {"heads.a_head", "heads.b_head"} == {"heads.b_head"}


@each("freeze", [["head"], ["down_proj", "head"], [*LAYERS]])
def test_output_layers_that_the_checkpoint_has_left_out_stay_so(freeze, tmp_path):
    """Which layer is the output depends on what is trained: the checkpoint decides."""
    path = rest_of(FP4Precision, tmp_path)
    for resumes in (True, False):
        model, plugin = Regression(), FP4Precision()
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in freeze:
                module.requires_grad_(False)
        made = trainer(plugin, max_steps=2)
        if resumes and freeze != [*LAYERS]:
            made.fit(model, ckpt_path=path)
        else:
            made.validate(model, ckpt_path=path, verbose=False)
        assert layers(plugin) == REST


class Narrow(BoringModel):
    """Plugins leave its last layer in high precision by default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 1))


def test_a_run_that_quantized_a_narrow_layer_goes_on_with_its_casts_or_says_what_changed(tmp_path):
    def fit(plugin, steps, ckpt_path=None):
        made = trainer(plugin, max_steps=steps)
        made.fit(Narrow(), ckpt_path=ckpt_path)
        return made

    fit(FP4Precision("nvfp4", overrides={r"layer\.1": "nvfp4"}), 1).save_checkpoint(path := tmp_path / "old.ckpt")
    with pytest.warns(UserWarning, match=r"(?s)layer.1: nvfp4 in the checkpoint.*By default layer.1 stay in high"):
        fit(FP4Precision("nvfp4"), 2, path)
    kept = fit(LowBitPrecision.from_checkpoint(path), 2, path).lightning_module.layer[1].full_casts
    assert kept == restore(Narrow(), path).layer[1].casts == LinearCasts.preset("nvfp4")
