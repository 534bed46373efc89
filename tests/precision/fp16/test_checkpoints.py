"""Checkpoints of fp16 runs, delayed scaling, YAML."""

import pytest
import torch
import yaml
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, FP8Precision, LowBitPrecision, StaticGradScaler
from tests.lightning_imports import MixedPrecision, from_yaml
from tests.precision.fp16.runs import (
    MOVING,
    OVERFLOWS,
    SCALERS,
    Overflowing,
    assert_same,
    checkpoint,
    fp16,
    moving,
    run,
    static,
    train,
)
from tests.precision.regression_model import On, Regression, flat, state, trainer
from tests.tables import each


@pytest.mark.fast("5-conservative")
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("cut", [3, 4, 5, 6])  # just before an overflow, after it, and between two
def test_a_resumed_run_equals_the_uninterrupted_one(cut, scaler):
    def plugin():
        return FP8Precision(history=3, compute_dtype="fp16", scaler=SCALERS[scaler]())

    whole = run(plugin(), 9)
    expected = checkpoint()["lightning_lowbit"]
    assert expected["skipped_steps"] == 2
    before = plugin()
    run(before, cut)
    between = checkpoint()["lightning_lowbit"]
    assert between["scaler"] == before.scaler.state_dict()
    assert between["skipped_steps"] == sum(step < cut for step in OVERFLOWS)
    resumed = run(plugin(), 9, ckpt_path="x.ckpt")
    assert torch.equal(flat(resumed), flat(whole)), "final weights differ"
    assert_same(checkpoint()["lightning_lowbit"], expected)


@pytest.mark.fast("4")
@pytest.mark.parametrize("cut", [3, 4, 6])
def test_a_scaler_alone_in_lightnings_own_precision(cut):
    def plugin():
        return MixedPrecision("16-mixed", "cpu", SCALERS["conservative"]())

    whole = run(plugin(), 9)
    expected = checkpoint()["MixedPrecision"]
    assert "_tolerated" in expected
    assert not torch.equal(flat(whole), flat(Regression())), "nothing was trained"
    run(plugin(), cut)
    resumed = run(plugin(), 9, ckpt_path="x.ckpt")
    assert checkpoint()["MixedPrecision"] == expected
    assert torch.equal(flat(resumed), flat(whole)), "final weights differ"
    run(fp16(SCALERS["conservative"]()), 9)
    assert checkpoint()["lightning_lowbit"]["scaler"] == expected, "in this package's plugin it moves otherwise"


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_of_bf16_goes_on_in_fp16_and_back():
    run(LowBitPrecision("bf16"), 2)
    assert "scaler" not in checkpoint()["lightning_lowbit"]
    plugin = fp16(moving())
    run(plugin, 4, ckpt_path="x.ckpt")  # one overflow, in step 3
    assert (plugin.step, plugin.skipped_steps.item(), plugin.scaler.get_scale()) == (4, 1, 2.0**9)
    in_bf16 = LowBitPrecision("bf16")
    model = run(in_bf16, 5, Regression(), ckpt_path="x.ckpt")
    assert (in_bf16.step, in_bf16.scaler) == (5, None)
    assert flat(model).isfinite().all()


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_scale_is_that_of_another_class_within_the_bounds_of_this_one():
    run(fp16(GradScaler("cpu", **{**MOVING, "init_scale": 2.0**14})), 3, Regression())
    taken, bounded = moving(), moving(cap=2.0**12)
    run(fp16(taken), 3, Regression(), ckpt_path="x.ckpt")
    assert (taken.get_scale(), taken._get_growth_tracker()) == (2.0**15, 1)
    run(fp16(bounded), 3, Regression(), ckpt_path="x.ckpt")
    assert bounded.get_scale() == 2.0**12
    back = GradScaler("cpu")
    run(fp16(back), 3, Regression(), ckpt_path="x.ckpt")
    assert back.get_scale() == 2.0**12


def amaxes(saved, scale):
    """Histories of the loss itself: those of output gradients hold that of the scaled one."""
    return {key: history / scale if key.endswith("_g") else history for key, history in saved["amax_history"].items()}


