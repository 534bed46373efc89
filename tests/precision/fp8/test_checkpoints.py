"""Checkpoints of FP8 runs: histories, and settings that differ."""

from contextlib import nullcontext

import pytest
import torch

from lightning_lowbit import FP4Precision, FP8Precision
from tests.lightning_imports import Callback
from tests.precision.regression_model import (
    DOWN,
    Regression,
    Witness,
    assert_histories,
    assert_in_force,
    flat,
    state,
    trainer,
)
from tests.tables import each


def saved(plugin, path="x.ckpt", **kwargs):
    """A model trained for two steps, and its checkpoint."""
    model, made = Regression(), trainer(plugin, **kwargs)
    made.fit(model)
    made.save_checkpoint(path)
    return model


def resume(plugin, model=None, **kwargs):
    """Two more steps from the checkpoint."""
    witness = Witness()
    options = {"max_steps": 4, "callbacks": [witness], **kwargs}
    trainer(plugin, **options).fit(model or Regression(), ckpt_path="x.ckpt")
    return witness


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_holds_plain_weights_and_loads_everywhere():
    plugin = FP8Precision(history=4, smooth_swiglu="channel")
    model = saved(plugin)
    checkpoint = torch.load("x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Regression().state_dict())
    assert not list(model.buffers()), "there are buffers, which a strategy would broadcast"
    plain = Regression()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(flat(plain), flat(model))
    held = checkpoint["lightning_lowbit"]
    expected = {"step", "trained", "micro_batch", "phase", "seed", "blend", "gradient_scale"}
    expected |= {"amax_history", "channel_amax", "ranks", "averaged"}
    assert set(held) == expected
    for kind in ("amax_history", "channel_amax"):
        for key, amaxes in held[kind].items():
            assert (amaxes.dtype, amaxes.device.type) == (torch.float32, "cpu")
            assert amaxes.untyped_storage().nbytes() == 4 * amaxes.numel(), f"{key} drags along a larger tensor"
            assert torch.equal(amaxes, state(plugin)[kind][key])
    assert held["channel_amax"][DOWN].shape == (24,)


class Keep(Callback):
    """A checkpoint of each step."""

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


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
    model, options = Regression(), {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer(FP8Precision(**arguments), val_check_interval=1, callbacks=[Keep()], max_steps=4, **options).fit(model)
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


def test_fresh_histories_forget_those_of_the_checkpoint():
    arguments = {"history": 4, "smooth_swiglu": "channel", "compute_dtype": "fp32"}
    saved(FP8Precision(**arguments))
    plugin = FP8Precision(**arguments, fresh_histories=True)
    witness = resume(plugin)
    assert (plugin.step, len(witness.steps)) == (4, 2)
    assert_histories(state(plugin)["amax_history"], witness, 4)
    assert_in_force(state(plugin)["amax_history"], witness, 4)


BASE = {"history": 4, "compute_dtype": "fp32"}


@each(
    ("before", "after", "message"),
    [
        ({}, {"history": 3}, r"amax_history of first/fprop_x has 4 steps, and this run's 3\."),
        ({}, {"history": 16}, r"amax_history of first/fprop_x has 4 steps, and this run's 16\."),
        ({"skip": ["head"]}, {}, r"is that of other layers: missing there: head/dgrad_g, head/dgrad_w, head/f"),
        ({}, {"skip": ["head"]}, r"is that of other layers: not in this model: head/dgrad_g, head/dgrad_w, head/f"),
        ({"only": ["mlp"]}, {"only": ["first"]}, r"missing there: first/.*; not in this model: mlp\.down_proj/"),
        ({}, {"overrides": {"first": "bf16"}}, r"not in this model: first/"),
        ({}, {"smooth_swiglu": "channel"}, r"not in this model: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
        ({"smooth_swiglu": "channel"}, {}, r"missing there: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
    ],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_histories_of_other_settings_are_refused_and_can_be_left(before, after, message):
    saved(FP8Precision(**{**BASE, **before}))
    with pytest.raises(
        ValueError, match=rf"The checkpoint's {message if 'amax' in message else '.*' + message}"
    ) as info:
        resume(FP8Precision(**{**BASE, **after}))
    assert "fresh_histories=True" in str(info.value), "the message does not say what to do"
    plugin = FP8Precision(**{**BASE, **after}, fresh_histories=True)
    witness = resume(plugin)
    length = after.get("history", 4)
    assert (plugin.step, len(witness.steps)) == (4, 2)
    assert_histories(state(plugin)["amax_history"], witness, length)


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_of_fp4_starts_empty_histories_and_says_so():
    saved(FP4Precision())
    for fresh in (False, True):
        plugin = FP8Precision(history=4, compute_dtype="fp32", fresh_histories=fresh)
        is_said = pytest.warns(UserWarning, match="holds no amax histories.*they start empty")
        with nullcontext() if fresh else is_said:  # none are expected, and a warning would be an error
            witness = resume(plugin)
        assert plugin.step == 4
        assert_histories(state(plugin)["amax_history"], witness, 4)


@pytest.mark.parametrize(
    "other",
    [FP8Precision("current"), FP8Precision("mx"), FP4Precision(), None],
    ids=["fp8-current", "mxfp8", "nvfp4", "no plugin"],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_with_histories_goes_on_without(other):
    saved(FP8Precision(history=4, smooth_swiglu="channel"))
    model = Regression()
    resume(other, model)
    assert len(model.losses) == 2
    if other is not None:
        assert other.step == 4
        assert {*state(other)} == {"step", "trained", "micro_batch", "phase", "seed", "blend"}
