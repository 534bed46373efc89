"""What every optimizer of the package keeps to: one table of optimizers, and one test for each promise."""

import copy
import importlib
import inspect
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, clipping, guards
from lightning_lowbit.optim.batch import SCALARS
from lightning_lowbit.optim.guarded_optimizer import GuardedOptimizer
from lightning_lowbit.optim.options import OPTIONS
from tests.optim.parameters import (
    SHAPES,
    NoHostSync,
    assert_same,
    in_cpp_and_in_torch,
    make_parameters,
    set_gradients,
    snapshot,
    train,
    use,
)

LR = 0.01


class Entry(NamedTuple):
    """An optimizer with its switches.

    Attributes:
        kind: its class.
        options: its options.
        base: module and name of what `Adaptive` wraps, which may be in a package that is not installed.
        base_options: options of that.
        dtype: of the parameters where a test needs one only.
        takes_tensor_lr: whether lr may be a tensor.
        can_be_copied: whether a copy of what is wrapped knows all that the original does.
        shapes: of the parameters.
    """

    kind: type[GuardedOptimizer]
    options: Mapping[str, Any]
    base: tuple[str, str] | None = None
    base_options: Mapping[str, Any] = {}
    dtype: torch.dtype = torch.float32
    takes_tensor_lr: bool = True
    can_be_copied: bool = True
    shapes: Sequence[tuple[int, ...]] = SHAPES

    def parameters(self, dtype: torch.dtype | None = None) -> list[Parameter]:
        return make_parameters(dtype or self.dtype, self.shapes)

    def __call__(self, params: Iterable[Any], lr: Any = LR) -> GuardedOptimizer:
        if self.base is None:
            return self.kind(params, lr=lr, **self.options)
        return self.kind(self.make_base(params, lr=lr), **self.options)

    def make_base(self, params: Iterable[Any], lr: Any = LR) -> torch.optim.Optimizer:
        assert self.base is not None
        module, name = self.base
        if not module.startswith("torch."):
            pytest.importorskip(module)
        return getattr(importlib.import_module(module), name)(params, lr=lr, **self.base_options)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether parameters may be of a dtype: what keeps 16 bits more is for 16 bits, and FP8 is not for float64."""
        if "master_weights" in self.options:
            return dtype in (torch.bfloat16, torch.float16)
        return dtype != torch.float64 or self.options.get("moments") != "fp8"

    @property
    def waits_for_the_host(self) -> bool:
        """Whether the wrapped optimizer cannot be told on the device that a step is to be skipped."""
        return self.base is not None and not self.base_options.get("fused")

    @property
    def norm_clip(self) -> str | None:
        parameter = inspect.signature(self.kind.__init__).parameters.get("norm_clip")
        return self.options.get("norm_clip", parameter and parameter.default)


# AdamW keeps its moments in the dtype of the parameter; in fp16, 1e-8 is 0 and eps would be none.
ADAMW, EPS = ("torch.optim", "AdamW"), {"eps": 1e-3}
FP8 = {"moments": "fp8"}
MASTER = {**FP8, "master_weights": "fp16"}

#: A reset comes at step 4, and a warm-up is still going on at step 5.
ENTRIES = {
    "StableSPAM": Entry(StableSPAM, {"weight_decay": 0.1, "reset_interval": 4}),
    "StableSPAM schedules": Entry(StableSPAM, {"reset_interval": 4, "warmup_steps": 3, "total_steps": 8}),
    "StableSPAM older clips": Entry(
        StableSPAM,
        {"element_clip": "spike_clip", "spike_threshold": 2.0, "norm_clip": "grad_clip", "matrices_only": True},
    ),
    "StableSPAM no clips": Entry(StableSPAM, {"element_clip": None, "norm_clip": None, "maximize": True}),
    "StableSPAM fp8": Entry(StableSPAM, {**FP8, "weight_decay": 0.1, "reset_interval": 4}),
    "StableSPAM master": Entry(StableSPAM, {**MASTER, "reset_interval": 4, "warmup_steps": 3}, dtype=torch.bfloat16),
    "SPAM": Entry(SPAM, {"reset_interval": 4, "warmup_steps": 3, "spike_threshold": 2.0}),
    "SPAM density": Entry(SPAM, {"reset_interval": 4, "warmup_steps": 3, "density": 0.5, "weight_decay": 0.1}),
    "LowBitAdamW fp32": Entry(LowBitAdamW, {"moments": "fp32"}),
    "LowBitAdamW fp8": Entry(LowBitAdamW, FP8),
    "LowBitAdamW master": Entry(LowBitAdamW, MASTER, dtype=torch.bfloat16),
    "Adaptive AdamW": Entry(Adaptive, {}, ADAMW, EPS),
    "Adaptive AdamW foreach": Entry(Adaptive, {}, ADAMW, {**EPS, "foreach": True}, takes_tensor_lr=False),
    "Adaptive AdamW fused": Entry(Adaptive, {}, ADAMW, {**EPS, "fused": True}),
    "Adaptive AdamW older clips": Entry(
        Adaptive, {"element_clip": "spike_clip", "spike_threshold": 2.0, "norm_clip": "grad_clip"}, ADAMW, EPS
    ),
    "Adaptive SGD": Entry(Adaptive, {"matrices_only": True}, ("torch.optim", "SGD"), {"momentum": 0.9}),
    # Adafactor divides by the number of elements, so that empty parameters are none of its.
    "Adaptive Adafactor": Entry(
        Adaptive, {}, ("torch.optim", "Adafactor"), shapes=[shape for shape in SHAPES if 0 not in shape]
    ),
    "Adaptive Lion": Entry(Adaptive, {}, ("pytorch_optimizer", "Lion"), can_be_copied=False),
}


def entries(condition: Callable[[Entry], bool]) -> pytest.MarkDecorator:
    chosen = [pytest.param(entry, id=name) for name, entry in ENTRIES.items() if condition(entry)]
    return pytest.mark.parametrize("entry", chosen)


def entries_and_dtypes(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(entry, dtype, id=f"{name}-{dtype}")
        for name, entry in ENTRIES.items()
        for dtype in dtypes
        if entry.takes(dtype)
    ]
    return pytest.mark.parametrize(("entry", "dtype"), chosen)


every_entry = entries(lambda entry: True)
own_state = entries(lambda entry: entry.base is None)
entries_and_rates = pytest.mark.parametrize(
    ("entry", "lr_is_tensor"),
    [
        pytest.param(entry, is_tensor, id=f"{name}-{'tensor' if is_tensor else 'float'}")
        for name, entry in ENTRIES.items()
        for is_tensor in ((False, True) if entry.takes_tensor_lr else (False,))
    ],
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small tensors are worked on in pieces, and SpikeClip does not wait for 20 steps."""
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", 12)
    monkeypatch.setattr(clipping, "PIECE_ON_ACCELERATOR", 12)
    monkeypatch.setattr(guards, "SPIKE_CLIP_AFTER", 2)


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("lightning_lowbit."):  # Lightning makes subclasses of its own
            yield child
            yield from subclasses(child)


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def assert_nothing_happened(
    optimizer: GuardedOptimizer, parameters: Sequence[Tensor], before: list[Tensor], groups: Any, what: str
) -> None:
    assert_same(snapshot(optimizer, parameters), before, f"{what} left traces")
    assert optimizer.state_dict()["param_groups"] == groups, f"{what} changed the groups"


