"""State of the scalers: checkpoints, no wait for the device, and their former module."""

import copy
import importlib
import pickle
import sys
from functools import partial

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Parameter
from torch.optim import SGD, AdamW

import lightning_lowbit
from lightning_lowbit import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    StaticGradScaler,
)
from lightning_lowbit.precision import grad_scalers
from lightning_lowbit.precision.grad_scalers import overflow, share_overflow
from tests.operations import Operations
from tests.optim.parameters import NoHostSync
from tests.precision.grad_scalers.scalers import INF, drive, make, steps
from tests.tables import each

REMEMBERING = {"growth_factor": 2, "growth_interval": 3, "cooldown": 1, "hysteresis": 3}
LONG = steps("..x.....xx....xxx......x")


def through_state(scaler, path, before=""):
    torch.save(scaler.state_dict(), path)
    other = make(type(scaler), **REMEMBERING)
    list(drive(other, steps(before)))
    other.load_state_dict(torch.load(path, weights_only=True))
    return other


THROUGH = {
    "state": through_state,
    "state of a used one": partial(through_state, before="xxx.."),
    "deepcopy": lambda scaler, _: copy.deepcopy(scaler),
    "pickle": lambda scaler, _: pickle.loads(pickle.dumps(scaler)),
}


@pytest.mark.fast("state of a used one-ShardedConservativeGradScaler", "pickle-ConservativeGradScaler")
@pytest.mark.parametrize("cls", [ConservativeGradScaler, ShardedConservativeGradScaler])
@pytest.mark.parametrize("through", THROUGH)
def test_a_resumed_run_is_the_uninterrupted_one(cls, through, tmp_path):
    expected = list(drive(make(cls, **REMEMBERING), LONG))
    for cut in range(len(LONG)):
        scaler = make(cls, **REMEMBERING)
        found = list(drive(scaler, LONG[:cut]))
        resumed = THROUGH[through](scaler, tmp_path / "state.pt")
        assert resumed is not scaler
        if cut:
            list(drive(scaler, steps("xx")))  # the first one goes on by itself
        assert [*found, *drive(resumed, LONG[cut:])] == expected, f"cut before step {cut}"


def test_a_state_of_torch_and_back():
    theirs = make(GradScaler, growth_interval=10, init_scale=512.0)
    list(drive(theirs, steps("x....")))
    ours = make(ConservativeGradScaler, growth_interval=6, hysteresis=2, cooldown=0, growth_factor=1.5, init_scale=64)
    list(drive(ours, steps("x")))  # whose hysteresis a state without one fills again
    ours.load_state_dict(theirs.state_dict())
    assert list(drive(ours, steps("..xx"))) == [(256, 5), (384, 0), (384, 0), (192, 0)]
    theirs.load_state_dict(ours.state_dict())
    # torch takes scale, tracker and settings of the state
    assert list(drive(theirs, steps("......"))) == [(192, n) for n in range(1, 6)] + [(288, 0)]


def test_settings_are_those_of_the_constructor():
    saved = make(ConservativeGradScaler, init_scale=2.0**20, growth_factor=3, backoff_factor=0.1, growth_interval=50)
    list(drive(saved, [False] * 40))
    scaler = make(ConservativeGradScaler, cap=2.0**18, growth_factor=1.25, backoff_factor=0.75, growth_interval=5)
    scaler.load_state_dict(saved.state_dict())
    assert scaler.get_scale() == 2.0**18, "a scale from a checkpoint has the bounds of this run"
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.25, 0.75, 5)
    found = list(drive(scaler, steps("x" + "." * 10)))
    assert found[0] == (0.75 * 2.0**18, -5)
    assert found[-1] == (0.9375 * 2.0**18, 0)
    floored = make(ConservativeGradScaler, init_scale=2.0**22, floor=2.0**21)
    floored.load_state_dict(saved.state_dict())
    assert floored.get_scale() == 2.0**21


