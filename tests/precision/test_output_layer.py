"""Plugins that leave the output layer in high precision: what they say, and which checkpoints they follow."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
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
from tests.precision.regression_model import LAYERS, Regression, fitted, flat, state, trainer
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")

REST = {*LAYERS} - {"head"}
LEAVING = (FP4Precision, TernaryPrecision)
BY_DEFAULT = "the output layer: quantize_output=True quantizes it"


def layers(plugin):
    return {name for name, casts in state(plugin)["trained"]["layers"].items() if casts != "bf16"}


def fit(plugin, steps=1, ckpt_path=None, model=None):
    return fitted(plugin, model, ckpt_path, max_steps=steps)


@each(
    "make, quantized, is_said",
    [
        *(
            (partial(make, **how), *outcome)
            for make in LEAVING
            for how, *outcome in [
                ({}, REST, True),
                ({"quantize_output": False}, REST, True),
                ({"quantize_output": True}, {*LAYERS}, False),
                ({"skip": ["head"]}, REST, False),
                ({"overrides": {"head": "int8"}}, {*LAYERS}, False),
            ]
        ),
        (partial(TernaryPrecision, only=["head", "first"]), {"head", "first"}, False),
        (FP8Precision, {*LAYERS}, False),
        (partial(FP8Precision, quantize_output=False), REST, True),
    ],
    fast=6,
)
def test_what_is_left_out_is_said(told, make, quantized, is_said):
    told.clear()
    say_once.cache_clear()
    plugin = make()
    model = fit(plugin).lightning_module
    assert layers(plugin) == quantized
    name = type(plugin).__name__
    line = f"{name} leaves the output layer head in high precision (quantize_output=True quantizes it)."
    assert [text for text in told.messages if "the output layer" in text] == [line] * is_said
    assert isinstance(model.head, QuantizedLayer) == ("head" in quantized)
    if "head" not in quantized:
        why = str(Reasons(model).module_reason("head", model.head))
        assert why == (BY_DEFAULT if is_said else "left out by skip or only")
    convert(model, "nvfp4", skip=["head"])
    assert "quantize_output" not in str(Reasons(model).module_reason("head", model.head)), "of another conversion"


@each(
    "make",
    [
        *LEAVING,
        partial(FP4Precision, LinearCasts.preset("fp8-delayed"), smooth_swiglu="channel"),
        partial(FP4Precision, "nvfp4", shared_amax=["gate_proj|up_proj"], save="codes"),
        partial(FP4Precision, "nvfp4", overrides={"up_proj": "mxfp8"}, compute_dtype="fp32"),
    ],
    fast=1,
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
    fit(make()).save_checkpoint(rest := tmp_path / "rest.ckpt")
    run.validate(run.lightning_module, ckpt_path=rest, verbose=False)
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
    run = fit(make(), model=restore(Regression(), path).train())
    assert layers(run.precision_plugin) == {*LAYERS}, "of a restored model"


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

    run = fit(FP4Precision(skip=["a_head"], quantize_output=True), model=Heads())
    run.save_checkpoint(path := tmp_path / "b.ckpt")
    run = fit(FP4Precision(), 2, path, Heads())
    assert layers(run.precision_plugin) & {"heads.a_head", "heads.b_head"} == {"heads.b_head"}


@each("freeze", [["head"], ["down_proj", "head"], [*LAYERS]])
def test_output_layers_that_the_checkpoint_has_left_out_stay_so(freeze, tmp_path):
    fit(FP4Precision()).save_checkpoint(path := tmp_path / "rest.ckpt")
    for resumes in (True, False):
        model, plugin = Regression(), FP4Precision()
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in freeze:
                module.requires_grad_(False)
        if resumes and freeze != [*LAYERS]:
            fit(plugin, 2, path, model)
        else:
            trainer(plugin).validate(model, ckpt_path=path, verbose=False)
        assert layers(plugin) == REST


class Narrow(BoringModel):
    """Plugins leave its last layer in high precision by default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 1))


def test_a_run_that_quantized_a_narrow_layer_goes_on_with_its_casts_or_says_what_changed(tmp_path):
    run = fit(FP4Precision("nvfp4", overrides={r"layer\.1": "nvfp4"}), model=Narrow())
    run.save_checkpoint(path := tmp_path / "old.ckpt")
    with pytest.warns(UserWarning, match=r"(?s)layer.1: nvfp4 in the checkpoint.*By default layer.1 stay in high"):
        fit(FP4Precision("nvfp4"), 2, path, Narrow())
    kept = fit(LowBitPrecision.from_checkpoint(path), 2, path, Narrow()).lightning_module.layer[1].full_casts
    assert kept == restore(Narrow(), path).layer[1].casts == LinearCasts.preset("nvfp4")
