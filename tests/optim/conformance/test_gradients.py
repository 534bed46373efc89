"""What every optimizer does with gradients: missing, sparse, not finite, of any size."""

import gc
import math

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import Adaptive, LowBitAdamW, StableSPAM
from lightning_lowbit.optim.passes import SCALARS
from tests.optim.conformance.entries import (
    ADAMW,
    ENTRIES,
    EPS,
    FP8,
    LR,
    Entry,
    assert_nothing_happened,
    each_entry,
    entries_and_dtypes,
    every_entry,
)
from tests.optim.parameters import assert_same, make_parameters, set_gradients, snapshot, train, use
from tests.tables import each

STATISTICS = {*SCALARS[1:], "mean", "mean_square", "mean_weight"}


@pytest.mark.pairwise(1)
@entries_and_dtypes(torch.float32, torch.bfloat16, torch.float16, torch.float64)
def test_gradients_are_left_alone_and_statistics_are_wide(entry, dtype):
    """``Adaptive`` alone clips them, in place."""
    parameters, optimizer = entry.new(dtype)
    for step in range(6):
        set_gradients(parameters, seed=step)
        gradients = [p.grad for p in parameters]
        before = [g.clone() for g in gradients if g is not None]
        optimizer.step()
        for p, gradient, expected in zip(parameters, gradients, before, strict=True):
            is_kept = isinstance(optimizer, Adaptive) or torch.equal(p.grad, expected)
            assert p.grad is gradient and is_kept, f"p.grad changed for shape {tuple(p.shape)}"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert not torch.equal(parameters[-1], entry.parameters(dtype)[-1]), "the parameters did not move"
    for p in parameters:
        assert p.dtype == dtype and p.isfinite().all(), f"shape {tuple(p.shape)}: {p}"
        state = optimizer.state[p]
        dtypes = {name: value.dtype for name, value in state.items() if name in STATISTICS}
        narrow = {name: kept for name, kept in dtypes.items() if kept != wide and kept.itemsize > 1}  # FP8 has one byte
        assert not narrow, f"statistics of a {dtype} parameter are {narrow}, wanted {wide}"
        assert state["steps"] == 6 and state["steps"].dtype == torch.int64


@each_entry
def test_gradients_that_come_and_go(entry):
    parameters, optimizer = entry.new()
    index = len(parameters) - 2
    before = snapshot(optimizer, parameters)
    assert optimizer.step() is None
    assert_same(snapshot(optimizer, parameters), before, "a step without gradients left traces")
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
    alone, other = entry.new()
    for step in given:
        set_gradients(alone, seed=step)
        for p in alone[:index] + alone[index + 1 :]:
            p.grad = None
        other.step()
    assert_same(
        snapshot(other, [alone[index]]), snapshot(optimizer, [parameters[index]]),
        "the steps of a parameter without gradient, or its neighbors, count for it",
    )  # fmt: skip


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
def test_sparse_and_complex_gradients_are_refused(entry, bad, trained):
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
@pytest.mark.parametrize(
    ("trained", "bad"),
    [(0, math.nan), (3, math.inf), (5, -math.inf)],
    ids=["first step", "before a reset", "in a warm-up"],
)
def test_non_finite_step_is_skipped_whole(entry, bad, trained, code):
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
@pytest.mark.parametrize(
    ("entry", "dtype", "extent", "code"),
    [
        pytest.param(entry, dtype, extent, code, id=f"{name}-{dtype}-{code}")
        for name, entry in {**ENTRIES, **UNTAMED}.items()
        for dtype, extent, code in (
            (torch.float32, 2 * 130, "C++"),
            (torch.bfloat16, 1, "C++"),
            (torch.float32, 1, "torch"),
        )
        if entry.takes(dtype)
    ],
)
def test_weights_stay_finite_and_go_on_moving_after_gradients_of_any_size(entry, dtype, extent, code):
    """fp32 squares from 1e-23 up to 1.8e19. One element or all of a matrix, of either sign; then steps as usual."""
    parameters = make_parameters(dtype, [(2, 130), (5,)])
    optimizer = entry(parameters)
    with use(code):
        for number, size in enumerate((1.9e19, 1e13, 1e20, 1e30, 3.4e38, 1e18, 1e-30, 1e-44)):
            for sign in (1, -1):
                set_gradients(parameters, seed=number)
                parameters[0].grad.view(-1)[:extent] = sign * min(size, torch.finfo(dtype).max)
                optimizer.step()
                assert all(p.isfinite().all() for p in parameters), f"not finite after {sign * size}"
            train(optimizer, parameters, range(3))
        before = [p.detach().clone() for p in parameters]
        train(optimizer, parameters, range(20))
    for p, was in zip(parameters, before, strict=True):
        assert p.isfinite().all(), "not finite, 20 steps after"
        assert (p != was).any(), f"a tensor of {tuple(p.shape)} no longer moves"


@each("size", [1.9e19, 1e30, 3.4e38])
def test_a_gradient_too_large_to_be_squared_leaves_no_trace(size):
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


@each_entry
def test_grad_scaler(entry):
    """With a scale that is a power of two nothing is rounded, and the run is the one without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    (parameters, optimizer), (plain, without) = entry.new(), entry.new()
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


@each_entry
def test_a_step_keeps_no_gradient(entry):
    """Not even until Python collects cycles: that would be the memory of all gradients of several steps."""
    parameters, optimizer = entry.new()
    counts = []
    gc.freeze()  # what other tests have left is neither collected nor counted
    gc.disable()
    try:
        for step in range(4):
            train(optimizer, parameters, [step])
            optimizer.zero_grad()
            counts.append(sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects()))
    finally:
        gc.enable()
        gc.unfreeze()
    assert counts[3] <= counts[1], f"tensors after each step: {counts}"
