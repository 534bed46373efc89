"""The schedules: every step of each, and what all of them share."""

import inspect
import re

import pytest
import torch

from lightning_lowbit.recipes.schedules import TwoStageLinear, WarmupCosine, WarmupSchedule
from tests.tables import each

SCHEDULES = WarmupSchedule.__subclasses__()
# Other values than the defaults, of each argument.
OTHERS = {"warmup_steps": 2, "total_steps": 100, "final_fraction": 0.5, "second_peak": 0.25, "at": 0.75}


def sgd(*peaks):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks])


def factors(schedule, steps):
    """Learning rates over the peak that the optimizer has in the next steps."""
    made = []
    for _ in range(steps):
        made.append(schedule.optimizer.param_groups[0]["lr"] / schedule.base_lrs[0])
        schedule.optimizer.step()
        schedule.step()
    return made


@each("schedule", SCHEDULES)
def test_warms_up_to_the_peak_of_each_group_and_then_falls(schedule):
    assert schedule(sgd(2.0, 0.5), 4, 12).get_last_lr() == [0.5, 0.125]
    for warmup in (0, 1, 4):
        made = factors(schedule(sgd(2.0), warmup, 12), 12)
        assert made[:warmup] == [(step + 1) / warmup for step in range(warmup)]
        assert made[warmup] == 1, "the decay begins at the peak"
        assert all(later < earlier for earlier, later in zip(made[warmup:], made[warmup + 1 :], strict=False)), made
        assert made[-1] > 0, "the last step has no learning rate"


@each("schedule", SCHEDULES)
def test_a_share_of_the_steps_is_that_many(schedule):
    """To the last digit, whatever the length, also where that comes after the first learning rate."""
    for share, total, steps in ((0.1, 400, 40), (0.1, 40, 4), (0.25, 12, 3), (0.1, 4, 0), (0, 12, 0)):
        for told_late in (False, True):
            made = schedule(sgd(2.0, 0.5), share, None if told_late else total)
            if told_late:
                made.set_total_steps(total)
            whole = schedule(sgd(2.0, 0.5), steps, total)
            assert made.get_last_lr() == whole.get_last_lr()
            assert factors(made, total + 2) == factors(whole, total + 2), (share, total)


@each("schedule", SCHEDULES)
def test_a_share_needs_a_length_and_leaves_a_learning_rate_in_a_tensor_there(schedule):
    made = schedule(sgd(1.0), 0.1)
    made.optimizer.step()
    with pytest.raises(ValueError, match=re.escape("is a share, 0.1, of a run whose length is not known: give total")):
        made.step()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(2.0))
    rate = optimizer.param_groups[0]["lr"]
    schedule(optimizer, 0.25).set_total_steps(16)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


@each("schedule", SCHEDULES)
def test_the_state_is_a_position_and_not_a_shape(schedule):
    first = schedule(sgd(2.0), 4, 12)
    factors(first, 5)
    state = first.state_dict()
    other = {name: OTHERS[name] for name in inspect.signature(schedule).parameters if name != "optimizer"}
    longer, uninterrupted = schedule(sgd(2.0), **other), schedule(sgd(2.0), **other)
    longer.load_state_dict(state)
    assert longer.last_epoch == 5
    assert {name: getattr(longer, name) for name in other} == other, "settings of another run"
    factors(longer, 1)  # the rate of the step at hand comes from the optimizer's checkpoint
    factors(uninterrupted, 6)
    assert factors(longer, 96) == factors(uninterrupted, 96)


def test_warmup_cosine():
    made = factors(WarmupCosine(sgd(2.0), warmup_steps=4, total_steps=8, final_fraction=0.1), 10)
    # cos 45° is 0.70710678
    expected = [0.25, 0.5, 0.75, 1, 1, 0.1 + 0.9 * (1.70710678 / 2), 0.55, 0.1 + 0.9 * (0.29289322 / 2), 0.1, 0.1]
    assert made == pytest.approx(expected)


def test_two_stage_linear():
    made = factors(TwoStageLinear(sgd(1.5), warmup_steps=4, total_steps=12), 14)
    first = [1 / 4, 2 / 4, 3 / 4, 1, 1, 7 / 8]
    second = [6 / 12, 5 / 12, 4 / 12, 3 / 12, 2 / 12, 1 / 12]  # two thirds of 6/8, 5/8, …
    assert made == pytest.approx([*first, *second, 0, 0])
    filled = factors(TwoStageLinear(sgd(1.0), warmup_steps=4, total_steps=8), 8)  # the warm-up is the first stage
    assert filled == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@each("at, total, stage", [(0.5, 12, 6), (0.07, 100, 7), (0.29, 100, 29), (0.5, 401, 200)])
def test_the_second_stage_starts_at_a_whole_step(at, total, stage):
    line = [1 - step / total for step in range(total)]
    for peak in (0.5, 1):
        (factor,) = TwoStageLinear(sgd(1.0), 0, total, second_peak=peak, at=at).lr_lambdas
        expected = line[:stage] + [value * peak for value in line[stage:]]
        assert [factor(step) for step in range(total)] == pytest.approx(expected)


@each("schedule", SCHEDULES)
def test_a_warm_up_that_does_not_fit(schedule):
    for warmup in (-1, 8, 9, 2.5):
        message = f"less than the 8 steps of the run; got {warmup}. Warm up for fewer steps."
        with pytest.raises(ValueError, match=re.escape(message)):
            schedule(sgd(1.0), warmup, 8)
        with pytest.raises(ValueError, match="warmup_steps must be at least 0"):
            schedule(sgd(1.0), warmup).set_total_steps(8)


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        (WarmupCosine, {"final_fraction": 1.5}, "final_fraction is the last learning rate over the peak, 0 to 1; got"),
        (WarmupCosine, {"final_fraction": -0.1}, "0 to 1; got -0.1"),
        (TwoStageLinear, {"second_peak": 0.0}, "second_peak is a fraction of the first peak, above 0 and at most 1"),
        (TwoStageLinear, {"second_peak": 1.5}, "at most 1; got 1.5. For 1e-3 after 1.5e-3 give 0.667."),
        (TwoStageLinear, {"second_peak": float("nan")}, "got nan"),
        (TwoStageLinear, {"at": 0.0}, "at is a fraction of all optimizer steps, between 0 and 1, both excluded; got 0"),
        (TwoStageLinear, {"at": 1.0}, "both excluded; got 1.0"),
        (TwoStageLinear, {"warmup_steps": 5}, "starts at step 4 of 8, but the first has to last for its warm-up of 5"),
        (TwoStageLinear, {"warmup_steps": 0, "at": 0.01}, "starts at step 0 of 8"),
    ],
)
def test_wrong_arguments(schedule, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule(sgd(1.0), **{"warmup_steps": 2, "total_steps": 8, **arguments})