@pytest.mark.fast("max")
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_of_gradients_follow_the_scale(algorithm):
    """To the bit: a power of two moves no digit, of the histories nor of what is quantized with them."""

    def plugin(scaler):
        return FP8Precision(history=4, algorithm=algorithm, compute_dtype="fp16", scaler=scaler)

    fixed = train(plugin(static(2.0**10)), Overflowing((4,)))
    scaler = moving(init_scale=2.0**9, growth_interval=1, cap=2.0**11, cooldown=0)
    found = train(plugin(scaler), Overflowing((4,)))
    assert found.scales == [2.0**k for k in (10, 11, 11, 11, 10, 11, 11, 11)]
    for step in range(8):
        expected = amaxes(fixed.saved[step], 2.0**10)
        empty = {key for key, history in expected.items() if history[-1] == 0}
        assert empty == {"first/dgrad_g"}, "only the inputs of the model have no gradients"
        assert_same(amaxes(found.saved[step], found.scales[step]), expected, f"histories after step {step}")
    assert_same(found.weights, fixed.weights, "weights")


@pytest.mark.fast("bf16 to fp16", "above the cap")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, lambda: static(2.0**10)),
        (lambda: static(2.0**10), None),
        (lambda: static(2.0**10), lambda: static(2.0**6)),
        (lambda: GradScaler("cpu", init_scale=2.0**12), lambda: moving(cap=2.0**10)),
    ],
    ids=["bf16 to fp16", "fp16 to bf16", "static", "above the cap"],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_histories_of_a_checkpoint_follow_the_scale(first, then):
    """A run that goes on with another scale than the checkpoint's: gradients are of another size, amaxes too."""

    def plugin(make):
        return FP8Precision(history=4, compute_dtype="fp16" if make else "bf16", scaler=make() if make else None)

    def scale(plugin):
        return 1.0 if plugin.scaler is None else plugin.scaler.get_scale()

    before, after, found = plugin(first), plugin(then), []
    in_step = On(on_before_backward=lambda *_: found.append(amaxes(state(after), scale(after))))
    run(before, 2, Regression())
    expected = amaxes(state(before), scale(before))
    trainer(after, max_steps=3, limit_train_batches=1, callbacks=[in_step]).fit(Regression(), ckpt_path="x.ckpt")
    assert scale(after) != scale(before)
    assert_same(found[0], expected, "histories")


class Doubling(GradScaler):
    def __init__(self, interval=7):
        super().__init__("cpu", growth_interval=interval)


CONSERVATIVE = {"preset": "quantized-fine-tuning", "growth_factor": 2.0, "floor": 4.0, "cooldown": 5, "device": "cpu"}


@each("scaler, expected", [
    (None, ConservativeGradScaler()),
    ({"class_path": "lightning_lowbit.ConservativeGradScaler"}, ConservativeGradScaler()),
    ({"class_path": "lightning_lowbit.ConservativeGradScaler", "init_args": CONSERVATIVE},
     ConservativeGradScaler(**CONSERVATIVE)),
    ({"class_path": "lightning_lowbit.StaticGradScaler", "init_args": {"scale": 8}}, StaticGradScaler(8)),
    ({"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu", "growth_interval": 9}},
     GradScaler("cpu", growth_interval=9)),
    ({"class_path": f"{__name__}.Doubling", "init_args": {"interval": 3}}, Doubling(3)),
], fast=2)  # fmt: skip
def test_from_yaml(scaler, expected):
    arguments = {"compute_dtype": "fp16"} | ({} if scaler is None else {"scaler": scaler})
    plugins = {"class_path": "lightning_lowbit.FP4Precision", "init_args": arguments}
    result = from_yaml(yaml.safe_dump({"plugins": plugins})).precision_plugin.scaler
    assert (type(result).__module__, type(result).__name__) == (type(expected).__module__, type(expected).__name__)
    assert result.state_dict() == expected.state_dict()
    for name in ("floor", "cap", "cooldown", "hysteresis"):
        assert getattr(result, name, None) == getattr(expected, name, None), f"{name} is not the one given"