def test_every_optimizer_has_an_entry() -> None:
    kinds = {kind for kind in subclasses(GuardedOptimizer) if not any(subclasses(kind))}
    assert kinds == {entry.kind for entry in ENTRIES.values()}, "classes and entries of the table differ"


# --- state ---


@entries_and_dtypes(torch.float32, torch.bfloat16)
def test_resume_is_bit_for_bit(entry: Entry, dtype: torch.dtype) -> None:
    """Early, just before a reset, and within a warm-up."""
    parameters = entry.parameters(dtype)
    optimizer = entry(parameters)
    saved = {}
    for step in range(8):
        if step in (1, 3, 5):
            weights = [p.detach().clone() for p in parameters]
            saved[step] = snapshot(optimizer, parameters), weights, through_a_file(optimizer.state_dict())
        train(optimizer, parameters, [step])
    for step, (before, weights, state) in saved.items():
        resumed_parameters = [Parameter(weight) for weight in weights]
        resumed = entry(resumed_parameters, lr=7.0)
        resumed.load_state_dict(state)
        assert_same(snapshot(resumed, resumed_parameters), before, f"loading the state of step {step} changed it")
        train(resumed, resumed_parameters, range(step, 8))
        assert_same(
            snapshot(resumed, resumed_parameters),
            snapshot(optimizer, parameters),
            f"resumed at step {step}, the run differs",
        )


@own_state
def test_loaded_state_is_a_copy(entry: Entry) -> None:
    parameters, others = entry.parameters(), entry.parameters()
    optimizer, other = entry(parameters), entry(others)
    train(optimizer, parameters, range(2))
    other.load_state_dict(optimizer.state_dict())
    before = snapshot(optimizer, parameters)
    train(other, others, range(2, 4))
    assert_same(snapshot(optimizer, parameters), before, "two optimizers share state after load_state_dict")


