"""Options of every optimizer: groups, schedulers, learning rates, and what is refused."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from lightning_lowbit.optim import Adaptive
from tests.optim.conformance.entries import ENTRIES, LR, each_entry, entries, every_entry
from tests.optim.parameters import assert_same, make_parameters, snapshot, train
from tests.tables import each


@each_entry
def test_options_may_be_a_group_s(entry):
    parameters, grouped = entry.parameters(), entry.parameters()
    optimizer = entry(parameters)
    if entry.base is None:
        of_group = entry.kind([{"params": grouped, "lr": LR, **entry.options}])
    else:
        of_group = Adaptive(entry.make_base([{"params": grouped, **entry.options}]))
    of_group.defaults.clear()  # what is read from there is missed
    train(optimizer, parameters, range(6))
    train(of_group, grouped, range(6))
    assert_same(snapshot(of_group, grouped), snapshot(optimizer, parameters), "options of a group are not honored")


@each_entry
def test_groups_train_with_their_own_options(entry):
    parameters, twins = entry.parameters(), entry.parameters()
    optimizer = entry([{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 0.0}])
    twin = entry([{"params": twins[:-1]}, {"params": twins[-1:], "lr": LR}])
    train(optimizer, parameters, range(3))
    train(twin, twins, range(3))
    assert torch.equal(parameters[-1], entry.parameters()[-1]), "a group with lr=0 moved"
    assert_same(parameters[:-1], twins[:-1], "the lr of a group reaches another")
    optimizer.param_groups[1]["lr"] = LR
    train(optimizer, parameters, range(3, 4))
    assert not torch.equal(parameters[-1], entry.parameters()[-1]), "lr is not read from the group at each step"


@each_entry
def test_a_group_added_in_mid_training_is_one_without_gradients_before(entry):
    parameters, twins = entry.parameters(), entry.parameters()
    optimizer, twin = entry(parameters[3:]), entry([{"params": twins[3:]}, {"params": twins[:3], "lr": 0.5}])
    train(optimizer, parameters[3:], range(3))
    train(twin, twins[3:], range(3))
    optimizer.add_param_group({"params": parameters[:3], "lr": 0.5})
    train(optimizer, parameters, range(3, 8))
    train(twin, twins, range(3, 8))
    assert_same(snapshot(optimizer, parameters), snapshot(twin, twins), "the added group trains differently")
    assert optimizer.state[parameters[-1]]["steps"] == 8 and optimizer.state[parameters[0]]["steps"] == 5


SCHEDULERS = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.1, total_steps=8, cycle_momentum=bool({"betas", "momentum"} & optimizer.defaults.keys())
    ),
}


@pytest.mark.pairwise(1)
@every_entry
@pytest.mark.parametrize("lr_is_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_are_followed(entry, schedule, lr_is_tensor):
    """The same values, put into the groups by hand, give the same trajectory; as they change, that means they count."""
    lr = torch.tensor(LR) if lr_is_tensor and entry.takes_tensor_lr else LR
    (parameters, optimizer), (by_hand, other) = entry.new(lr=lr), entry.new()
    scheduler = SCHEDULERS[schedule](optimizer)
    rates = []
    for step in range(4):
        options = {name: copy.deepcopy(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
        rates.append(float(options["lr"]))
        other.param_groups[0].update({name: options[name] for name in ("lr", "betas", "momentum") if name in options})
        train(optimizer, parameters, [step])
        scheduler.step()
        train(other, by_hand, [step])
    assert len(set(rates)) >= 3, f"the scheduler's rates did not reach the group: {rates}"
    assert_same(parameters, by_hand, f"{schedule} with rates {rates} differs")


@pytest.mark.pairwise(1)
@entries(lambda entry: entry.takes_tensor_lr)
def test_lr_may_be_a_tensor(entry, code):
    lr = 2.0**-7  # the same in all dtypes
    with_float, with_tensor = entry.parameters(), entry.parameters()
    train(entry(with_float, lr=lr), with_float, range(6))
    train(entry(with_tensor, lr=torch.tensor(lr)), with_tensor, range(6))
    for p, q in zip(with_float, with_tensor, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7, msg=lambda text: f"a tensor as lr changes it: {text}")


@each("kind", dict.fromkeys(entry.kind for entry in ENTRIES.values()))
def test_a_refused_group_leaves_no_traces(kind):
    parameters, twins = make_parameters(shapes=[(2, 2), (2, 2)]), make_parameters(shapes=[(2, 2), (2, 2)])
    runs = []
    for refuses, (parameter, added) in ((True, parameters), (False, twins)):
        first, second = [("first.weight", parameter)], [("second.weight", added)]
        optimizer = kind(torch.optim.SGD(first) if kind is Adaptive else first)
        if refuses:
            with pytest.raises(ValueError, match=rf"{kind.__name__} needs gamma1 to be .*, got 1.0; "):
                optimizer.add_param_group({"params": second, "gamma1": 1.0})
        optimizer.add_param_group({"params": second})  # it is not half there
        train(optimizer, [parameter, added], range(2))
        runs.append(snapshot(optimizer, [parameter, added]))
    assert_same(*runs, "a refused group left traces")


def test_a_refused_wrapper_leaves_the_optimizer_as_it_was():
    wrapped = torch.optim.AdamW(make_parameters())
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(ValueError, match="Adaptive needs gamma1"):
        Adaptive(wrapped, gamma1=1.0)
    assert wrapped.state_dict() == before, "a refused wrapper wrote into the groups"
