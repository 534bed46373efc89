"""fp16 in a real Trainer: losses are scaled, gradients unscaled before anyone sees them, overflows cost a step each."""

import logging
import math
from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_lowbit import (
    ConservativeGradScaler,
    FP4Precision,
    FP8Precision,
    IntegerPrecision,
    LowBitPrecision,
    ShardedConservativeGradScaler,
    StableSPAM,
    StaticGradScaler,
    TernaryPrecision,
    precision,
)
from lightning_lowbit.optim import Adaptive
from lightning_lowbit.precision.run_settings import compute_dtype
from tests.lightnings import (
    BoringModel,
    Callback,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    MixedPrecision,
    fabric,
    pytorch,
)
from tests.precision.regression import Regression, flat, state, trainer
from tests.precision.test_precision import GAN

#: A scale that moves within a few steps; a power of two at any time, which changes no digit of a gradient.
MOVING: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 2.0, "growth_interval": 2}


def fp16(scaler: GradScaler | None = None, casts: Any = "bf16") -> LowBitPrecision:
    """Only fp16: there are no casts."""
    return LowBitPrecision(casts, compute_dtype="fp16", scaler=scaler)


def moving(**kwargs: Any) -> ConservativeGradScaler:
    return ConservativeGradScaler(device="cpu", **{**MOVING, **kwargs})


def static(scale: float = 2.0**10) -> StaticGradScaler:
    return StaticGradScaler(scale, device="cpu")


class Overflowing(Regression):
    """Has gradients that are not finite in some steps: from their first micro-batch.

    Args:
        at: which steps.
        by: ``"loss"``: it is infinite; ``"activations"``: they exceed 65504, and no other dtype would mind.
        make: the optimizer, from the parameters; None for Adam.
        schedule: makes a schedule of the learning rate, which falls to a half each step.
    """

    def __init__(
        self,
        at: Collection[int] = (),
        by: str = "loss",
        make: Callable[[Any], Optimizer] | None = None,
        schedule: bool = False,
    ) -> None:
        super().__init__()
        self.at, self.by, self.make, self.schedule = at, by, make, schedule

    def loss(self, seed: int, size: float) -> Tensor:
        if not self.training or seed % 8 or self.trainer.global_step not in self.at:
            return super().loss(seed, size)
        return super().loss(seed, 1e6) if self.by == "activations" else super().loss(seed, size) * math.inf

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers() if self.make is None else self.make(self.parameters())
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Steps(Callback):
    """What came of each optimizer step.

    Attributes:
        scalers: states of the scaler.
        weights: all of them.
        optimizers: states of the first optimizer.
        gradients: as hooks see them, before clipping.
        clipped: as the optimizer left them.
        saved: what the plugin would put into a checkpoint, if it is one of this package.
    """

    def __init__(self) -> None:
        self.scalers: list[dict[str, Any]] = []
        self.weights: list[Tensor] = []
        self.optimizers: list[dict[str, Any]] = []
        self.gradients: list[Tensor] = []
        self.clipped: list[Tensor] = []
        self.saved: list[dict[str, Any]] = []

    @property
    def scales(self) -> list[float]:
        return [scaler["scale"] for scaler in self.scalers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if len(self.scalers) == trainer.global_step:  # in the midst of accumulation
            return
        self.clipped.append(gradients(pl_module))
        self.weights.append(flat(pl_module))
        self.optimizers.append(deepcopy(trainer.optimizers[0].state_dict()))
        plugin = trainer.precision_plugin
        self.scalers.append({} if plugin.scaler is None else plugin.scaler.state_dict())
        if isinstance(plugin, LowBitPrecision):
            self.saved.append(state(plugin))


def gradients(model: LightningModule) -> Tensor:
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).clone() if found else torch.zeros(0)


def train(plugin: Any, model: Regression | None = None, steps: int = 8, **kwargs: Any) -> Steps:
    """One epoch of as many steps."""
    seen = Steps()
    batches = steps * kwargs.get("accumulate_grad_batches", 1)
    made = trainer(plugin, max_steps=steps, limit_train_batches=batches, callbacks=[seen], **kwargs)
    made.fit(model or Regression())
    assert made.global_step == len(seen.scalers) == steps, "the run has not the length that it was given"
    return seen