def _pickled(value: Any) -> Any:
    return through_a_file(value, weights_only=False)  # Python's pickle cannot read FP8 tensors


@pytest.mark.pairwise(1)
@entries(lambda entry: entry.can_be_copied)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("trained", [0, 5])
def test_copies_go_on_alike(entry: Entry, duplicate: Callable[[Any], Any], trained: int) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    train(optimizer, parameters, range(trained))
    twins, twin = duplicate((parameters, optimizer))
    for one, its_parameters in ((optimizer, parameters), (twin, twins)):
        its_parameters += make_parameters(entry.dtype, [(4, 6)])
        one.add_param_group({"params": its_parameters[-1:]})
        train(one, its_parameters, range(trained, trained + 3))
    assert_same(snapshot(twin, twins), snapshot(optimizer, parameters), "the copy trains differently")


@every_entry
def test_named_parameters(entry: Entry) -> None:
    parameters, named = entry.parameters(), entry.parameters()
    optimizer, with_names = entry(parameters), entry((f"p{i}", p) for i, p in enumerate(named))
    train(optimizer, parameters, range(3))
    train(with_names, named, range(3))
    assert_same(snapshot(with_names, named), snapshot(optimizer, parameters), "names changed the trajectory")
    names = [f"p{i}" for i in range(len(named))]
    assert with_names.state_dict()["param_groups"][0]["param_names"] == names, "the names are not saved"
    again = [Parameter(p.detach().clone()) for p in named]
    resumed = entry((f"p{i}", p) for i, p in enumerate(again))
    resumed.load_state_dict(through_a_file(with_names.state_dict()))
    train(with_names, named, range(3, 6))
    train(resumed, again, range(3, 6))
    assert_same(snapshot(resumed, again), snapshot(with_names, named), "the resumed run with names differs")


@every_entry
def test_state_of_another_size_is_refused(entry: Entry) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    train(optimizer, parameters, range(2))
    before, groups = snapshot(optimizer, parameters), optimizer.state_dict()["param_groups"]

    def of(*others: Sequence[Parameter]) -> dict[str, Any]:
        other = entry([{"params": list(group)} for group in others])
        for group in others:
            set_gradients(group, seed=0)
        other.step()
        return other.state_dict()

    several = entry.parameters()
    for saved in (of(several[:2]), of(several[:1], several[1:])):
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(saved)
    assert_nothing_happened(optimizer, parameters, before, groups, "a refused state")


@pytest.mark.parametrize(
    ("name", "saved", "wanted"),
    [("moments", "fp8", "fp32"), ("moments", "fp32", "fp8"), ("master_weights", "fp16", None), ("density", 0.5, 1.0)],
)
def test_other_kinds_of_moments_are_refused(name: str, saved: Any, wanted: Any) -> None:
    kind = SPAM if name == "density" else StableSPAM
    parameters, others = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    optimizer, other = kind(parameters, **{name: wanted}), kind(others, **{name: saved})
    train(optimizer, parameters, range(2))
    train(other, others, range(2))
    before, groups = snapshot(optimizer, parameters), optimizer.state_dict()["param_groups"]
    hooks = len(optimizer._optimizer_load_state_dict_pre_hooks)
    with pytest.raises(ValueError, match=f"{name}={saved!r}.*{name}={wanted!r}.*saved value"):
        optimizer.load_state_dict(other.state_dict())
    assert_nothing_happened(optimizer, parameters, before, groups, "a refused state")
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks, "a refused state left a hook behind"


@pytest.mark.parametrize("kind", [StableSPAM, SPAM, LowBitAdamW])
def test_the_state_of_a_foreign_adam_is_refused(kind: type[GuardedOptimizer]) -> None:
    parameters = make_parameters()
    foreign = torch.optim.AdamW(parameters)
    train(foreign, parameters, range(2))
    with pytest.raises(ValueError, match="moments=None"):
        kind(make_parameters()).load_state_dict(foreign.state_dict())


def test_adaptive_takes_up_the_state_of_what_it_wraps() -> None:
    parameters = make_parameters()
    plain = torch.optim.AdamW(parameters, lr=LR)
    train(plain, parameters, range(3))
    again = [Parameter(p.detach().clone()) for p in parameters]
    taken_up = Adaptive(torch.optim.AdamW(again))
    taken_up.load_state_dict(plain.state_dict())
    train(taken_up, again, range(3, 5))
    state = taken_up.state[again[5]]
    assert (state["step"], state["steps"]) == (5, 2), f"AdamW counts {state['step']}, the guards {state['steps']} steps"


# --- gradients ---


