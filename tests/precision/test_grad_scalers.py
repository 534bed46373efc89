"""Loss scales: step by step those of a slow reference and of torch, and what quantized gradients make of them."""

import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import (
    Cast,
    ConservativeGradScaler,
    GradientNormGradScaler,
    LinearCasts,
    Scale,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    ShardedStaticGradScaler,
    StaticGradScaler,
    convert,
    quantize,
)
from lightning_lowbit.nn import PRESETS as CASTS
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.precision.grad_scalers import PRESETS, loss_factor, overflow, share_overflow
from tests.optim.parameters import NoHostSync
from tests.references.scalers import Reference, float32

# The fixtures that every test has give it a folder and a seed, which these do not use.
PROFILE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

#: By what they are called: this package's class, and torch's that it builds on. Sharded ones need a process group.
CLASSES: dict[str, tuple[Callable[..., ConservativeGradScaler], Callable[..., GradScaler]]] = {
    "plain": (ConservativeGradScaler, GradScaler),
    "sharded": (ShardedConservativeGradScaler, ShardedGradScaler),
}
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process alone."""
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(cls: Callable[..., Any], **arguments: Any) -> Any:
    """A scaler of the CPU, on machines with an accelerator too."""
    return cls(device="cpu", **arguments)


def state_of(scaler: GradScaler) -> tuple[float, int]:
    """The scale and the growth tracker."""
    scale, tracker = scaler._check_scale_growth_tracker("the test")
    assert (scale.dtype, tracker.dtype, scale.shape, tracker.shape) == (torch.float32, torch.int32, (), ())
    return scale.item(), int(tracker.item())


def drive(scaler: GradScaler, overflows: Iterable[bool]) -> Iterator[tuple[float, int]]:
    """Trains a parameter, in some steps with an infinity or a NaN in its gradient; yields the scale and the tracker.

    A step is taken unless there is one, by the gradient without the scale.
    """
    parameter = Parameter(torch.zeros(2))
    optimizer = SGD([parameter], lr=1.0)
    bad = itertools.cycle((INF, NAN, -INF))
    for overflowed in overflows:
        before = parameter[0].item()
        scaler.scale(torch.zeros(()))
        scale = scaler.get_scale()
        parameter.grad = torch.tensor([1.0, next(bad) if overflowed else 1.0]) * scale
        scaler.step(optimizer)
        scaler.update()
        if 2.0**-100 < scale < 2.0**100:  # beyond, the reciprocal is not within float32
            moved = before - parameter[0].item()
            assert math.isclose(moved, not overflowed, rel_tol=1e-5), f"moved by {moved}, overflow: {overflowed}"
        yield state_of(scaler)


def steps(text: str) -> list[bool]:
    """x for a step with an overflow, a dot for one without."""
    return [letter == "x" for letter in text]


OVERFLOWS = st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=40)

# --- the state machine ------------------------------------------------------------------------------------------------

SEQUENCES = {
    "at first": "xx...x" + "." * 22,
    "now and then": "....x......x..xx...xxx......x...x.x..",
    "in a row": "....xxxxxxxx" + "." * 13,
}
SETTINGS: list[dict[str, Any]] = [
    *(
        {"growth_interval": interval, "cooldown": cooldown, "hysteresis": hysteresis}
        for interval in (1, 2, 3, 5)
        for cooldown in (None, 0, 1, 4)
        for hysteresis in (1, 2, 3)
    ),
    *(
        {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": 2, "cooldown": 1}
        for growth in (1.125, 1.5, 2, 3.0)
        for backoff in (0.25, 0.5, 0.75)
    ),
    {"floor": 2.0**15, "cap": 2.0**17, "growth_interval": 1, "cooldown": 0},
    {"floor": 40000.0, "cap": 100000, "growth_interval": 2, "cooldown": 1, "hysteresis": 2},
    {"floor": 2.0**16, "cap": 2.0**16, "growth_interval": 1, "cooldown": 0},
    {"floor": 0, "cap": INF, "growth_interval": 1, "cooldown": 0},
    {"init_scale": 1, "growth_interval": 3, "cooldown": None},
    {"init_scale": 2.0**24, "growth_interval": 2, "hysteresis": 2, "cooldown": 1},
    {"init_scale": 0.1, "floor": 0.1, "cap": 0.3, "growth_interval": 2, "hysteresis": 2, "cooldown": 0},
]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_of_overflows(name: str, kind: str) -> None:
    for setting in SETTINGS:
        follow(steps(SEQUENCES[name]), setting, kind)


def follow(overflows: Sequence[bool], setting: dict[str, Any], kind: str) -> None:
    reference = Reference(**setting)
    for step, found in enumerate(drive(make(CLASSES[kind][0], **setting), overflows)):
        reference.step(overflows[step])
        assert found == (reference.scale, reference.tracker), f"{kind} {setting}: scale and tracker after step {step}"
        assert float32(reference.floor) <= found[0] <= float32(reference.cap), f"{setting}: out of bounds, step {step}"


@st.composite
def drawn_settings(draw: st.DrawFn) -> dict[str, Any]:
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
@given(OVERFLOWS, drawn_settings())
def test_any_sequence_of_overflows(kind: str, overflows: list[bool], setting: dict[str, Any]) -> None:
    follow(overflows, setting, kind)


@PROFILE
@given(OVERFLOWS, st.integers(1, 3), st.sampled_from([None, 0, 1, 4]))
def test_nothing_grows_while_it_cools_down(overflows: list[bool], interval: int, cooldown: int | None) -> None:
    scaler = make(ConservativeGradScaler, growth_interval=interval, cooldown=cooldown)
    before, calm = scaler.get_scale(), INF  # steps since the last overflow
    for overflowed, (scale, _) in zip(overflows, drive(scaler, overflows), strict=True):
        calm = 0 if overflowed else calm + 1
        wait = interval if cooldown is None else cooldown
        assert scale <= before or calm >= wait + interval, f"grew {calm} steps after an overflow, cooldown={cooldown}"
        before = scale


def test_hysteresis_is_full_again_once_the_scale_grew() -> None:
    setting: dict[str, Any] = {"growth_factor": 2, "growth_interval": 3, "cooldown": 0, "hysteresis": 2}
    found = [scale for scale, _ in drive(make(ConservativeGradScaler, init_scale=64, **setting), steps("xx..x...xx"))]
    assert found == [64, 32, 32, 32, 16, 16, 16, 32, 32, 16]
    at_cap = make(ConservativeGradScaler, init_scale=64, cap=64, **setting)
    found = [scale for scale, _ in drive(at_cap, steps("x...x..x...x"))]
    assert found == [64, 64, 64, 64, 64, 64, 64, 32, 32, 32, 64, 64], "at the cap growing counts as growing"


def test_the_defaults_grow_by_a_half_and_wait_twice_after_an_overflow() -> None:
    scaler = make(ConservativeGradScaler)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.5, 0.5, 2000)
    assert (scaler.floor, scaler.cap, scaler.cooldown, scaler.hysteresis) == (1, 2**24, None, 1)
    *_, last = drive(scaler, [True])
    assert last == (2.0**15, -2000), "after an overflow there are 4000 steps until the scale grows"


# --- torch's own ------------------------------------------------------------------------------------------------------

AS_TORCH: dict[str, Any] = {"growth_factor": 2.0, "floor": 0, "cap": INF, "cooldown": 0, "hysteresis": 1}


@pytest.mark.parametrize("kind", CLASSES)
@PROFILE
@given(OVERFLOWS, st.integers(1, 5), st.sampled_from([2.0**16, 3.7, 1.0]), st.sampled_from([0.5, 0.3]))
@example([False] * 6, 1, 2.0**126, 0.5).via("what is too large for float32: torch's scalers differ, and so do ours")
@example([True] * 6, 1, 2.0**-147, 0.5).via("what falls to 0")
@example([True, False] * 10, 1, 1.0, 0.3)
def test_torch_to_the_bit(kind: str, overflows: list[bool], interval: int, init_scale: float, backoff: float) -> None:
    shared = {"init_scale": init_scale, "growth_interval": interval, "backoff_factor": backoff}
    ours, theirs = (make(cls, **shared, **more) for cls, more in zip(CLASSES[kind], (AS_TORCH, {}), strict=True))
    for step, (found, expected) in enumerate(zip(drive(ours, overflows), drive(theirs, overflows), strict=True)):
        assert found == expected, f"scale and tracker after step {step} are not those of {type(theirs).__name__}"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_disabled_scaler_does_nothing(kind: str) -> None:
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


def test_nothing_to_update_raises_as_torch_does() -> None:
    scaler = make(ConservativeGradScaler)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.update()
    scaler.scale(torch.zeros(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


# --- static, by hand, several optimizers, presets ---------------------------------------------------------------------


@pytest.mark.parametrize("cls", [StaticGradScaler, ShardedStaticGradScaler])
@pytest.mark.parametrize("scale", [2.0**16, 1024, 0.1, 1000.3])
def test_a_static_scale_stays_and_skips_nonetheless(cls: Any, scale: float) -> None:
    """That steps are skipped is what `drive` looks at."""
    overflows = steps("x..xxx" + "." * 10)
    scaler = make(cls, scale=scale)
    scaler.set_growth_interval(2)
    assert {found for found, _ in drive(scaler, overflows)} == {float32(scale)}
    scaler.update(2.0 * scale)
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale / 2})
    assert state_of(scaler)[0] == float32(scale)


def test_a_static_scale_begins_at_that_of_torch() -> None:
    assert make(StaticGradScaler).get_scale() == 2.0**16


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("given_scale", "becomes"), [(100.0, 100), (1e9, 4096), (1e-3, 2), (4096.0, 4096)])
def test_a_scale_by_hand_has_the_same_bounds(kind: str, given_scale: float, becomes: float) -> None:
    scaler = make(CLASSES[kind][0], init_scale=64, floor=2, cap=4096, growth_interval=5, hysteresis=2, cooldown=0)
    *_, last = drive(scaler, steps("x.."))
    assert last == (64, 2)
    for value in (given_scale, torch.tensor(given_scale)):
        scaler.update(value)
        assert state_of(scaler) == (becomes, 2), "the scale, and a tracker that goes on"
    *_, last = drive(scaler, steps("x"))
    assert last == (max(becomes / 2, 2), 0), "the scale falls with the second overflow, also where it was set between"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_scale_by_hand_goes_before_what_was_found(kind: str) -> None:
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


def test_several_optimizers_share_a_scale() -> None:
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


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("default", (2.0**16, 2000, 1)),
        ("tiny-loss", (2.0**18, 2000, 1)),
        ("quantized-fine-tuning", (2.0**17, 200, 2)),
    ],
)
def test_presets(preset: str, expected: tuple[float, int, int]) -> None:
    def found(**arguments: Any) -> tuple[float, int, int]:
        scaler = make(ConservativeGradScaler, preset=preset, **arguments)
        return scaler.get_scale(), scaler.get_growth_interval(), scaler.hysteresis

    scale, interval, hysteresis = expected
    assert found() == expected
    assert found(init_scale=8) == (8, interval, hysteresis), "what is given goes before the preset"
    assert found(growth_interval=7) == (scale, 7, hysteresis)
    assert found(hysteresis=5) == (scale, interval, 5)


def test_no_preset_is_missing() -> None:
    assert set(PRESETS) == {"default", "tiny-loss", "quantized-fine-tuning"}


# --- state ------------------------------------------------------------------------------------------------------------

REMEMBERING: dict[str, Any] = {"growth_factor": 2, "growth_interval": 3, "cooldown": 1, "hysteresis": 3}
LONG = steps("..x.....xx....xxx......x")


def saved_and_loaded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def through_state(scaler: Any, path: Path) -> Any:
    fresh = make(type(scaler), **REMEMBERING)
    fresh.load_state_dict(saved_and_loaded(scaler.state_dict(), path))
    return fresh


def through_state_of_a_used_one(scaler: Any, path: Path) -> Any:
    used = make(type(scaler), **REMEMBERING)
    list(drive(used, steps("xxx..")))
    used.load_state_dict(saved_and_loaded(scaler.state_dict(), path))
    return used


def through_deepcopy(scaler: Any, path: Path) -> Any:
    return copy.deepcopy(scaler)


def through_pickle(scaler: Any, path: Path) -> Any:
    return pickle.loads(pickle.dumps(scaler))


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("cls", [ConservativeGradScaler, ShardedConservativeGradScaler])
@pytest.mark.parametrize(
    "through", [through_state, through_state_of_a_used_one, through_deepcopy, through_pickle], ids=lambda f: f.__name__
)
def test_a_resumed_run_is_the_uninterrupted_one(cls: Any, through: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    expected = list(drive(make(cls, **REMEMBERING), LONG))
    for cut in range(len(LONG)):
        scaler = make(cls, **REMEMBERING)
        found = list(drive(scaler, LONG[:cut]))
        resumed = through(scaler, tmp_path / "state.pt")
        assert resumed is not scaler
        if cut:
            list(drive(scaler, steps("xx")))  # the first one goes on by itself
        assert [*found, *drive(resumed, LONG[cut:])] == expected, f"cut before step {cut}, {through.__name__}"


def test_a_state_of_torch_and_back() -> None:
    theirs = make(GradScaler, growth_interval=10, init_scale=512.0)
    list(drive(theirs, steps("x....")))
    ours = make(ConservativeGradScaler, growth_interval=6, hysteresis=2, cooldown=0, growth_factor=1.5, init_scale=64)
    list(drive(ours, steps("x")))  # whose hysteresis a state without one fills again
    ours.load_state_dict(theirs.state_dict())
    assert list(drive(ours, steps("..xx"))) == [(256, 5), (384, 0), (384, 0), (192, 0)]
    theirs.load_state_dict(ours.state_dict())
    assert list(drive(theirs, steps("......"))) == [(192, n) for n in range(1, 6)] + [(288, 0)], (
        "torch takes scale, tracker and settings of the state"
    )


def test_settings_are_those_of_the_constructor() -> None:
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


def test_a_tracker_beyond_a_shorter_interval_still_grows() -> None:
    saved = make(ConservativeGradScaler, growth_interval=50)
    list(drive(saved, [False] * 40))
    for used in (False, True):
        scaler = make(ConservativeGradScaler, growth_interval=5, growth_factor=2)
        if used:
            list(drive(scaler, [False]))
        scaler.load_state_dict(saved.state_dict())
        assert list(drive(scaler, steps(".."))) == [(2.0**17, 0), (2.0**17, 1)], "the first step reaches the interval"


def test_a_cooldown_from_a_checkpoint_is_not_longer_than_this_one() -> None:
    saved = make(ConservativeGradScaler, growth_interval=2000)
    list(drive(saved, [True]))
    scaler = make(ConservativeGradScaler, growth_interval=5, cooldown=2, growth_factor=2)
    scaler.load_state_dict(saved.state_dict())
    found = [scale for scale, _ in drive(scaler, [False] * 7)]
    assert found == [2.0**15] * 6 + [2.0**16], "cooldown=2 and an interval of 5 are at most 7 steps"


def test_hysteresis_of_a_checkpoint_is_at_most_that_of_the_run() -> None:
    saved = make(ConservativeGradScaler, hysteresis=5)
    saved.scale(torch.zeros(()))
    scaler = make(ConservativeGradScaler, hysteresis=2)
    scaler.load_state_dict(saved.state_dict())
    assert [scale for scale, _ in drive(scaler, steps("xx"))] == [2.0**16, 2.0**15]


@pytest.mark.parametrize("cls", [ConservativeGradScaler, StaticGradScaler, GradientNormGradScaler])
def test_an_empty_state_raises_as_torch_does(cls: Any) -> None:
    scaler = make(cls)
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})


# --- the host ---------------------------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts what would let the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in NoHostSync.FORBIDDEN:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def host_reads(scaler: GradScaler, make_optimizer: Callable[..., Optimizer], overflowed: bool) -> dict[str, int]:
    """How often the host waits in each part of a step."""
    parameters = [Parameter(torch.ones(3)), Parameter(torch.ones(2, 2)), Parameter(torch.ones(1))]
    optimizer = make_optimizer(parameters)
    reads = {}
    for _ in range(2):  # the first step makes the scale
        for p in parameters[:2]:
            p.grad = torch.full_like(p, INF if overflowed else 1.0)
        parts: dict[str, Callable[[], Any]] = {
            "scale": lambda: scaler.scale(torch.ones(())),
            "unscale_": lambda: scaler.unscale_(optimizer),
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
        }
        for name, part in parts.items():
            with HostReads() as mode:
                part()
            reads[name] = mode.count.total()
    return reads


@pytest.mark.parametrize("overflowed", [False, True])
@pytest.mark.parametrize(
    ("cls", "theirs"),
    [
        (ConservativeGradScaler, GradScaler),
        (StaticGradScaler, GradScaler),
        (GradientNormGradScaler, GradScaler),
        (ShardedConservativeGradScaler, ShardedGradScaler),
        (ShardedGradientNormGradScaler, ShardedGradScaler),
    ],
)
def test_the_host_waits_no_more_often_than_with_torch(cls: Any, theirs: Any, overflowed: bool) -> None:
    made: list[Callable[..., Optimizer]] = [lambda p: SGD(p, lr=0.1)]
    if theirs is GradScaler:  # torch's sharded one does not go with a fused optimizer after `unscale_`
        made.append(lambda p: AdamW(p, lr=0.1, fused=True))
    for make_optimizer in made:
        expected = host_reads(make(theirs), make_optimizer, overflowed)
        assert host_reads(make(cls), make_optimizer, overflowed) == expected
        if theirs is GradScaler:  # the sharded one reads in its update on the CPU, and nowhere else
            assert (expected["scale"], expected["unscale_"], expected["update"]) == (0, 0, 0)


def test_nothing_is_copied_from_the_host() -> None:
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


# --- small gradients count for more -----------------------------------------------------------------------------------


def test_sparse_gradients_and_groups_without_any() -> None:
    """A sparse gradient has a norm when what it holds twice is added; so one row of two ones twice is of length √8."""
    sparse = Parameter(torch.zeros(4, 2))
    sparse.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=True)
    optimizer = SGD([{"params": []}, {"params": [sparse]}], lr=1.0)
    scaler = make(GradientNormGradScaler, threshold=math.sqrt(32), init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = torch.zeros(4, 2)
    expected[1] = -2 * 1.5  # 1 + (1 - √8 / √32)
    torch.testing.assert_close(sparse.detach(), expected)  # a root and a quotient are rounded


def test_gradients_in_float64_have_a_norm() -> None:
    parameter = Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.ones(4, dtype=torch.float64)
    optimizer = SGD([parameter], lr=1.0)
    scaler = make(GradientNormGradScaler, threshold=4.0, init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [1.5] * 4


@pytest.mark.parametrize(("given", "kind"), [("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta")])
def test_a_device_is_taken_by_its_type(given: str, kind: str) -> None:
    assert ConservativeGradScaler(device=given)._device == kind


def test_no_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device is where it trains, such as 'cuda' or 'cpu'; got 'gpu'"):
        ConservativeGradScaler(device="gpu")


@pytest.mark.parametrize("other", ["floor", "growth_factor", "preset", "hysteresis"])
def test_a_static_scale_takes_no_setting_that_moves_it(other: str) -> None:
    with pytest.raises(TypeError, match=other):
        StaticGradScaler(8.0, **{other: 2})


@pytest.mark.parametrize("threshold", [1e-2, 1.0, 300])
def test_the_factor_of_the_loss(threshold: float) -> None:
    shares = torch.tensor([[0.0, 0.25, 0.5, 1.0], [1.5, 2.0, 2.5, INF]])
    expected = torch.tensor([[2.0, 1.75, 1.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    # Two roundings in float32: of the quotient, which is at most 2, and of the difference.
    torch.testing.assert_close(loss_factor(shares * threshold, threshold), expected, rtol=0, atol=2.0**-22)


@PROFILE
@given(st.floats(0, 100, width=32), st.floats(1e-3, 1e3))
def test_the_factor_is_the_rule_within_bounds(norm: float, threshold: float) -> None:
    found = loss_factor(torch.tensor(norm), threshold).item()
    assert 1 <= found <= 2
    rule = 1 + (1 - norm / threshold)
    assert found == pytest.approx(rule if norm < threshold else 1, rel=0, abs=2.0**-22)


@pytest.mark.parametrize("cls", [GradientNormGradScaler, ShardedGradientNormGradScaler])
@pytest.mark.parametrize(("size", "factor"), [(0.0, 2), (0.2, 1.8), (0.5, 1.5), (0.75, 1.25), (1.0, 1), (3.0, 1)])
def test_unscaled_gradients_are_the_true_ones_times_the_factor(cls: Any, size: float, factor: float) -> None:
    """The norm is that of all gradients of the optimizer: 3, 4 and 12 make 13."""
    scaler = make(cls, threshold=0.13, init_scale=2.0**12)
    parameters = [Parameter(torch.zeros(shape)) for shape in ((2, 2), (1,), (0,), (3,), ())]
    true = [torch.tensor([[0, 0.03], [0, 0]]), torch.tensor([0.04]), torch.zeros(0), None, torch.tensor(-0.12)]
    optimizer = SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    scaled = scaler.scale(torch.ones(()))
    for p, gradient in zip(parameters, true, strict=True):
        p.grad = None if gradient is None else gradient * size * scaled
    scaler.unscale_(optimizer)
    for p, gradient in zip(parameters, true, strict=True):
        if gradient is None:
            assert p.grad is None
        else:  # float32, a few roundings: of the norm, the factor and the product
            torch.testing.assert_close(p.grad, gradient * size * factor, rtol=1e-6, atol=0)
    assert overflow(scaler) == torch.tensor(False)
    scaler.step(optimizer)
    torch.testing.assert_close(parameters[1].detach(), torch.tensor([-0.04 * size * factor]), rtol=1e-6, atol=0)


def gradients_of(step: int) -> list[Tensor]:
    """Of norms below the threshold of 1, and each another one."""
    generator = torch.Generator().manual_seed(step)
    directions = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,))]
    return [g * 0.04 * (step + 1) for g in directions]


def trained(make_optimizer: Callable[..., Optimizer], scaler: Any = None, rule: float | None = None) -> list[Tensor]:
    """Parameters after some steps: by a scaler, or by gradients to which the rule is applied by hand."""
    parameters = [Parameter(torch.ones(shape)) for shape in ((4, 3), (5,))]
    optimizer = make_optimizer(parameters)
    for step in range(5):
        gradients = gradients_of(step)
        if scaler is not None:
            scale = scaler.scale(torch.ones(()))
            gradients = [g * scale for g in gradients]
        elif rule is not None:
            norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
            assert norm < rule or step > 2, "these are to be small"
            gradients = [g * min(max(2 - norm / rule, 1), 2) for g in gradients]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
@pytest.mark.parametrize("scaler", [GradientNormGradScaler, ShardedGradientNormGradScaler])
def test_optimizers_are_given_the_factor(scaler: Any, cls: Any, fused: bool) -> None:
    """Without an explicit `unscale_`; fused optimizers would unscale by themselves."""

    def make_optimizer(parameters: list[Parameter]) -> Optimizer:
        optimizer: Optimizer = cls(parameters, lr=0.1, fused=fused)
        return optimizer

    found = trained(make_optimizer, make(scaler, threshold=1.0))
    expected, without = trained(make_optimizer, rule=1.0), trained(make_optimizer)
    for a, b, c in zip(found, expected, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # float32 in another order, five steps of about 0.1
        assert (a - c).abs().max() > 1e-3, "it makes no difference, so that this shows nothing"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("cls", [GradientNormGradScaler, ShardedGradientNormGradScaler])
def test_an_infinity_is_found_under_the_rule(cls: Any, bad: float, fused: bool) -> None:
    scaler, parameters = make(cls), [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = AdamW(parameters, lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, bad, 1.0]), torch.ones(2)
    scaler.step(optimizer)
    assert overflow(scaler, optimizer) == torch.tensor(True)
    scaler.update()
    assert all((p == 1).all() for p in parameters), "a step with an infinity was taken"
    assert state_of(scaler)[0] == 2.0**15


@pytest.mark.parametrize("foreach", [True, False])
def test_adam_ignores_a_constant_factor(foreach: bool) -> None:
    """With a threshold far above all norms the factor is 2: m doubles, v becomes 4 times as large, to the bit."""
    makes: dict[str, Callable[..., Optimizer]] = {
        "Adam": lambda p: Adam(p, lr=0.1, eps=1e-30, foreach=foreach),
        "SGD": lambda p: SGD(p, lr=0.1, foreach=foreach),
    }
    plain, doubled = (
        {name: trained(one, make(cls, **more)) for name, one in makes.items()}
        for cls, more in ((ConservativeGradScaler, {}), (GradientNormGradScaler, {"threshold": 1e30}))
    )
    for a, b in zip(plain["Adam"], doubled["Adam"], strict=True):
        assert torch.equal(a, b), "Adam does not ignore the factor"
    for a, b in zip(plain["SGD"], doubled["SGD"], strict=True):
        torch.testing.assert_close(1 - b, 2 * (1 - a), rtol=0, atol=1e-6, msg="SGD ignores the factor")


# --- what was found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, ConservativeGradScaler, ShardedConservativeGradScaler])
def test_overflow(cls: Any) -> None:
    scaler = make(cls)
    parameters = [Parameter(torch.ones(2)) for _ in range(3)]
    clean, infinite, later = (SGD([p], lr=0.1) for p in parameters)
    assert overflow(scaler) is None
    scaler.scale(torch.ones(()))
    assert overflow(scaler) is None
    assert overflow(scaler, clean) is None
    for p, gradient in zip(parameters, (1.0, INF, 1.0), strict=True):
        p.grad = torch.full((2,), gradient)
    scaler.unscale_(clean)
    assert overflow(scaler, infinite) is None, "not unscaled yet"
    assert overflow(scaler) == torch.tensor(False)
    scaler.unscale_(infinite)
    for optimizer, expected in ((None, True), (clean, False), (infinite, True)):
        found = overflow(scaler, optimizer)
        assert found is not None
        assert (found.dtype, found.shape, bool(found)) == (torch.bool, (), expected)
    assert overflow(scaler, later) is None, "asking leaves nothing behind"
    scaler.update()
    assert overflow(scaler) is None


def test_a_disabled_scaler_found_nothing() -> None:
    assert overflow(make(ConservativeGradScaler, enabled=False)) is None


@pytest.mark.parametrize("cls", [GradScaler, ConservativeGradScaler, GradientNormGradScaler, ShardedGradScaler])
@pytest.mark.parametrize("over_ranks", [False, True])
def test_a_step_without_any_gradient(cls: Any, over_ranks: bool) -> None:
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    share_overflow(scaler, optimizer, torch.device("cpu"), over_ranks)
    assert overflow(scaler, optimizer) == torch.tensor(False)
    scaler.step(optimizer)
    scaler.update()
    assert state_of(scaler) == (2.0**16, 1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [1.0, INF])
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, ConservativeGradScaler, ShardedConservativeGradScaler])
def test_sharing_keeps_what_was_found(cls: Any, bad: float, fused: bool) -> None:
    """And every optimizer takes it; what torch's sharded class finds has one dimension, fused ones ask for none."""
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([1.0, bad])
    scaler.unscale_(optimizer)
    share_overflow(scaler, optimizer, torch.device("cpu"), over_ranks=True)
    assert overflow(scaler, optimizer) == torch.tensor(math.isinf(bad))
    scaler.step(optimizer)
    assert (parameter == 1).all() == math.isinf(bad), "a step with an infinity is skipped, and no other"


