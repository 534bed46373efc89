"""Training in fp16: losses, hooks, clipping, skipped steps."""

from functools import partial

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adagrad, AdamW

from lightning_lowbit import (
    ConservativeGradScaler,
    FP4Precision,
    FP8Precision,
    IntegerPrecision,
    LowBitPrecision,
    StableSPAM,
    TernaryPrecision,
    precision,
)
from lightning_lowbit.optim import Adaptive
from lightning_lowbit.units import cpu_without
from tests.lightning_imports import MixedPrecision
from tests.precision.fp16.runs import MOVING, Overflowing, assert_same, fp16, moving, static, train
from tests.precision.regression_model import Regression, fitted, flat
from tests.tables import each


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("by", ["loss", "activations"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 1e-2},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 1e-2, "accumulate_grad_batches": 2},
    ],
)
def test_without_casts_it_trains_as_lightnings_16_mixed_does_to_the_bit(options, by):
    with cpu_without():  # on CPUs without fp16 units, ours are float32's products
        ours = train(fp16(GradScaler("cpu", **MOVING)), Overflowing((3,), by), **options)
    theirs = train(MixedPrecision("16-mixed", "cpu", GradScaler("cpu", **MOVING)), Overflowing((3,), by), **options)
    assert ours.scales == [2.0**k for k in (10, 11, 11, 10, 10, 11, 11, 12)], "the scale did not rise and fall"
    assert ours.scalers == theirs.scalers, "scale and tracker move otherwise"
    assert_same(ours.weights, theirs.weights, "weights")
    assert_same(ours.optimizers, theirs.optimizers, "optimizer")
    assert not torch.equal(ours.weights[-1], ours.weights[0]), "nothing was trained"


PRECISIONS = {
    "LowBitPrecision": partial(LowBitPrecision, "mxfp4"),
    "FP4Precision": FP4Precision,
    "FP8Precision": FP8Precision,
    "FP8Precision current": partial(FP8Precision, "current"),
    "FP8Precision row": partial(FP8Precision, "row"),
    "FP8Precision mx": partial(FP8Precision, "mx"),
    "TernaryPrecision": TernaryPrecision,
    "IntegerPrecision": partial(IntegerPrecision, group="row"),
}


@each("name", PRECISIONS, fast=2)
def test_every_precision_trains_with_the_scaler_that_is_its_default(name):
    assert {name.split()[0] for name in PRECISIONS} == {name for name in precision.__all__ if "Precision" in name}
    plugin, model, dtypes = PRECISIONS[name](compute_dtype="fp16"), Regression(), set()
    before = flat(model)
    model.head.register_forward_hook(lambda layer, inputs, y: dtypes.add(y.dtype))
    seen = train(plugin, model, steps=6)
    assert type(plugin.scaler) is ConservativeGradScaler
    assert plugin.scaler.get_scale() > 1, "the scale is none"
    assert dtypes == {torch.float16}
    assert torch.stack(model.losses).isfinite().all()
    moved = (flat(model) - before).abs()
    assert moved.isfinite().all()
    assert (moved > 0).float().mean() > 0.9, "most weights have not moved"
    assert plugin.skipped_steps < 6
    assert len(seen.gradients) == plugin.step == 6


OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2),
    "fused AdamW": partial(AdamW, lr=1e-2, fused=True),
    "fused SGD": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
    "fused Adagrad": partial(Adagrad, lr=1e-2, fused=True),
    "StableSPAM": partial(StableSPAM, lr=1e-2),
    "Adaptive": lambda p: Adaptive(AdamW(p, 1e-2)),
    "Adaptive fused": lambda p: Adaptive(AdamW(p, 1e-2, fused=True)),
}


@each("name", OPTIMIZERS, fast=3)
def test_clips_true_gradients_whatever_the_optimizer(name):
    make = OPTIMIZERS[name]
    by_norm = train(fp16(moving()), Overflowing(make=make), 4, gradient_clip_val=1e-2)
    for seen, clipped in zip(by_norm.gradients, by_norm.clipped, strict=True):
        assert seen.norm() > 0.1, "hooks come after clipping"
        # torch divides by the norm + 1e-6, and the norm of float32 has a relative error of its own.
        assert clipped.norm() == pytest.approx(1e-2, rel=1e-4)
    by_value = train(fp16(moving()), Overflowing(make=make), 4, gradient_clip_val=1e-4, gradient_clip_algorithm="value")
    assert all(clipped.abs().max().item() == pytest.approx(1e-4) for clipped in by_value.clipped)
    first, last = by_norm.weights[0], by_norm.weights[-1]
    assert not torch.equal(first, last), "nothing was trained"
    # The scale is a power of two, and no gradient here so small that it matters which.
    fixed = train(fp16(static()), Overflowing(make=make), 4, gradient_clip_val=1e-2)
    assert_same(by_norm.weights, fixed.weights, "weights under a scale that moves")