def assert_same(found: Any, expected: Any, place: str = "it") -> None:
    """Equal to the bit, tensors within mappings and lists too."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), f"{place} differs"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{place} has other parts"
        for key in expected:
            assert_same(found[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{place} has another length"
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{place}/{i}")
    else:
        assert found == expected, f"{place} is {found}, not {expected}"


# --- training ---------------------------------------------------------------------------------------------------------


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
def test_without_casts_it_trains_as_lightnings_16_mixed_does_to_the_bit(options: dict[str, Any], by: str) -> None:
    ours = train(fp16(GradScaler("cpu", **MOVING)), Overflowing((3,), by), **options)
    theirs = train(MixedPrecision("16-mixed", "cpu", GradScaler("cpu", **MOVING)), Overflowing((3,), by), **options)
    assert ours.scales == [2.0**k for k in (10, 11, 11, 10, 10, 11, 11, 12)], "the scale did not rise and fall"
    assert ours.scalers == theirs.scalers, "scale and tracker move otherwise"
    assert_same(ours.weights, theirs.weights, "weights")
    assert_same(ours.optimizers, theirs.optimizers, "optimizer")
    assert not torch.equal(ours.weights[-1], ours.weights[0]), "nothing was trained"


PRECISIONS: dict[str, Callable[..., LowBitPrecision]] = {
    "LowBitPrecision": lambda **kwargs: LowBitPrecision("mxfp4", **kwargs),
    "FP4Precision": FP4Precision,
    "FP8Precision": FP8Precision,
    "FP8Precision current": lambda **kwargs: FP8Precision("current", **kwargs),
    "FP8Precision row": lambda **kwargs: FP8Precision("row", **kwargs),
    "FP8Precision mx": lambda **kwargs: FP8Precision("mx", **kwargs),
    "TernaryPrecision": TernaryPrecision,
    "IntegerPrecision": lambda **kwargs: IntegerPrecision(group="row", **kwargs),
}


def test_no_precision_is_left_out() -> None:
    precisions = {name for name in precision.__all__ if name.endswith("Precision")}
    assert {name.split()[0] for name in PRECISIONS} == precisions


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_trains_with_the_scaler_that_is_its_default(name: str) -> None:
    plugin, model = PRECISIONS[name](compute_dtype="fp16"), Regression()
    before = flat(model)
    dtypes: set[torch.dtype] = set()
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


def test_fp16_trains_as_fp32_does() -> None:
    """Up to roundings of 2^-11: far apart, were a factor of the scale left in the gradients or out of them."""

    def gain(model: Regression) -> float:
        losses = torch.stack(model.losses)
        return (losses[-10:].mean() / losses[:10].mean()).item()

    found, expected = Regression(), Regression()
    train(fp16(moving(cap=2.0**12)), found, steps=60)  # from where nothing overflows
    train(LowBitPrecision("bf16", compute_dtype="fp32"), expected, steps=60)
    assert gain(expected) < 0.5
    assert gain(found) == pytest.approx(gain(expected), rel=0.05)


# --- unscale, hooks, clipping, step -----------------------------------------------------------------------------------


def test_hooks_see_gradients_without_the_scale() -> None:
    found = train(fp16(static(2.0**12)), steps=1).gradients[0]
    expected = train(LowBitPrecision("bf16", compute_dtype="fp32"), steps=1).gradients[0]
    # Some eight roundings lie between loss and gradient, each of 2^-11.
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * 2.0**-11 * expected.abs().max().item())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, 1e-2),
    "fused AdamW": lambda p: AdamW(p, 1e-2, fused=True),
    "fused SGD": lambda p: SGD(p, 1e-2, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: Adagrad(p, 1e-2, fused=True),
    "StableSPAM": lambda p: StableSPAM(p, 1e-2),
    "Adaptive": lambda p: Adaptive(AdamW(p, 1e-2)),
    "Adaptive fused": lambda p: Adaptive(AdamW(p, 1e-2, fused=True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clips_true_gradients_whatever_the_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    by_norm = train(fp16(moving()), Overflowing(make=make), gradient_clip_val=1e-2)
    for seen, clipped in zip(by_norm.gradients, by_norm.clipped, strict=True):
        assert seen.norm() > 0.1, "hooks come after clipping"
        # torch divides by the norm + 1e-6, and the norm of float32 has a relative error of its own.
        assert clipped.norm() == pytest.approx(1e-2, rel=1e-4)
    by_value = train(fp16(moving()), Overflowing(make=make), gradient_clip_val=1e-4, gradient_clip_algorithm="value")
    assert all(clipped.abs().max().item() == pytest.approx(1e-4) for clipped in by_value.clipped)
    first, last = by_norm.weights[0], by_norm.weights[-1]
    assert not torch.equal(first, last), "nothing was trained"
    # The scale is a power of two, and no gradient here so small that it matters which.
    fixed = train(fp16(static()), Overflowing(make=make), gradient_clip_val=1e-2)
    assert_same(by_norm.weights, fixed.weights, "weights under a scale that moves")


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1e-2}], ids=str)
def test_fused_steps_are_those_that_are_not(options: dict[str, Any]) -> None:
    fused, plain = (
        train(fp16(moving()), Overflowing((2,), make=OPTIMIZERS[name]), **options) for name in ("fused AdamW", "AdamW")
    )
    assert fused.scalers == plain.scalers
    # Adam moves a weight by at most the learning rate, 1e-2, at each of 7 steps; float32 rounds otherwise in the one.
    torch.testing.assert_close(fused.weights[-1], plain.weights[-1], rtol=0, atol=7e-2 * 1e-3)


# --- steps that are skipped -------------------------------------------------------------------------------------------


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("by", ["loss", "activations"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_costs_a_step_and_nothing_else(name: str, accumulate: int, by: str) -> None:
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_very_first_step_is_skipped(name: str) -> None:
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

        def loss(self, seed: int, size: float) -> Tensor:
            place = seed + 8
            return super().loss(place, 1 + place % 7 / 2)

    assert_same(constant[1:], train(fp16(moving()), Later(make=make), steps=2).weights, "weights")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "optimizer steps were skipped" in record.getMessage()]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    for name in (pytorch.__name__, fabric.__name__):  # either may be the one of rank_zero_info
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("at", [(), (2,), (0, 1, 4)])
def test_the_end_says_how_many_were_skipped(told: pytest.LogCaptureFixture, at: tuple[int, ...]) -> None:
    train(fp16(moving()), Overflowing(at), steps=6)
    messages = said(told)
    if not at:
        assert not messages
        return
    (message,) = messages
    assert message.startswith(f"{len(at)} of 6 optimizer steps were skipped")
    assert "LossScaleMonitor" in message


def test_only_the_end_of_training_says_so(told: pytest.LogCaptureFixture) -> None:
    model = Overflowing((1,))
    made = trainer(fp16(moving()), limit_val_batches=1, num_sanity_val_steps=0)
    made.fit(model)
    assert len(said(told)) == 1
    made.validate(model, verbose=False)
    assert len(said(told)) == 1, "validation, which skips nothing, says it again"


# --- what a scale is for ----------------------------------------------------------------------------------------------


class Scaled(Regression):
    """A loss times a factor, and a learning rate divided by it; always the same batch, so that a skipped step is only
    a delay."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def loss(self, seed: int, size: float) -> Tensor:
        return super().loss(0, 1.0) * self.factor

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), 0.05 / self.factor)