@pytest.mark.parametrize("cls", [ShardedConservativeGradScaler, ShardedGradientNormGradScaler])
def test_sharded_scalers_unscale_before_fused_steps(cls: Any) -> None:
    """As when gradients are clipped, which torch's sharded class does not go with."""
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1, fused=True)
    for bad, expected in ((1.0, 2.0**16), (INF, 2.0**15)):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1.0, bad])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert state_of(scaler)[0] == expected


# --- quantized gradients ----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Quantized:
    """A model of two quantized layers, and the gradients of its loss."""

    def __init__(self, casts: Any) -> None:
        torch.manual_seed(0)
        self.model = convert(Tiny(), casts)
        self.keys = LayerKeys(self.model)

    def gradients(
        self, factor: float = 1.0, histories: AmaxHistories | None = None, x: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Of the loss times a factor, divided by it again; by name of the parameter, and of the input.

        Args:
            histories: those of delayed scaling; None for fresh ones.
        """
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(20, 40, generator=generator) if x is None else x
        if histories is None:
            AmaxHistories(self.model)
        self.keys.fill_(0)  # the same bits in each pass
        self.model.zero_grad()
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(x).float().square().sum()
        (loss * factor).backward()
        named = {"x": x, **dict(self.model.named_parameters())}
        return {name: tensor.grad / factor for name, tensor in named.items() if tensor.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys() and len(found) == 5
    for name, gradient in expected.items():
        assert gradient.isfinite().all() and gradient.any(), f"{what}: the gradient of {name} shows nothing"
        differ = (found[name] != gradient).sum().item()
        assert not differ, f"{what}: {differ} of {gradient.numel()} elements of the gradient of {name} differ"


@pytest.mark.parametrize("name", CASTS)
def test_a_power_of_two_does_not_change_gradients(name: str) -> None:
    """Scales follow the tensor, so that a power of two comes out again, through stochastic rounding too."""
    layers = Quantized(name)
    expected = layers.gradients()
    for exponent in (-12, 3, 18):
        found = layers.gradients(2.0**exponent)
        assert_same_gradients(found, expected, f"{name} and a loss scale of 2^{exponent}")


@pytest.mark.parametrize("name", [name for name in CASTS if LinearCasts.preset(name).is_delayed])
def test_delayed_scales_follow_the_loss_scale(name: str) -> None:
    """What is remembered of gradients is multiplied with what the loss is, once the scale has moved."""
    layers = Quantized(name)

    def second_step(factor: float) -> dict[str, Tensor]:
        histories = AmaxHistories(layers.model)
        layers.gradients(1.0, histories)
        histories.advance_()
        histories.scale_gradients_(torch.tensor(factor))
        return layers.gradients(factor, histories, x=torch.randn(20, 40, generator=torch.Generator().manual_seed(2)))

    expected = second_step(1.0)
    for exponent in (-12, 3, 18):
        assert_same_gradients(second_step(2.0**exponent), expected, f"{name} and a scale that moved by 2^{exponent}")


def gradient_casts() -> dict[str, Cast]:
    """All casts that a preset has for output gradients, by what they print."""
    both = [getattr(LinearCasts.preset(name), operand) for name in CASTS for operand in ("dgrad_g", "wgrad_g")]
    return {str(cast): cast for cast in both if isinstance(cast, Cast)}


def scaled_and_not(x: Tensor, cast: Cast, exponent: int) -> tuple[Tensor, Tensor]:
    """What a cast makes of a tensor, and of the tensor times 2^exponent, divided by it again."""
    return (
        quantize(x * 2.0**exponent, cast, key=7).dequantize() / 2.0**exponent,
        quantize(x, cast, key=7).dequantize(),
    )


@pytest.mark.parametrize("name", gradient_casts())
@PROFILE
@given(seed=st.integers(0, 2**32), exponent=st.integers(-40, 40), spread=st.floats(0, 4))
def test_a_power_of_two_does_not_change_a_cast(name: str, seed: int, exponent: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(2, 80, generator=generator))
    x = (torch.randn(2, 80, generator=generator) * sizes).bfloat16()
    found, expected = scaled_and_not(x, gradient_casts()[name], exponent)
    assert torch.equal(found, expected), f"{name}: times 2^{exponent} {(found != expected).sum()} elements differ"


ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))


def test_scales_in_few_bits_without_a_second_level_need_the_right_loss_scale() -> None:
    """Not so for scales in E4M3 alone: they reach from 2^-9 to 448, saturate beyond, and vanish below.

    No preset has them for gradients. Within the range, where scales have all their digits, they keep what they are.
    """
    assert not any(
        cast.scale.format != "e8m0" and cast.scale.format != "fp32" and not cast.scale.two_level
        for cast in gradient_casts().values()
    )
    x = torch.randn(4, 64)
    found, expected = scaled_and_not(x, ONE_LEVEL, 3)
    assert torch.equal(found, expected)
    saturated, _ = scaled_and_not(x, ONE_LEVEL, 18)
    assert saturated.abs().max() == 448 * 6 / 2.0**18, "elements end at the largest scale times the largest level"
    vanished, _ = scaled_and_not(x, ONE_LEVEL, -18)
    assert not vanished.any(), "elements vanish under the smallest scale"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_reaches_the_gradients(name: str, bad: float) -> None:
    """A scaler looks at gradients of parameters: one element of an output gradient has to be found in them."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8)), name)
    AmaxHistories(model)
    LayerKeys(model).fill_(0)
    x = torch.randn(20, 40, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    assert y.dtype == torch.float16
    g = torch.randn(20, 8).half()
    g[3, 5] = bad
    y.backward(g)
    for what, tensor in (("x", x), *model.named_parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.isfinite().all(), f"{name}: {bad} is not seen in the gradient of {what}"
    scaler = make(ConservativeGradScaler)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(SGD([model[0].weight], lr=0.1))
    assert overflow(scaler) == torch.tensor(True)


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (ConservativeGradScaler, arguments, message)
        for arguments, message in (
            *(({"growth_factor": bad}, "growth_factor") for bad in (1, 0.5, -2, INF, NAN, True, "2")),
            *(({"backoff_factor": bad}, "backoff_factor") for bad in (0, 1, -0.5, 2, NAN, True, "0.5")),
            *(({"init_scale": bad}, "init_scale") for bad in (0, -1, INF, NAN, 1e39, True, "65536")),
            ({"init_scale": 0.5}, "floor=1.0 and cap=16777216.0; got init_scale=0.5"),
            ({"init_scale": 2.0**25}, "cap=16777216.0; got init_scale=33554432.0"),
            ({"preset": "tiny-loss", "cap": 2.0**17}, "cap=131072.0; got init_scale=262144.0"),
            *(({"floor": bad}, "floor") for bad in (-1, NAN, True, "1", None)),
            *(({"cap": bad}, "cap") for bad in (-1, NAN, True, "1", None)),
            ({"floor": 8, "cap": 4}, "floor=8, cap=4"),
            *(({"growth_interval": bad}, "growth_interval") for bad in (0, -1, 1.5, True, "2000")),
            *(({"hysteresis": bad}, "hysteresis") for bad in (0, -1, 1.5, True, "2")),
            *(({"cooldown": bad}, "cooldown") for bad in (-1, 1.5, True, "2")),
            (
                {"preset": "tinyloss"},
                r"Unknown preset 'tinyloss'\. Did you mean 'tiny-loss'\?.*'quantized-fine-tuning'",
            ),
            ({"preset": None}, "Unknown preset None"),
        )
    ),
    *((StaticGradScaler, {"scale": bad}, "scale is") for bad in (-1, 0, INF, NAN, 1e39, True, "1")),
    *((GradientNormGradScaler, {"threshold": bad}, "threshold") for bad in (-1, 0, INF, NAN, True, "1")),
    (GradientNormGradScaler, {"growth_factor": 1}, "growth_factor"),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_bad_input(cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make(cls, **arguments)
    *_, value = arguments.values()
    assert repr(value) in str(raised.value) or f"{value}" in str(raised.value), "does not say what came"


def test_good_input_at_the_edges() -> None:
    make(ConservativeGradScaler, floor=2.0**16, cap=2.0**16)
    make(ConservativeGradScaler, init_scale=torch.finfo(torch.float32).max, cap=INF)
    make(ConservativeGradScaler, cooldown=0, hysteresis=1, growth_interval=1, growth_factor=1.0001)
    make(StaticGradScaler, scale=1)
