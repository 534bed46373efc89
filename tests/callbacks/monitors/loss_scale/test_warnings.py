"""Warnings of the loss scale monitor, and what it refuses."""

import pytest
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import LossScaleMonitor, LowBitPrecision, StaticGradScaler
from tests.callbacks.monitors.loss_scale.runs import FALLS, conservative, lowbit, mixed, silent, torchs, trainer, warned
from tests.lightning_imports import BoringModel
from tests.tables import each

BOUNDS = {"falls": 3, "within": 4}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("make", [conservative, torchs])
@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_too_many_falls(make, plugin):
    """Three in the steps 2 to 7, which are six; and, a step later, not."""
    warned(
        "Loss scale, step 7: 3 overflows came within 6 optimizer steps, where one now and then is usual; it is "
        "now 128. Look for what grows: a learning rate too high or a warm-up too short, data or activations with "
        "outliers. Clipping comes too late for that. Where the device has bf16, compute_dtype='bf16' needs no scale.",
        make(growth_interval=100),
        {1, 4, 6},
        plugin,
        **FALLS,
    )
    silent(make(growth_interval=100), {1, 4, 7}, plugin, **FALLS)


@pytest.mark.fast("5-10")
@pytest.mark.parametrize(("every", "at"), [(5, 10), (50, 20)])  # the first logged step after them, or the last one
def test_too_many_falls_between_two_logged_steps(every, at):
    """What falls where nobody looks is told of when somebody does, also where single falls come after it."""
    options = {**FALLS, "log_every_n_steps": every, "max_steps": 20}
    for later in (set(), {18}):
        scale = 128 / 2 ** (len(later) if at == 20 else 0)
        match = f"Loss scale, step {at}: 3 overflows came within 6 optimizer steps, where one now and then is "
        match += f"usual; it is now {scale:g}."
        warned(match, conservative(growth_interval=100), {1, 4, 6} | later, **options)
    silent(conservative(growth_interval=100), {1, 4, 7, 18}, **options)


@pytest.mark.fast("lowbit")
@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_overflows_that_are_tolerated_are_no_falls(plugin):
    silent(conservative(hysteresis=3), {1, 2, 3}, plugin, falls=2)
    warned("Loss scale, step 5: 2 overflows", conservative(hysteresis=3), {1, 2, 3, 4}, plugin, falls=2)


def test_at_its_floor_overflows_count():
    """It leaves the floor in between, so that there is no warning of that."""
    floor = {"init_scale": 4, "floor": 4, "growth_interval": 2, "cooldown": 0}
    warned("Loss scale, step 7: 3 overflows came within 6 optimizer steps", conservative(**floor), {1, 4, 6}, **FALLS)
    silent(conservative(**floor), {1, 4, 7}, **FALLS)
    leaves = conservative(init_scale=1, growth_interval=2, growth_factor=2.0, cooldown=0)
    silent(leaves, {2, 5, 8}, falls=3, within=3, max_steps=10)  # at it in the steps 1, 3, 4, 6, 7, 9 and 10


@pytest.mark.fast("mixed")
@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_a_static_scale_is_at_no_bound_and_counts_overflows(plugin):
    advice = "Loss scale, step 3: 3 overflows came within 6 optimizer steps at 1024, where it stays: lower it"
    warned(advice, StaticGradScaler(2.0**10, device="cpu"), {0, 1, 2, 3}, plugin, **FALLS)
    silent(StaticGradScaler(1, device="cpu"), {1}, plugin, falls=3, within=3)


@each(
    "make, floor",
    [
        (lambda: conservative(init_scale=16, floor=8, growth_interval=100), 8),
        (lambda: torchs(init_scale=2.0, growth_interval=100), 1),
        (lambda: torchs(init_scale=1.0, growth_interval=100), 1),  # falls below 1, where it has no floor
    ],
    fast=1,
)
def test_the_floor(make, floor):
    first = 2 if make().get_scale() > floor else 1  # the first step at the floor
    at = first + BOUNDS["within"] - 1
    advice = f"Loss scale, step {at}: it has been at its floor of {floor} for 4 optimizer steps: gradients leave the "
    advice += "range of fp16 by themselves. The model needs the range of float32: train it with compute_dtype='bf16' "
    warned(f"{advice}or 'fp32'; or lower", make(), {1}, **BOUNDS)
    silent(make(), {1}, **BOUNDS, max_steps=at - 1)


def test_the_cap():
    def make():
        return conservative(init_scale=32, cap=64, growth_interval=2)

    match = "Loss scale, step 7: it has been at its cap of 64 for 4 optimizer steps, and nothing overflows. If "
    match += "gradients are that small, raise the cap; if they are 0, look for what does not depend on the parameters."
    warned(match, make(), (), **BOUNDS)  # 48 in the second step, 64 in the fourth
    silent(make(), (), **BOUNDS, max_steps=6)
    leaves = conservative(init_scale=64, cap=64, growth_interval=2, growth_factor=2.0, cooldown=0)
    silent(leaves, {2, 5, 8}, **BOUNDS, max_steps=10)  # at its cap in the steps 1, 2, 5 and 8
    silent(torchs(init_scale=2.0, growth_interval=1), (), **BOUNDS)  # torch's own has none


@each("plugin, message", [
    (lambda: [LowBitPrecision("bf16", compute_dtype="bf16")], "LowBitPrecision with precision 'bf16-mixed' has none"),
    (lambda: [mixed(GradScaler("cpu", enabled=False))], "MixedPrecision with precision '16-mixed' has none"),
    (list, "Precision with precision '32-true' has none"),
])  # fmt: skip
def test_without_a_scaler(plugin, message):
    advice = "compute_dtype='fp16'.* or leave out the callback"
    with pytest.warns(UserWarning, match=f"Not measured: LossScaleMonitor needs a scale.*{message}.* {advice}"):
        trainer(LossScaleMonitor(), plugins=plugin(), limit_val_batches=0).fit(BoringModel())