def distance(found: Regression, expected: Regression) -> float:
    """Of final weights, over how far those expected have come."""
    return ((flat(found) - flat(expected)).norm() / (flat(expected) - flat(Regression())).norm()).item()


# fp16 keeps 11 bits: eight roundings between loss and gradient, of an error that SGD adds up as it does the gradients.
CLOSE = 8 * 2.0**-11


def test_tiny_gradients_need_a_scale() -> None:
    expected, found, without = Scaled(1e-8), Scaled(1e-8), Scaled(1e-8)
    train(LowBitPrecision("bf16", compute_dtype="fp32"), expected, steps=10)
    train(fp16(static(1.0)), without, steps=10)
    assert torch.equal(flat(without), flat(Regression())), "without a scale no gradient should be left"
    plugin = fp16(ConservativeGradScaler(preset="tiny-loss", device="cpu"))
    train(plugin, found, steps=10)
    assert plugin.skipped_steps == 0
    assert distance(found, expected) < CLOSE, "with a scale it should train as in float32"


def test_recovers_from_a_first_scale_that_is_too_large() -> None:
    plugin = fp16(ConservativeGradScaler(init_scale=2.0**24, device="cpu"))
    found, expected = Scaled(1e3), Scaled(1e3)
    seen = train(plugin, found, steps=30)
    skipped = int(plugin.skipped_steps)
    assert 5 <= skipped <= 20
    assert seen.scales == [2.0 ** (24 - min(step + 1, skipped)) for step in range(30)], "it does not fall till it fits"
    train(LowBitPrecision("bf16", compute_dtype="fp32"), expected, steps=30 - skipped)
    assert distance(found, expected) < CLOSE, "after the overflows it should train as in float32"