STATISTICS = {*SCALARS[1:], "mean", "mean_square", "mean_weight"}


@entries_and_dtypes(torch.float32, torch.bfloat16, torch.float16, torch.float64)
def test_gradients_are_left_alone_and_statistics_are_wide(entry: Entry, dtype: torch.dtype) -> None:
    parameters = entry.parameters(dtype)
    optimizer = entry(parameters)
    for step in range(6):
        set_gradients(parameters, seed=step)
        gradients = [p.grad for p in parameters]
        before = [g.clone() for g in gradients if g is not None]
        optimizer.step()
        for p, gradient, expected in zip(parameters, gradients, before, strict=True):
            assert p.grad is gradient and torch.equal(p.grad, expected), f"p.grad changed for shape {tuple(p.shape)}"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert not torch.equal(parameters[-1], entry.parameters(dtype)[-1]), "the parameters did not move"
    for p in parameters:
        assert p.dtype == dtype and p.isfinite().all(), f"shape {tuple(p.shape)}: {p}"
        state = optimizer.state[p]
        dtypes = {name: value.dtype for name, value in state.items() if name in STATISTICS}
        narrow = {name: kept for name, kept in dtypes.items() if kept != wide and kept.itemsize > 1}  # FP8 has one byte
        assert not narrow, f"statistics of a {dtype} parameter are {narrow}, wanted {wide}"
        assert state["steps"] == 6 and state["steps"].dtype == torch.int64


@every_entry
def test_gradients_that_come_and_go(entry: Entry) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    index = len(parameters) - 2
    given = [step for step in range(9) if step not in (0, 2, 4)]
    for step in range(9):
        set_gradients(parameters, seed=step)
        if step in given:
            optimizer.step()
            continue
        parameters[index].grad = None
        before = snapshot(optimizer, [parameters[index]])
        optimizer.step()
        assert_same(snapshot(optimizer, [parameters[index]]), before, "a parameter without gradient was touched")
    if entry.norm_clip == "grad_clip":
        return  # where one bound holds for all gradients together, a parameter depends on its neighbors
    alone = entry.parameters()
    other = entry(alone)
    for step in given:
        set_gradients(alone, seed=step)
        for p in alone[:index] + alone[index + 1 :]:
            p.grad = None
        other.step()
    assert_same(
        snapshot(other, [alone[index]]), snapshot(optimizer, [parameters[index]]),
        "the steps of a parameter without gradient, or its neighbors, count for it",
    )  # fmt: skip


@every_entry
def test_nothing_to_do(entry: Entry) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    before = snapshot(optimizer, parameters)
    assert optimizer.step() is None
    assert_same(snapshot(optimizer, parameters), before, "a step without gradients left traces")


