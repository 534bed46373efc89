"""Checkpoints of FP8 runs: histories, and settings that differ."""

from contextlib import nullcontext

import pytest
import torch

from lightning_lowbit import FP4Precision, FP8Precision
from tests.precision.fp16.runs import assert_same
from tests.precision.regression_model import DOWN, On, Regression, Witness, assert_histories, fitted, state, trainer
from tests.tables import each


def saved(plugin):
    run = fitted(plugin)
    run.save_checkpoint("x.ckpt")
    return run.lightning_module


def resume(plugin):
    """Two more steps from the checkpoint, and what their witness saw."""
    run = fitted(plugin, ckpt_path="x.ckpt", max_steps=4, callbacks=[witness := Witness()])
    assert (run.global_step, len(witness.steps)) == (4, 2)
    return witness


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_holds_plain_weights_and_loads_everywhere():
    plugin = FP8Precision(history=4, smooth_swiglu="channel")
    model = saved(plugin)
    checkpoint = torch.load("x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Regression().state_dict())
    assert not list(model.buffers()), "there are buffers, which a strategy would broadcast"
    assert_same(dict(checkpoint["state_dict"]), dict(model.state_dict()))
    held = checkpoint["lightning_lowbit"]
    expected = {"step", "trained", "micro_batch", "phase", "seed", "blend", "gradient_scale"}
    expected |= {"amax_history", "channel_amax", "ranks", "averaged"}
    assert set(held) == expected
    for kind in ("amax_history", "channel_amax"):
        for key, amaxes in held[kind].items():
            assert (amaxes.dtype, amaxes.device.type) == (torch.float32, "cpu")
            assert amaxes.untyped_storage().nbytes() == 4 * amaxes.numel(), f"{key} drags along a larger tensor"
        assert_same(held[kind], state(plugin)[kind])
    assert held["channel_amax"][DOWN].shape == (24,)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"history": 4},
        {"history": 4, "smooth_swiglu": "channel"},
        {"history": 4, "smooth_swiglu": "token"},
        {"scaling": "current", "smooth_swiglu": "channel"},
    ],
    ids=str,
)
def test_a_checkpoint_evaluates_as_the_run_did(arguments, step):
    """Its histories and channels are in force in evaluation, too; another run would scale by the batch itself."""
    options = {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    keep = On(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(f"{trainer.global_step}.ckpt"))
    run = fitted(FP8Precision(**arguments), val_check_interval=1, callbacks=[keep], max_steps=4, **options)
    model = run.lightning_module
    expected = torch.stack(model.val_losses[2 * step - 2 : 2 * step])

    def evaluate(**others):
        fresh = Regression()
        plugin = FP8Precision(**arguments, **others)
        trainer(plugin, **options).validate(fresh, ckpt_path=f"{step}.ckpt", verbose=False)
        assert plugin.step == step
        return torch.stack(fresh.val_losses)

    assert torch.equal(evaluate(), expected), "a checkpoint evaluates to another loss than the run it is of"
    assert not torch.equal(evaluate(fresh_histories=True), expected), "the histories make no difference"


def test_another_number_of_ranks_is_said():
    """Rows of a rank, of which the checkpoint knows nothing, decide about the sizes of gradients."""
    saved(FP8Precision(**(arguments := {"history": 4})))
    checkpoint = torch.load("x.ckpt", weights_only=True)
    assert checkpoint["lightning_lowbit"]["ranks"] == 1
    checkpoint["lightning_lowbit"]["ranks"] = 2
    torch.save(checkpoint, "x.ckpt")
    with pytest.warns(UserWarning, match="trained on 2 data-parallel ranks, and this run has 1. .*scale_gradients"):
        resume(FP8Precision(**arguments))


BASE = {"history": 4, "compute_dtype": "fp32"}


@each(
    ("before", "after", "message"),
    [
        ({"smooth_swiglu": "channel"}, {"smooth_swiglu": "channel"}, None),
        ({}, {"history": 3}, r"amax_history of first/fprop_x has 4 steps, and this run's 3\."),
        ({"skip": ["head"]}, {}, r"is that of other layers: missing there: head/dgrad_g, head/dgrad_w, head/f"),
        ({}, {"skip": ["head"]}, r"is that of other layers: not in this model: head/dgrad_g, head/dgrad_w, head/f"),
        ({"only": ["mlp"]}, {"only": ["first"]}, r"missing there: first/.*; not in this model: mlp\.down_proj/"),
        ({}, {"overrides": {"first": "bf16"}}, r"not in this model: first/"),
        ({}, {"smooth_swiglu": "channel"}, r"not in this model: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
        ({"smooth_swiglu": "channel"}, {}, r"missing there: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
    ],
    fast=3,
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_histories_of_other_settings_are_refused_and_can_be_left(before, after, message):
    saved(FP8Precision(**{**BASE, **before}))
    if message is not None:
        with pytest.raises(ValueError, match=rf"The checkpoint's .*{message}.*fresh_histories=True"):
            resume(FP8Precision(**{**BASE, **after}))
    plugin = FP8Precision(**{**BASE, **after}, fresh_histories=True)
    witness = resume(plugin)
    assert plugin.step == 4
    assert_histories(state(plugin), witness, after.get("history", 4))


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_of_fp4_starts_empty_histories_and_says_so():
    saved(FP4Precision())
    for fresh in (False, True):
        plugin = FP8Precision(history=4, compute_dtype="fp32", fresh_histories=fresh)
        is_said = pytest.warns(UserWarning, match="holds no amax histories.*they start empty")
        with nullcontext() if fresh else is_said:  # none are expected, and a warning would be an error
            witness = resume(plugin)
        assert plugin.step == 4
        assert_histories(state(plugin), witness, 4)


@pytest.mark.fast("mxfp8", "no plugin")
@pytest.mark.parametrize(
    "other",
    [FP8Precision("current"), FP8Precision("mx"), FP4Precision(), None],
    ids=["fp8-current", "mxfp8", "nvfp4", "no plugin"],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_with_histories_goes_on_without(other):
    saved(FP8Precision(history=4, smooth_swiglu="channel"))
    resume(other)
    if other is not None:
        assert other.step == 4
        assert {*state(other)} == {"step", "trained", "micro_batch", "phase", "seed", "blend"}