# --- checkpoints ------------------------------------------------------------------------------------------------------

OVERFLOWS = (3, 5)
SCALERS: dict[str, Callable[[], GradScaler]] = {
    "conservative": lambda: moving(growth_interval=3, hysteresis=2, cooldown=1),
    "torch's": lambda: GradScaler("cpu", **MOVING),
}


def run(plugin: Any, steps: int, model: Regression | None = None, **kwargs: Any) -> Regression:
    """Trains in epochs of one step, and leaves a checkpoint."""
    model = model or Overflowing(OVERFLOWS)
    made = trainer(plugin, max_steps=steps, limit_train_batches=1)
    made.fit(model, **kwargs)
    made.save_checkpoint("x.ckpt")
    return model


def checkpoint() -> dict[str, Any]:
    return torch.load("x.ckpt", weights_only=True)


@pytest.mark.fast("5-conservative", "4-torch's")
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("cut", [3, 4, 5, 6])  # just before an overflow, after it, and between two
def test_a_resumed_run_equals_the_uninterrupted_one(cut: int, scaler: str) -> None:
    def plugin() -> LowBitPrecision:
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


def test_the_scale_of_a_checkpoint_matters() -> None:
    """Else the test above would prove nothing."""
    run(fp16(SCALERS["conservative"]()), 4)
    found = checkpoint()["lightning_lowbit"]["scaler"]
    fresh = SCALERS["conservative"]().state_dict()
    differing = {key for key in fresh if fresh[key] != found[key]}
    assert differing == {"scale", "_growth_tracker", "_tolerated"}


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_of_bf16_goes_on_in_fp16_and_back() -> None:
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
def test_a_scale_is_that_of_another_class_within_the_bounds_of_this_one() -> None:
    run(fp16(GradScaler("cpu", **{**MOVING, "init_scale": 2.0**14})), 3, Regression())
    taken, bounded = moving(), moving(cap=2.0**12)
    run(fp16(taken), 3, Regression(), ckpt_path="x.ckpt")
    assert (taken.get_scale(), taken._get_growth_tracker()) == (2.0**15, 1)
    run(fp16(bounded), 3, Regression(), ckpt_path="x.ckpt")
    assert bounded.get_scale() == 2.0**12
    back = GradScaler("cpu")
    run(fp16(back), 3, Regression(), ckpt_path="x.ckpt")
    assert back.get_scale() == 2.0**12


# --- delayed scaling --------------------------------------------------------------------------------------------------


def amaxes(saved: dict[str, Any], scale: float) -> dict[str, Tensor]:
    """Histories of the loss itself: those of output gradients hold that of the scaled one."""
    return {key: history / scale if key.endswith("_g") else history for key, history in saved["amax_history"].items()}


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_of_gradients_follow_the_scale(algorithm: str) -> None:
    """To the bit: a power of two moves no digit, of the histories nor of what is quantized with them."""

    def plugin(scaler: GradScaler) -> LowBitPrecision:
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
def test_histories_of_a_checkpoint_follow_the_scale(
    first: Callable[[], GradScaler] | None, then: Callable[[], GradScaler] | None
) -> None:
    """A run that goes on with another scale than the checkpoint's: gradients are of another size, amaxes too."""

    def plugin(make: Callable[[], GradScaler] | None) -> LowBitPrecision:
        return FP8Precision(history=4, compute_dtype="fp16" if make else "bf16", scaler=make() if make else None)

    def scale(plugin: LowBitPrecision) -> float:
        return 1.0 if plugin.scaler is None else plugin.scaler.get_scale()

    before, after = plugin(first), plugin(then)
    run(before, 2, Regression())
    expected = amaxes(state(before), scale(before))
    trainer(after, max_steps=2, limit_train_batches=1).fit(Regression(), ckpt_path="x.ckpt")
    assert scale(after) != scale(before)
    assert_same(amaxes(state(after), scale(after)), expected, "histories")


# --- other ways to train ----------------------------------------------------------------------------------------------


class Absent(Regression):
    """Has no loss in some training steps."""

    def __init__(self, *absent: int) -> None:
        super().__init__()
        self.absent = absent

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.absent else loss