@pytest.mark.pairwise(1)
@every_entry
@pytest.mark.parametrize("trained", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize(
    "bad",
    [
        (lambda p: torch.ones_like(p).to_sparse(), "dense, real gradients, got torch.sparse_coo.*sparse=False"),
        (lambda p: torch.ones_like(p), "dense, real gradients.*complex64.*view_as_complex"),
    ],
    ids=["sparse", "complex"],
)
def test_sparse_and_complex_gradients_are_refused(
    entry: Entry, bad: tuple[Callable[[Tensor], Tensor], str], trained: int
) -> None:
    gradient, message = bad
    parameters, twins = entry.parameters(), entry.parameters()
    odd = Parameter(torch.ones(3, 2, dtype=torch.complex64 if "complex" in message else torch.float32))
    own = {"master_weights": None} if entry.base is None else {}
    optimizer = entry([{"params": parameters}, {"params": [odd], **own}])
    twin = entry([{"params": twins}, {"params": [Parameter(torch.ones(3, 2))], **own}])
    train(optimizer, parameters, range(trained))
    train(twin, twins, range(trained))
    set_gradients(parameters, seed=9)
    odd.grad = gradient(odd)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert odd.grad is not None and all(p.grad is not None for p in parameters), "a refused step lost a gradient"
    odd.grad = None
    assert torch.equal(odd, torch.ones_like(odd)), "a refused step moved a parameter"
    train(optimizer, parameters, range(3, 6))
    train(twin, twins, range(3, 6))
    assert_same(snapshot(optimizer, parameters), snapshot(twin, twins), "a refused step left traces")


@pytest.mark.pairwise(1)
@every_entry
@in_cpp_and_in_torch
@pytest.mark.parametrize(
    ("trained", "bad"),
    [(0, math.nan), (3, math.inf), (5, -math.inf)],
    ids=["first step", "before a reset", "in a warm-up"],
)
def test_non_finite_step_is_skipped_whole(
    entry: Entry, bad: float, trained: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    runs = []
    for skips in (True, False):
        parameters = entry.parameters()
        optimizer = entry([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}])
        train(optimizer, parameters, range(trained))
        if skips:
            before, groups = snapshot(optimizer, parameters), optimizer.state_dict()["param_groups"]
            set_gradients(parameters, seed=9)
            parameters[-1].grad.view(-1)[3] = bad
            optimizer.step()
            if trained:  # at first, there may now be a state of zeros
                assert_nothing_happened(optimizer, parameters, before, groups, "a skipped step")
        train(optimizer, parameters, range(trained, 8))
        runs.append(snapshot(optimizer, parameters))
    assert_same(*runs, "a skipped step left traces")


#: Without a rule for norms, which brings gradients of any size down; with one that does not.
UNTAMED = {
    "StableSPAM fp8 no clips": Entry(StableSPAM, {**FP8, "element_clip": None, "norm_clip": None}),
    "StableSPAM fp8 AdaClip": Entry(StableSPAM, {**FP8, "norm_clip": None, "reset_interval": 4}),
    "StableSPAM GradClip": Entry(StableSPAM, {**FP8, "norm_clip": "grad_clip", "max_norm": 1e30}),
    "Adaptive AdamW AdaClip": Entry(Adaptive, {"norm_clip": None}, ADAMW, EPS),
    "Adaptive AdamW fused no clips": Entry(
        Adaptive, {"element_clip": None, "norm_clip": None}, ADAMW, {**EPS, "fused": True}
    ),
    "Adaptive Adafactor AdaClip": Entry(Adaptive, {"norm_clip": None}, ("torch.optim", "Adafactor")),
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in {**ENTRIES, **UNTAMED}.items()])
def test_weights_stay_finite_and_go_on_moving_after_gradients_of_any_size(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 squares up to 1.8e19. One element or all of a matrix, of either sign; then steps as usual."""
    for dtype, extent, code in (
        (torch.float32, 1, "C++"),
        (torch.float32, 2 * 130, "C++"),
        (torch.bfloat16, 1, "C++"),
        (torch.float32, 2 * 130, "torch"),
        (torch.bfloat16, 1, "torch"),
    ):
        if not entry.takes(dtype):
            continue
        use(code, monkeypatch)
        parameters = make_parameters(dtype, [(2, 130), (5,)])
        optimizer = entry(parameters)
        case = f"{dtype}, {extent} elements, {code}"
        for number, size in enumerate((1.9e19, 1e13, 1e20, 1e30, 3.4e38, 1e18)):
            for sign in (1, -1):
                set_gradients(parameters, seed=number)
                parameters[0].grad.view(-1)[:extent] = sign * min(size, torch.finfo(dtype).max)
                optimizer.step()
                assert all(p.isfinite().all() for p in parameters), f"{case}: not finite after {sign * size}"
            train(optimizer, parameters, range(3))
        before = [p.detach().clone() for p in parameters]
        train(optimizer, parameters, range(20))
        for p, was in zip(parameters, before, strict=True):
            assert p.isfinite().all(), f"{case}: not finite, 20 steps after"
            assert (p != was).any(), f"{case}: a tensor of {tuple(p.shape)} no longer moves"


@pytest.mark.parametrize("size", [1.9e19, 1e30, 3.4e38])
def test_a_gradient_too_large_to_be_squared_leaves_no_trace(size: float) -> None:
    """Of a block of 128 elements, the others would stand still for thousands of steps if it left one."""
    runs = []
    for steps in (1, 0):
        parameters = make_parameters(shapes=[(2, 130), (5,)])
        optimizer = LowBitAdamW(parameters, lr=LR, moments="fp8")
        train(optimizer, parameters, range(3))
        for _ in range(steps):
            set_gradients(parameters, seed=9)
            parameters[0].grad.view(-1)[7] = size
            optimizer.step()
            assert optimizer.gradient_statistics()[parameters[0]].maximum == math.inf, "the step was not skipped"
        train(optimizer, parameters, range(3, 8))
        runs.append(snapshot(optimizer, parameters))
    assert_same(*runs, "the gradient left a trace")


@every_entry
def test_grad_scaler(entry: Entry) -> None:
    """With a scale that is a power of two nothing is rounded, and the run is the one without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    parameters, plain = entry.parameters(), entry.parameters()
    optimizer, without = entry(parameters), entry(plain)
    for step in range(7):
        set_gradients(plain, seed=step)
        directions = [p.grad for p in plain]
        optimizer.zero_grad()
        loss = torch.stack([(p * d).sum().float() for p, d in zip(parameters, directions, strict=True)]).sum()
        scaler.scale(loss).backward()
        if step == 4:
            parameters[-1].grad.view(-1)[0] = math.inf
        else:
            without.step()
        scaler.unscale_(optimizer)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < scale if step == 4 else scaler.get_scale() >= scale
    assert_same(snapshot(optimizer, parameters), snapshot(without, plain), "the scaler changed the trajectory")


@every_entry
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(entry: Entry, set_to_none: bool) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    for steps in (range(1), range(1, 2)):
        train(optimizer, parameters, steps)
        optimizer.zero_grad(set_to_none=set_to_none)
        for p in parameters:
            assert (p.grad is None) if set_to_none else torch.equal(p.grad, torch.zeros_like(p)), f"left {p.grad}"


# --- options ---


@every_entry
def test_options_may_be_a_group_s(entry: Entry) -> None:
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


@every_entry
def test_groups_train_with_their_own_options(entry: Entry) -> None:
    parameters, twins = entry.parameters(), entry.parameters()
    optimizer = entry([{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 0.0}])
    twin = entry([{"params": twins[:-1]}, {"params": twins[-1:], "lr": LR}])
    train(optimizer, parameters, range(3))
    train(twin, twins, range(3))
    assert torch.equal(parameters[-1], entry.parameters()[-1]), "a group with lr=0 moved"
    assert_same(
        [p.detach() for p in parameters[:-1]], [p.detach() for p in twins[:-1]], "the lr of a group reaches another"
    )
    optimizer.param_groups[1]["lr"] = LR
    train(optimizer, parameters, range(3, 4))
    assert not torch.equal(parameters[-1], entry.parameters()[-1]), "lr is not read from the group at each step"


@every_entry
def test_a_group_added_in_mid_training_is_one_without_gradients_before(entry: Entry) -> None:
    parameters, twins = entry.parameters(), entry.parameters()
    optimizer, twin = entry(parameters[:3]), entry([{"params": twins[:3]}, {"params": twins[3:], "lr": 0.5}])
    train(optimizer, parameters[:3], range(3))
    train(twin, twins[:3], range(3))
    optimizer.add_param_group({"params": parameters[3:], "lr": 0.5})
    train(optimizer, parameters, range(3, 8))
    train(twin, twins, range(3, 8))
    assert_same(snapshot(optimizer, parameters), snapshot(twin, twins), "the added group trains differently")
    assert optimizer.state[parameters[0]]["steps"] == 8 and optimizer.state[parameters[-1]]["steps"] == 5


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.1, total_steps=8, cycle_momentum=bool({"betas", "momentum"} & optimizer.defaults.keys())
    ),
}