@pytest.mark.fast("{'gradient_clip_val': 0.01}")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1e-2}], ids=str)
def test_fused_steps_are_those_that_are_not(options):
    fused, plain = (
        train(fp16(moving()), Overflowing((2,), make=OPTIMIZERS[name]), **options) for name in ("fused AdamW", "AdamW")
    )
    assert fused.scalers == plain.scalers
    # Adam moves a weight by at most the learning rate, 1e-2, at each of 7 steps; float32 rounds otherwise in the one.
    torch.testing.assert_close(fused.weights[-1], plain.weights[-1], rtol=0, atol=7e-2 * 1e-3)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("by", ["loss", "activations"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_costs_a_step_and_nothing_else(name, accumulate, by):
    plugin, model = fp16(moving()), Overflowing((2, 3), by, OPTIMIZERS[name])
    seen = train(plugin, model, steps=6, accumulate_grad_batches=accumulate)
    for step in (2, 3):
        assert not seen.gradients[step].isfinite().all(), "nothing overflowed"
        assert torch.equal(seen.weights[step], seen.weights[1]), "weights have moved"
        assert_same(seen.optimizers[step], seen.optimizers[1], "optimizer")
    assert seen.scales == [2.0**k for k in (10, 11, 10, 9, 9, 9)]
    assert all(not torch.equal(seen.weights[a], seen.weights[b]) for a, b in ((0, 1), (3, 4), (4, 5)))
    assert [saved["skipped_steps"] for saved in seen.saved] == [0, 0, 1, 2, 2, 2]
    assert (plugin.skipped_steps.item(), plugin.skipped_steps.dtype, plugin.step) == (2, torch.int64, 6)


@each("name", OPTIMIZERS, fast=3)
def test_the_very_first_step_is_skipped(name):
    """Then training goes on as if it began there; torch does not complain of a schedule that comes first."""
    make = OPTIMIZERS[name]
    model = Overflowing((0,), make=make, schedule=True)
    before = flat(model)
    seen = train(fp16(moving(cooldown=0)), model, steps=4)
    assert torch.equal(seen.weights[0], before), "a skipped step has moved weights"
    rates = [optimizer["param_groups"][0]["lr"] for optimizer in seen.optimizers]
    assert rates == [1e-2 / 2, 1e-2 / 4, 1e-2 / 8, 1e-2 / 16], "the schedule does not count the step that was skipped"
    constant = train(fp16(moving()), Overflowing((0,), make=make), steps=3).weights

    class Later(Overflowing):
        """The same batches, but for the first."""

        def loss(self, seed, size):
            place = seed + 8
            return super().loss(place, 1 + place % 7 / 2)

    assert_same(constant[1:], train(fp16(moving()), Later(make=make), steps=2).weights, "weights")


@each("at", [(), (1,), (0, 1)])
def test_the_end_of_training_alone_says_how_many_were_skipped(told, at):
    told.clear()
    run = fitted(fp16(moving()), Overflowing(at), limit_val_batches=1, num_sanity_val_steps=0)
    run.validate(run.lightning_module, verbose=False)
    said = [message for message in told.messages if "optimizer steps were skipped" in message]
    assert len(said) == bool(at), "it is not said, or validation, which skips nothing, says it again"
    for message in said:
        assert message.startswith(f"{len(at)} of 2 optimizer steps were skipped") and "LossScaleMonitor" in message


class Scaled(Regression):
    """A loss times a factor, and a learning rate divided by it; always the same batch, so that a skipped step is only
    a delay."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def loss(self, seed, size):
        return super().loss(0, 1.0) * self.factor

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.05 / self.factor)


def distance(found, expected):
    """Of final weights, over how far those expected have come."""
    return ((flat(found) - flat(expected)).norm() / (flat(expected) - flat(Regression())).norm()).item()


# fp16 keeps 11 bits: eight roundings between loss and gradient, of an error that SGD adds up as it does the gradients.
CLOSE = 8 * 2.0**-11


@pytest.mark.slow
def test_tiny_gradients_need_a_scale():
    expected, found, without = Scaled(1e-8), Scaled(1e-8), Scaled(1e-8)
    train(LowBitPrecision("bf16", compute_dtype="fp32"), expected, steps=10)
    train(fp16(static(1.0)), without, steps=10)
    assert torch.equal(flat(without), flat(Regression())), "without a scale no gradient should be left"
    plugin = fp16(ConservativeGradScaler(preset="tiny-loss", device="cpu"))
    train(plugin, found, steps=10)
    assert plugin.skipped_steps == 0
    assert distance(found, expected) < CLOSE, "with a scale it should train as in float32"


def test_recovers_from_a_first_scale_that_is_too_large():
    plugin = fp16(ConservativeGradScaler(init_scale=2.0**24, device="cpu"))
    found, expected = Scaled(1e3), Scaled(1e3)
    seen = train(plugin, found, steps=30)
    skipped = int(plugin.skipped_steps)
    assert 5 <= skipped <= 20
    assert seen.scales == [2.0 ** (24 - min(step + 1, skipped)) for step in range(30)], "it does not fall till it fits"
    train(LowBitPrecision("bf16", compute_dtype="fp32"), expected, steps=30 - skipped)
    assert distance(found, expected) < CLOSE, "after the overflows it should train as in float32"