@pytest.mark.pairwise(1)
@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [lambda: moving(), lambda: GradScaler("cpu", **MOVING)], ids=["conservative", "torch"])
@pytest.mark.parametrize("absent", [(0,), (0, 1), (3,), (2, 3)], ids=str)
def test_steps_without_a_loss(absent: tuple[int, ...], make: Callable[[], GradScaler], accumulate: int) -> None:
    """As without a scale: the optimizer gets what the other micro-batches left, or nothing."""
    plugin = fp16(make())
    found = train(plugin, Absent(*absent), steps=4, accumulate_grad_batches=accumulate)
    assert plugin.skipped_steps == 0
    expected = train(LowBitPrecision("bf16"), Absent(*absent), steps=4, accumulate_grad_batches=accumulate)
    moves = [
        [not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False)]
        for weights in ([flat(Regression()), *seen.weights] for seen in (found, expected))
    ]
    assert moves[0] == moves[1], "other steps than in bf16 move the weights"
    assert any(moves[0])


def test_manual_optimization_with_two_optimizers() -> None:
    model, plugin = GAN(), FP4Precision(compute_dtype="fp16", scaler=moving())
    before = [p.detach().clone() for p in model.parameters()]
    trainer(plugin, max_steps=6, limit_train_batches=3).fit(model)
    assert (plugin.step, plugin.skipped_steps.item()) == (6, 0), "each step of each optimizer counts"
    for old, (name, new) in zip(before, model.named_parameters(), strict=True):
        assert torch.isfinite(new).all()
        if name != "critic.bias":  # cancels in the critic's loss
            assert not torch.equal(old, new), f"{name} has not moved"


class Manual(Overflowing):
    """Manual optimization, by two optimizers with the gradients of one backward pass."""

    def __init__(self, at: Collection[int] = ()) -> None:
        super().__init__(at)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(8 * batch_idx, 1.0))
        first.step()
        second.step()

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(p, 0.05) for p in (self.first.parameters(), [*self.mlp.parameters(), *self.head.parameters()])]


def test_two_optimizers_share_a_backward_pass() -> None:
    """Also where the scale changes between their steps: gradients have that of the backward pass."""

    def weights(scaler: GradScaler) -> Tensor:
        model = Manual()
        trainer(fp16(scaler), max_steps=8, limit_train_batches=4).fit(model)
        return flat(model)

    assert torch.equal(weights(moving(growth_interval=1, cap=2.0**14)), weights(static())), "a scale is left in"


class ClippedByHand(Manual):
    """Clips one of two optimizers by hand, before or after the backward pass of the other.

    Attributes:
        norms: of both optimizers' gradients, as they step.
    """

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        x = torch.ones(2, 16)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.first(x).float().square().mean())
        if self.between:
            self.clip_gradients(first, gradient_clip_val=1e-3)
        self.manual_backward(self.head(x).float().square().mean())
        if not self.between:
            self.clip_gradients(first, gradient_clip_val=1e-3)
        first.step()
        second.step()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(found).item())