@pytest.mark.pairwise(1)
@entries_and_rates
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_are_followed(entry: Entry, schedule: str, lr_is_tensor: bool) -> None:
    """The same values, put into the groups by hand, give the same trajectory; as they change, that means they count."""
    parameters, by_hand = entry.parameters(), entry.parameters()
    optimizer, other = entry(parameters, lr=torch.tensor(LR) if lr_is_tensor else LR), entry(by_hand)
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
    assert_same(
        [p.detach() for p in parameters], [p.detach() for p in by_hand], f"{schedule} with rates {rates} differs"
    )


@entries(lambda entry: entry.takes_tensor_lr)
@in_cpp_and_in_torch
def test_lr_may_be_a_tensor(entry: Entry, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(code, monkeypatch)
    lr = 2.0**-7  # the same in all dtypes
    with_float, with_tensor = entry.parameters(), entry.parameters()
    train(entry(with_float, lr=lr), with_float, range(6))
    train(entry(with_tensor, lr=torch.tensor(lr)), with_tensor, range(6))
    for p, q in zip(with_float, with_tensor, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7, msg=lambda text: f"a tensor as lr changes it: {text}")


#: For each option a value that it must not have, and a few that are easily let through.
BAD: dict[str, list[Any]] = {
    "lr": [-1.0, True, torch.ones(2)],
    "betas": [(0.9, 1.0), (True, 0.9)],
    "eps": [-1e-8],
    "weight_decay": ["0.1"],
    "maximize": [1],
    **dict.fromkeys(("gamma1", "gamma2", "gamma3"), [1.0]),
    "norm_eps": [-1e-8],
    "spike_threshold": [0.0],
    "max_norm": [True],
    "element_clip": ["adaclip"],
    "norm_clip": ["ada-gn"],
    "reset_interval": [0],
    "warmup_steps": [2.5, False],
    "total_steps": ["100"],
    "matrices_only": ["True"],
    "moments": ["fp16"],
    "master_weights": ["fp32"],
    "density": [0.3],
}


def _bad_options() -> Iterator[Any]:
    for kind in dict.fromkeys(entry.kind for entry in ENTRIES.values()):
        for name in inspect.signature(kind.__init__).parameters:
            for value in BAD.get(name, ()):
                yield pytest.param(kind, name, value, id=f"{kind.__name__}-{name}-{value}")


def test_every_option_has_bad_values() -> None:
    assert BAD.keys() == OPTIONS.keys(), "an option without bad values to try, or values without an option"


@pytest.mark.parametrize(("kind", "name", "value"), list(_bad_options()))
def test_bad_options_are_refused(kind: type[GuardedOptimizer], name: str, value: Any) -> None:
    def make(parameters: list[Parameter], **options: Any) -> GuardedOptimizer:
        return kind(torch.optim.SGD(parameters) if kind is Adaptive else parameters, **options)  # type: ignore[arg-type]

    parameter, twin = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    message = rf"(?s){kind.__name__} needs {name} to be .*, got .*; "
    with pytest.raises(ValueError, match=message):
        make([parameter], **{name: value})
    optimizer, untouched = make([parameter]), make([twin])
    added = Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [added], name: value})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"
    optimizer.add_param_group({"params": [added]})  # it is not half there
    train(optimizer, [parameter], range(2))
    train(untouched, [twin], range(2))
    assert_same(snapshot(optimizer, [parameter]), snapshot(untouched, [twin]), "a refused group left traces")


