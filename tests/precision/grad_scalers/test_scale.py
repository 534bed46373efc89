"""The scale of the loss over steps: by the reference, by torch, by hand, by presets."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbit import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedConservativeGradScaler,
    ShardedStaticGradScaler,
    StaticGradScaler,
)
from lightning_lowbit.precision.grad_scalers import PRESETS, overflow
from tests.precision.grad_scalers.scalers import INF, NAN, PROFILE, drive, make, state_of, steps
from tests.references.scalers import Reference, float32
from tests.tables import each

#: By what they are called: this package's class, and torch's that it builds on. Sharded ones need a process group.
CLASSES = {"plain": (ConservativeGradScaler, GradScaler), "sharded": (ShardedConservativeGradScaler, ShardedGradScaler)}

OVERFLOWS = st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=40)

EDGES = [
    {"floor": 2.0**15, "cap": 2.0**17, "growth_interval": 1, "cooldown": 0},
    {"floor": 40000.0, "cap": 100000, "growth_interval": 2, "cooldown": 1, "hysteresis": 2},
    {"floor": 2.0**16, "cap": 2.0**16, "growth_interval": 1, "cooldown": 0},
    {"floor": 0, "cap": INF, "growth_interval": 1, "cooldown": 0},
    {"init_scale": 1, "growth_interval": 3, "cooldown": None},
    {"init_scale": 2.0**24, "growth_interval": 2, "hysteresis": 2, "cooldown": 1},
    {"init_scale": 0.1, "floor": 0.1, "cap": 0.3, "growth_interval": 2, "hysteresis": 2, "cooldown": 0},
]


def follow(overflows, setting, kind):
    reference = Reference(**setting)
    for step, found in enumerate(drive(make(CLASSES[kind][0], **setting), overflows)):
        reference.step(overflows[step])
        assert found == (reference.scale, reference.tracker), f"{kind} {setting}: scale and tracker after step {step}"
        assert float32(reference.floor) <= found[0] <= float32(reference.cap), f"{setting}: out of bounds, step {step}"


@st.composite
def drawn_settings(draw):
    low, start, high = sorted(draw(st.lists(st.integers(-3, 24), min_size=3, max_size=3)))
    return {
        "init_scale": 2.0**start,
        "floor": draw(st.sampled_from([0, 2.0**low])),
        "cap": 2.0**high,
        "growth_factor": draw(st.sampled_from([1.25, 1.5, 2.0, 5.0])),
        "backoff_factor": draw(st.sampled_from([0.125, 0.5, 0.875])),
        "growth_interval": draw(st.integers(1, 6)),
        "cooldown": draw(st.sampled_from([None, 0, 1, 2, 7])),
        "hysteresis": draw(st.integers(1, 4)),
    }


@pytest.mark.parametrize("kind", CLASSES)
@PROFILE
@given(OVERFLOWS, drawn_settings() | st.sampled_from(EDGES))
def test_any_sequence_of_overflows(kind, overflows, setting):
    follow(overflows, setting, kind)


def test_hysteresis_is_full_again_once_the_scale_grew():
    setting = {"growth_factor": 2, "growth_interval": 3, "cooldown": 0, "hysteresis": 2}
    found = [scale for scale, _ in drive(make(ConservativeGradScaler, init_scale=64, **setting), steps("xx..x...xx"))]
    assert found == [64, 32, 32, 32, 16, 16, 16, 32, 32, 16]
    at_cap = make(ConservativeGradScaler, init_scale=64, cap=64, **setting)
    found = [scale for scale, _ in drive(at_cap, steps("x...x..x...x"))]
    assert found == [64, 64, 64, 64, 64, 64, 64, 32, 32, 32, 64, 64], "at the cap growing counts as growing"


def test_the_defaults_grow_by_a_half_and_wait_twice_after_an_overflow():
    scaler = make(ConservativeGradScaler)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.5, 0.5, 2000)
    assert (scaler.floor, scaler.cap, scaler.cooldown, scaler.hysteresis) == (1, 2**24, None, 1)
    *_, last = drive(scaler, [True])
    assert last == (2.0**15, -2000), "after an overflow there are 4000 steps until the scale grows"


AS_TORCH = {"growth_factor": 2.0, "floor": 0, "cap": INF, "cooldown": 0, "hysteresis": 1}


@pytest.mark.parametrize("kind", CLASSES)
@PROFILE
@given(OVERFLOWS, st.integers(1, 5), st.sampled_from([2.0**16, 3.7, 1.0]), st.sampled_from([0.5, 0.3]))
@example([False] * 6, 1, 2.0**126, 0.5).via("what is too large for float32: torch's scalers differ, and so do ours")
@example([True] * 6, 1, 2.0**-147, 0.5).via("what falls to 0")
@example([True, False] * 10, 1, 1.0, 0.3)
def test_torch_to_the_bit(kind, overflows, interval, init_scale, backoff):
    shared = {"init_scale": init_scale, "growth_interval": interval, "backoff_factor": backoff}
    ours, theirs = (make(cls, **shared, **more) for cls, more in zip(CLASSES[kind], (AS_TORCH, {}), strict=True))
    for step, (found, expected) in enumerate(zip(drive(ours, overflows), drive(theirs, overflows), strict=True)):
        assert found == expected, f"scale and tracker after step {step} are not those of {type(theirs).__name__}"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_disabled_scaler_does_nothing(kind):
    for cls in (CLASSES[kind][0], GradientNormGradScaler, StaticGradScaler):
        scaler = make(cls, enabled=False)
        parameter = Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        optimizer = SGD([parameter], lr=1.0)
        assert scaler.scale(torch.ones(())) == 1
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == -1, f"{cls}: the step is not the optimizer's own"
        assert scaler.state_dict() == {}
        scaler.load_state_dict({})
        assert overflow(scaler) is None


def test_nothing_to_update_raises_as_torch_does():
    scaler = make(ConservativeGradScaler)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.update()
    scaler.scale(torch.zeros(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


@each("cls", [StaticGradScaler, ShardedStaticGradScaler])
@each("scale", [2.0**16, 1024, 0.1, 1000.3])
def test_a_static_scale_stays_and_skips_nonetheless(cls, scale):
    """That steps are skipped is what `drive` looks at."""
    overflows = steps("x..xxx" + "." * 10)
    scaler = make(cls, scale=scale)
    scaler.set_growth_interval(2)
    assert {found for found, _ in drive(scaler, overflows)} == {float32(scale)}
    scaler.update(2.0 * scale)
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale / 2})
    assert state_of(scaler)[0] == float32(scale)


@each("kind", CLASSES)
@each(("given_scale", "becomes"), [(100.0, 100), (1e9, 4096), (1e-3, 2), (4096.0, 4096)])
def test_a_scale_by_hand_has_the_same_bounds(kind, given_scale, becomes):
    scaler = make(CLASSES[kind][0], init_scale=64, floor=2, cap=4096, growth_interval=5, hysteresis=2, cooldown=0)
    *_, last = drive(scaler, steps("x.."))
    assert last == (64, 2)
    for value in (given_scale, torch.tensor(given_scale)):
        scaler.update(value)
        assert state_of(scaler) == (becomes, 2), "the scale, and a tracker that goes on"
    *_, last = drive(scaler, steps("x"))
    assert last == (max(becomes / 2, 2), 0), "the scale falls with the second overflow, also where it was set between"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_scale_by_hand_goes_before_what_was_found(kind):
    """As with torch, for which an overflow then changes neither the scale nor the tracker."""
    ours, theirs = (make(cls, init_scale=64.0, growth_interval=5) for cls in CLASSES[kind])
    for scaler in (ours, theirs):
        *_, last = drive(scaler, steps("..."))
        assert last == (64, 3)
        parameter = Parameter(torch.ones(1))
        parameter.grad = torch.tensor([INF])
        scaler.unscale_(SGD([parameter], lr=0.1))
        scaler.update(32.0)
        assert state_of(scaler) == (32, 3), type(scaler).__name__


def test_several_optimizers_share_a_scale():
    scaler = make(ConservativeGradScaler, init_scale=64, growth_interval=3, cooldown=1)
    parameters = [Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [SGD([p], lr=1.0) for p in parameters]
    scaler.scale(torch.zeros(()))
    for p, gradient in zip(parameters, (1.0, INF, NAN), strict=True):
        p.grad = torch.full((1,), gradient * 64)
    for optimizer in optimizers:
        scaler.step(optimizer)
    found = [overflow(scaler, optimizer) for optimizer in optimizers]
    assert found == [False, True, True], "by optimizer"
    assert overflow(scaler) == torch.tensor(True), "of all"
    scaler.update()
    assert [p.item() for p in parameters] == [-1, 0, 0], "only optimizers with an infinity are held back"
    assert state_of(scaler) == (32, -1), "two optimizers with an infinity are one overflow"


@each(
    ("preset", "scale", "interval", "hysteresis"),
    [("default", 2.0**16, 2000, 1), ("tiny-loss", 2.0**18, 2000, 1), ("quantized-fine-tuning", 2.0**17, 200, 2)],
)
def test_presets(preset, scale, interval, hysteresis):
    def found(**arguments):
        scaler = make(ConservativeGradScaler, preset=preset, **arguments)
        return scaler.get_scale(), scaler.get_growth_interval(), scaler.hysteresis

    assert found() == (scale, interval, hysteresis) and preset in PRESETS and len(PRESETS) == 3
    assert found(init_scale=8) == (8, interval, hysteresis), "what is given goes before the preset"
    assert found(growth_interval=7) == (scale, 7, hysteresis)
    assert found(hysteresis=5) == (scale, interval, 5)
    assert make(StaticGradScaler).get_scale() == 2.0**16, "it begins where torch's does"