@pytest.mark.parametrize("between", [False, True])
def test_clipping_by_hand_clips_true_gradients(between: bool) -> None:
    """Without a step in between, so that the scale moves only after both."""

    def norms(scaler: GradScaler) -> list[float]:
        model = ClippedByHand(between)
        trainer(fp16(scaler), max_steps=8, limit_train_batches=4).fit(model)
        return model.norms

    found = norms(moving(growth_interval=1, cap=2.0**12))
    assert found == norms(static(1.0)), "a scale is left in"
    assert found[::2] == pytest.approx([1e-3] * 4, rel=1e-3), "those that are clipped"
    assert min(found[1::2]) > 0.1, "those that are not"


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda p: SGD(p, 0.05), 0),
        (lambda p: AdamW(p, lr=1e-3), 0),
        (lambda p: AdamW(p, lr=1e-3, fused=True), 0),
        (lambda p: SGD(p, 0.05, momentum=0.9, fused=True), 1),  # until it has a momentum
        (lambda p: StableSPAM(p), 0),
    ],
)
def test_the_host_waits_no_more_often_than_with_lightnings_plugin(
    make: Callable[[Any], Optimizer], own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are read between backward pass and end of the step, over eight steps of which none is skipped."""
    read: list[str] = []
    for name in ("item", "__bool__", "tolist"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, name=name, of=original: (read.append(name), of(self))[1])
    counts = []
    for plugin in (MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", **MOVING)), fp16(moving())):
        model = Overflowing(make=make)
        monkeypatch.setattr(model, "log", lambda *_, **__: None)
        monkeypatch.setattr(plugin, "optimizer_step", watched(plugin.optimizer_step, read))
        trainer(plugin, max_steps=8, limit_train_batches=8).fit(model)
        counts.append(len(plugin.optimizer_step.found))
    assert counts[1] <= counts[0] + own, f"read {counts[1]} numbers, Lightning's {counts[0]}"


def watched(step: Callable[..., Any], read: list[str]) -> Any:
    """An optimizer step that notes what was read in it, its closure left out."""
    found: list[str] = []

    def run(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        def closed() -> Any:
            result = closure()
            read.clear()
            return result

        result = step(optimizer, model, closed, **kwargs)
        found.extend(read)
        return result

    run.found = found  # type: ignore[attr-defined]
    return run


def test_parameters_in_float16_are_refused_unless_they_are_frozen() -> None:
    model = Regression()
    model.mlp.half().requires_grad_(False)
    model.head.half()
    with pytest.raises(ValueError, match=r"parameters in float32.* head.weight is in float16.*Call model.float\(\)"):
        trainer(fp16()).fit(model)
    assert type(model.head) is torch.nn.Linear, "a refused model has been changed"


def test_a_run_that_broke_off_in_a_step_leaves_nothing_behind() -> None:
    class Breaks(Overflowing):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            if self.trainer.global_step == 3:
                raise RuntimeError("in the midst of a step")

    plugin = fp16(moving())
    with pytest.raises(RuntimeError, match="in the midst"):
        train(plugin, Breaks())
    assert_same(train(plugin).scalers, train(fp16(moving())).scalers, "scaler")


def test_two_plugins_with_one_scaler_start_each_from_the_beginning() -> None:
    scaler = moving()
    plugins = [fp16(scaler), fp16(scaler)]
    first, second = (train(plugin, Overflowing((1, 4))) for plugin in plugins)
    assert_same(second.scalers, first.scalers, "scaler")
    assert_same(second.weights, first.weights, "weights")


def test_a_checkpoint_without_the_plugin_says_where_the_scale_starts() -> None:
    model = Overflowing()
    made = trainer(MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=4.0)))
    made.fit(model)
    made.save_checkpoint("other.ckpt")
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit .* The loss scale starts at 1024."):
        trainer(fp16(moving()), max_steps=3).fit(Overflowing(), ckpt_path="other.ckpt", weights_only=True)


def test_lbfgs_is_refused() -> None:
    model = Overflowing(make=torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match=r"LBFGS .* compute_dtype='bf16' or 'fp32', or use another"):
        trainer(fp16()).fit(model)


@pytest.mark.parametrize("make", [lambda: moving(hysteresis=2), lambda: GradScaler("cpu", **MOVING)])
def test_one_plugin_in_two_runs_starts_each_from_the_beginning(make: Callable[[], GradScaler]) -> None:
    plugin = FP8Precision(history=3, compute_dtype="fp16", scaler=make())
    first = train(plugin, Overflowing((1, 4)))
    second = train(plugin, Overflowing((1, 4)))
    assert plugin.skipped_steps == 2, "those of the first run are counted"
    assert_same(second.scalers, first.scalers, "scaler")
    assert_same(second.saved, first.saved, "state")
    assert_same(second.weights, first.weights, "weights")


def test_fit_validate_fit_on_one_trainer() -> None:
    plugin, model = fp16(moving()), Overflowing((1,))
    made = trainer(plugin, limit_train_batches=4, limit_val_batches=2, num_sanity_val_steps=0)
    made.fit(model)
    before = state(plugin)
    made.validate(model, verbose=False)
    made.predict(model)
    assert_same(state(plugin), before, "evaluation moves it: state")
    assert torch.stack(model.val_losses).isfinite().all()
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(model)
    assert (plugin.step, plugin.skipped_steps.item()) == (4, 1)


# --- YAML -------------------------------------------------------------------------------------------------------------


class Doubling(GradScaler):
    """A user's own scaler."""

    def __init__(self, interval: int = 7) -> None:
        super().__init__("cpu", growth_interval=interval)


CONSERVATIVE = {"preset": "quantized-fine-tuning", "growth_factor": 2.0, "floor": 4.0, "cooldown": 5, "device": "cpu"}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("plugin", ["FP4Precision", "LowBitPrecision"])
@pytest.mark.parametrize(
    ("scaler", "expected"),
    [
        (None, ConservativeGradScaler()),
        ({"class_path": "lightning_lowbit.ConservativeGradScaler"}, ConservativeGradScaler()),
        (
            {"class_path": "lightning_lowbit.ConservativeGradScaler", "init_args": CONSERVATIVE},
            ConservativeGradScaler(**CONSERVATIVE),
        ),
        ({"class_path": "lightning_lowbit.StaticGradScaler", "init_args": {"scale": 8}}, StaticGradScaler(8)),
        (
            {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu", "growth_interval": 9}},
            GradScaler("cpu", growth_interval=9),
        ),
        ({"class_path": "tests.precision.test_fp16.Doubling", "init_args": {"interval": 3}}, Doubling(3)),
    ],
)
def test_from_yaml(monkeypatch: pytest.MonkeyPatch, plugin: str, scaler: Any, expected: GradScaler) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    arguments = {"casts": "nvfp4", "compute_dtype": "fp16"} | ({} if scaler is None else {"scaler": scaler})
    config = yaml.safe_load(
        yaml.safe_dump(
            {
                "seed_everything": 1,
                "trainer": {
                    "plugins": {"class_path": f"lightning_lowbit.{plugin}", "init_args": arguments},
                    "logger": False,
                    "enable_checkpointing": False,
                },
            }
        )
    )
    cli = LightningCLI(BoringModel, args=config, run=False, save_config_callback=None, auto_configure_optimizers=False)
    found = cli.trainer.precision_plugin.scaler
    assert (type(found).__module__, type(found).__name__) == (type(expected).__module__, type(expected).__name__)
    assert found.state_dict() == expected.state_dict()
    for name in ("floor", "cap", "cooldown", "hysteresis"):
        assert getattr(found, name, None) == getattr(expected, name, None), f"{name} is not the one given"


# --- without this package's plugin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 4, 6])
def test_a_scaler_alone_in_lightnings_own_precision(cut: int) -> None:
    def plugin() -> MixedPrecision:
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


# --- what it is, and what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_says_that_it_is_fp16(name: str) -> None:
    plugin = PRECISIONS[name](compute_dtype="fp16")
    assert compute_dtype(plugin) == plugin.compute_dtype == torch.float16
    assert plugin.precision == "16-mixed"
    config = plugin.mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (torch.float16,) * 3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_dtypes_have_no_scaler(dtype: str) -> None:
    assert LowBitPrecision("nvfp4", compute_dtype=dtype).scaler is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaler": moving()}, r"for compute_dtype='fp16'; got 'bf16'.* leave out scaler=ConservativeGradScaler, or"),
        ({"compute_dtype": "fp32", "scaler": static()}, r"got 'fp32'.* leave out scaler=StaticGradScaler, or train"),
        ({"compute_dtype": "fp16", "scaler": 2.0**16}, r"scaler is a torch.amp.GradScaler, or None; got 65536.0"),
        ({"compute_dtype": "fp16", "scaler": GradScaler}, r"scaler is a torch.amp.GradScaler, or None; got <class"),
        ({"compute_dtype": "fp16", "scaler": "default"}, r"scaler is a torch.amp.GradScaler, or None; got 'default'"),
        (
            {"compute_dtype": "fp16", "scaler": GradScaler("cpu", enabled=False)},
            r"The scaler GradScaler is disabled, and fp16 needs one.* device='cpu'; or leave out enabled=False",
        ),
        (
            {"compute_dtype": "fp16", "scaler": ConservativeGradScaler(device="cpu", enabled=False)},
            r"The scaler ConservativeGradScaler is disabled",
        ),
    ],
)
def test_bad_arguments_say_what_to_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP4Precision(**arguments)


def test_a_sharded_scaler_needs_ranks() -> None:
    model = Regression()
    with pytest.raises(
        MisconfigurationException,
        match=r"ShardedConservativeGradScaler needs .*SingleDeviceStrategy has none.*the plugin asks all ranks",
    ):
        trainer(FP4Precision(compute_dtype="fp16", scaler=ShardedConservativeGradScaler(device="cpu"))).fit(model)
    assert type(model.head) is torch.nn.Linear, "a refused model has been changed"