def test_a_refused_wrapper_leaves_the_optimizer_as_it_was() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(ValueError, match="Adaptive needs gamma1"):
        Adaptive(wrapped, gamma1=1.0)
    assert wrapped.state_dict() == before, "a refused wrapper wrote into the groups"


@every_entry
def test_parameters_are_checked_as_in_torch(entry: Entry) -> None:
    first, second = make_parameters(entry.dtype, [(2, 2), (2, 2)])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        entry(first)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty parameter list"):
        entry([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        entry([{"params": [first]}, {"params": [first]}])
    with pytest.raises(ValueError, match="names"):
        entry([("first", first), second])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        entry([first, first])
    optimizer = entry([first])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [first]})
    assert len(optimizer.param_groups) == 1


# --- closures, hooks, Lightning ---


@every_entry
def test_closure_runs_first_with_gradients_enabled(entry: Entry) -> None:
    with_closure, without = entry.parameters(), entry.parameters()
    optimizer, other = entry(with_closure), entry(without)

    def loss_of(parameters: list[Parameter]) -> Tensor:
        return torch.stack([(p.float() ** 2).sum() for p in parameters]).sum()

    def closure() -> Any:
        assert torch.is_grad_enabled(), "the closure runs without gradients"
        assert not optimizer.state, "state was read before the closure ran"
        optimizer.zero_grad()
        loss = loss_of(with_closure)
        loss.backward()
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    loss = loss_of(without)
    loss.backward()
    assert other.step() is None
    assert isinstance(returned, Tensor) and torch.equal(returned, loss), f"the closure's loss came back as {returned}"
    assert_same(snapshot(optimizer, with_closure), snapshot(other, without), "a step with a closure differs")


@every_entry
def test_hooks_of_torch(entry: Entry) -> None:
    parameters = entry.parameters()
    optimizer = entry(parameters)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": calls.append("after state_dict")})
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    train(optimizer, parameters, range(1))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    verbs = ["step", "state_dict", "load"]
    assert calls == [f"{when} {verb}" for verb in verbs for when in ("before", "after")], f"hooks ran as {calls}"
    assert "extra" in saved, "what the state_dict hook returns was ignored"