@each(
    "saved, before, run, used, after, scales",
    [
        # A tracker beyond a shorter interval: the first step reaches the interval.
        ({"growth_interval": 50}, "." * 40, {"growth_interval": 5, "growth_factor": 2}, "", "..", [17, 17]),
        ({"growth_interval": 50}, "." * 40, {"growth_interval": 5, "growth_factor": 2}, ".", "..", [17, 17]),
        # A cooldown of 2 and an interval of 5 are at most 7 steps, and hysteresis is at most that of the run.
        ({}, "x", {"growth_interval": 5, "cooldown": 2, "growth_factor": 2}, "", "." * 7, [15] * 6 + [16]),
        ({"hysteresis": 5}, "", {"hysteresis": 2}, "", "xx", [16, 15]),
    ],
)
def test_counters_of_a_checkpoint_have_the_bounds_of_the_run(saved, before, run, used, after, scales):
    saved, scaler = make(ConservativeGradScaler, **saved), make(ConservativeGradScaler, **run)
    saved.scale(torch.zeros(()))
    list(drive(saved, steps(before)))
    list(drive(scaler, steps(used)))
    scaler.load_state_dict(saved.state_dict())
    assert [scale for scale, _ in drive(scaler, steps(after))] == [2.0**exponent for exponent in scales]


def test_an_empty_state_raises_as_torch_does():
    for cls in (ConservativeGradScaler, StaticGradScaler, GradientNormGradScaler):
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            make(cls).load_state_dict({})


def host_reads(scaler, make_optimizer, overflowed):
    """How often the host would wait for a device, by part of a step."""
    parameters = [Parameter(torch.ones(3)), Parameter(torch.ones(2, 2)), Parameter(torch.ones(1))]
    optimizer = make_optimizer(parameters)
    reads = {}
    for _ in range(2):  # the first step makes the scale
        for p in parameters[:2]:
            p.grad = torch.full_like(p, INF if overflowed else 1.0)
        parts = {
            "scale": lambda: scaler.scale(torch.ones(())),
            "unscale_": lambda: scaler.unscale_(optimizer),
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
        }
        for name, part in parts.items():
            with Operations() as seen:
                part()
            reads[name] = sum(seen.counts[operation] for operation in NoHostSync.FORBIDDEN)
    return reads


@each("overflowed", [False, True])
@each(
    ("cls", "theirs"),
    [
        (ConservativeGradScaler, GradScaler),
        (StaticGradScaler, GradScaler),
        (GradientNormGradScaler, GradScaler),
        (ShardedConservativeGradScaler, ShardedGradScaler),
        (ShardedGradientNormGradScaler, ShardedGradScaler),
    ],
)
def test_the_host_waits_no_more_often_than_with_torch(cls, theirs, overflowed):
    made = [lambda p: SGD(p, lr=0.1)]
    if theirs is GradScaler:  # torch's sharded one does not go with a fused optimizer after `unscale_`
        made.append(lambda p: AdamW(p, lr=0.1, fused=True))
    for make_optimizer in made:
        expected = host_reads(make(theirs), make_optimizer, overflowed)
        assert host_reads(make(cls), make_optimizer, overflowed) == expected
        if theirs is GradScaler:  # the sharded one reads in its update on the CPU, and nowhere else
            assert (expected["scale"], expected["unscale_"], expected["update"]) == (0, 0, 0)


def test_nothing_is_copied_from_the_host():
    """Not counted above: numbers that travel to the device and are waited for."""
    scaler, parameter = make(GradientNormGradScaler), Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        with NoHostSync():
            scaler.scale(parameter)
            scaler.unscale_(optimizer)
            share_overflow(scaler, optimizer, parameter.device, over_ranks=False)
            assert overflow(scaler, optimizer) is not None
            scaler.update()


def test_the_former_module_of_the_scalers_warns_and_has_the_same_classes():
    sys.modules.pop("lightning_lowbit.scalers", None)
    with pytest.warns(DeprecationWarning, match="import scalers from lightning_lowbit"):
        former = importlib.import_module("lightning_lowbit.scalers")
    names = [name for name in lightning_lowbit.__all__ if name.endswith("GradScaler")]
    assert len(names) == 6
    for name in names:
        assert getattr(former, name) is getattr(lightning_lowbit, name) is getattr(grad_scalers, name)