@every_entry
def test_load_pre_hooks_count(entry: Entry) -> None:
    parameters, others = entry.parameters(), entry.parameters()
    optimizer, other = entry(parameters), entry(others)
    train(optimizer, parameters, range(2))

    def count_from_ten(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        return {**loaded, "state": {i: {**state, "steps": torch.tensor(10)} for i, state in loaded["state"].items()}}

    other.register_load_state_dict_pre_hook(count_from_ten)
    other.load_state_dict(optimizer.state_dict())
    assert all(state["steps"] == 10 for state in other.state.values()), "what the user's pre-hook returns was ignored"


class _Model(LightningModule):
    """A linear layer on fixed data."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry
        self.layer = torch.nn.Linear(8, 4, dtype=entry.dtype)
        with torch.no_grad():
            for p, start in zip(self.parameters(), make_parameters(entry.dtype, [(4, 8), (4,)]), strict=True):
                p.copy_(start)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        self.optimizer = self.entry(self.parameters(), lr=0.1)
        return [self.optimizer], [StepLR(self.optimizer, step_size=1, gamma=0.5)]


@every_entry
def test_lightning_trains_as_a_loop_by_hand_does(entry: Entry, tmp_path: Path) -> None:
    data = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(2)).to(entry.dtype)
    model, by_hand = _Model(entry), _Model(entry)
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    (optimizer,), (scheduler,) = by_hand.configure_optimizers()
    for _ in range(2):
        for first in range(0, len(data), 2):
            optimizer.zero_grad()
            for batch in data[first : first + 2]:
                (by_hand.training_step(batch) / 2).backward()
            optimizer.step()
        scheduler.step()
    steps = {state["steps"].item() for state in model.optimizer.state.values()}
    assert steps == {8}, f"two epochs of eight batches, accumulated by two, are eight steps; counted {steps}"
    assert model.optimizer.param_groups[0]["lr"] == 0.025, "the scheduler did not halve lr after each of two epochs"
    assert_same(
        snapshot(model.optimizer, list(model.parameters())), snapshot(optimizer, list(by_hand.parameters())),
        "Lightning trains differently",
    )  # fmt: skip


# --- devices and layouts ---


def _close(left: Sequence[Tensor], right: Sequence[Tensor], what: str) -> None:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        torch.testing.assert_close(
            a.detach(), b.detach(), rtol=1e-5, atol=1e-6, msg=lambda text, i=index: f"{what}, parameter {i}: {text}"
        )


@every_entry
def test_layouts(entry: Entry) -> None:
    """Channels last, and a transposed matrix, train as their contiguous copies do."""
    conv, matrix, expanded = make_parameters(entry.dtype, [(4, 3, 2, 2), (6, 5), (4, 6)])
    strided = [Parameter(conv.detach().to(memory_format=torch.channels_last)), Parameter(matrix.detach().t()), expanded]
    plain = [Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in strided]
    optimizer, other = entry(strided), entry(plain)
    for step in range(6):
        for parameters in (strided, plain):
            set_gradients(parameters, seed=step)
            parameters[2].grad = torch.full((), 0.5 + step, dtype=entry.dtype).expand(4, 6)
        strided[0].grad = strided[0].grad.to(memory_format=torch.channels_last)
        strides = [p.stride() for p in strided]
        optimizer.step()
        other.step()
    assert [p.stride() for p in strided] == strides, "a parameter changed its layout"
    _close(strided, plain, "the memory layout changed the trajectory")


@pytest.mark.pairwise(1)
@entries(lambda entry: not entry.waits_for_the_host)  # only fused ones can be told on the device to skip a step
@pytest.mark.parametrize("lr_is_tensor", [False, True], ids=["float", "tensor"])
def test_no_host_sync(entry: Entry, lr_is_tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)
    parameters = entry.parameters()
    optimizer = entry(parameters, lr=torch.tensor(LR) if lr_is_tensor else LR)
    for step in range(6):  # new state, steps, a reset, a warm-up, a skipped step
        set_gradients(parameters, seed=step)
        if step == 5:
            parameters[-1].grad = torch.full_like(parameters[-1], math.inf)
        with NoHostSync():
            optimizer.step()


@pytest.mark.parametrize("sync", [lambda: bool(torch.ones(()) > 0), lambda: torch.tensor([True, False])])
def test_no_host_sync_is_noticed(sync: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match="host sync"), NoHostSync():
        sync()


@every_entry
def test_plain_torch_trains_as_cpp_does(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, twins = entry.parameters(), entry.parameters()
    train(entry(parameters), parameters, range(10))
    use("torch", monkeypatch)
    train(entry(twins), twins, range(10))
    _close(twins, parameters, "without C++ the trajectory is another")


# --- torch's AdamW ---


@pytest.mark.pairwise(1)
@in_cpp_and_in_torch
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.001, dtype=torch.float64)},
        {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
        {"betas": (0.0, 0.0)},
    ],
    ids=str,
)
def test_is_the_adamw_of_torch(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    parameters, references = make_parameters(dtype), make_parameters(dtype)
    optimizer = LowBitAdamW(parameters, moments="fp32", **options)
    reference = torch.optim.AdamW(references, **options)
    for step in range(20):
        for optimizer_, parameters_ in ((optimizer, parameters), (reference, references)):
            set_gradients(parameters_, seed=step)
            parameters_[2].grad = None if step in (3, 4) else parameters_[2].grad
            optimizer_.step()
        for p, q in zip(parameters, references, strict=True):
            torch.testing.assert_close(
                p, q, rtol=tolerance, atol=tolerance,
                msg=lambda text, at=(step, tuple(p.shape)): f"step, shape = {at}: {text}",
            )  # fmt: skip
