"""Master weights in fp16, and moments of some elements."""

import math
from functools import partial

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM, LowBitAdamW
from lightning_lowbit.optim.moments import NAMES
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.moments.helpers import final_loss
from tests.optim.parameters import set_gradients
from tests.references import moments as reference
from tests.tables import each


def masters_times_scale(optimizer, parameter):
    state = optimizer.state[parameter]
    return state["master"].float() * state["master_scale"]


@pytest.mark.slow
def test_training_with_masters_is_nearly_as_good_as_in_fp32():
    """At a rate of 2e-4 and less, half a place of bf16 or less for most weights here."""
    full, masters, bare = (
        [final_loss(partial(LowBitAdamW, moments="fp32", master_weights=kind), seed, 2e-4, dtype) for seed in range(3)]
        for dtype, kind in ((torch.float32, None), (torch.bfloat16, "fp16"), (torch.bfloat16, None))
    )
    ratios = [[low / high for low, high in zip(losses, full, strict=True)] for losses in (masters, bare)]
    assert max(ratios[0]) < 1.05, f"losses in bf16 with masters, over those in fp32: {ratios[0]}"
    assert min(ratios[1]) > 1.05, f"losses in bf16 without masters, over those in fp32: {ratios[1]}: the test is blind"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_their_masters_rounded(dtype, code):
    parameters = [Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 130), (50,), ())]
    optimizer = LowBitAdamW(parameters, lr=1e-2, master_weights="fp16")
    for step in range(5):
        set_gradients(parameters, seed=step)
        optimizer.step()
        for p in parameters:
            other = (p != masters_times_scale(optimizer, p).to(dtype)).float().mean().item()
            assert other == 0, f"step {step}: {other:.1%} of the elements are not their masters, rounded"


def test_scale_of_the_masters_follows_the_weights():
    p = Parameter(torch.full((2, 130), 0.01, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=0.01, weight_decay=0.0, master_weights="fp16")
    scales = []
    for _ in range(60):
        p.grad = -torch.ones_like(p)
        before = p.detach().abs().max().item()
        optimizer.step()
        state = optimizer.state[p]
        scales.append(state["master_scale"].item())
        assert math.frexp(scales[-1])[0] == 0.5, f"the scale {scales[-1]} is no power of two"
        room = torch.finfo(torch.float16).max * scales[-1] / before
        assert 3.9 < room < 32, f"fp16 reaches {room} times the largest weight"
        assert state["master"].isfinite().all()
    assert 30 < scales[-1] / scales[0] < 130, f"weights grew from .01 to .6, the scale from {scales[0]} to {scales[-1]}"


@each("size", [0.0, 1e-30, 1e-6, 1e-2, 1.0, 1e4, 1e38])
def test_masters_of_any_size_train(size):
    """One step may be far larger than all weights: those that begin at almost 0, as of a last layer."""
    start = (torch.rand(3, 130, generator=torch.Generator().manual_seed(0)) + 0.5).mul(size).bfloat16()
    low, full = Parameter(start.clone()), Parameter(start.float())
    lr = max(1e-3, size / 500)  # of 1, a quarter of a place of bf16
    optimizers = (
        LowBitAdamW([low], lr=lr, weight_decay=0.0, moments="fp32", master_weights="fp16"),
        LowBitAdamW([full], lr=lr, weight_decay=0.0, moments="fp32"),
    )
    for step in range(20):
        for p, optimizer in zip((low, full), optimizers, strict=True):
            set_gradients([p], seed=step // 10)
            p.grad = p.grad.bfloat16().to(p.dtype)
            optimizer.step()
        master = masters_times_scale(optimizers[0], low)
        assert master.isfinite().all() and low.isfinite().all()
        largest = full.detach().abs().max().item()
        # Each step rounds masters once, by at most half a place of fp16 of the largest.
        error = (master - full.detach()).abs().max().item() / largest
        assert error < (step + 1) * 2**-11, f"step {step}: masters are {error:.2e} of the largest weight off"
        error = (low.detach().float() - full.detach()).abs().max().item() / largest
        assert error < (step + 1) * 2**-11 + 2**-8, f"step {step}: weights are {error:.2e} of the largest off"


def is_drawn(shape, every, last_reset, number):
    mask = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.bool)
    for row, columns in enumerate(reference.drawn_columns(shape, every, last_reset, number)):
        mask[row, columns] = True
    return mask.view(shape)


@pytest.mark.parametrize("piece", [8, 2**18])
def test_only_what_was_drawn_moves_until_the_next_reset(piece, within):
    within(in_pieces(piece))
    shapes = [(6, 8), (6, 8), (5, 10), (4, 1), (2, 3, 7), (2, 3)]
    parameters = [Parameter(torch.zeros(shape)) for shape in (*shapes, (9,))]
    optimizer = SPAM(parameters, lr=1e-3, density=0.25, reset_interval=3)
    for step in range(7):
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        for number, (p, old) in enumerate(zip(parameters, before, strict=True)):
            last_reset = max(0, (step + 1) // 3 * 3 - 1)  # steps before it
            wanted = is_drawn(tuple(p.shape), 4, last_reset, number) if p.dim() > 1 else torch.ones(9).bool()
            assert torch.equal(p != old, wanted), f"step {step}, {tuple(p.shape)}: {p != old} moved, not {wanted}"
            slots = (*p.shape[:-1], -(-p.shape[-1] // 4)) if p.dim() > 1 else p.shape
            for name in NAMES:
                found = optimizer.state[p][name].shape
                assert found == torch.Size(slots), f"{name} of {tuple(p.shape)} has the shape {found}, wanted {slots}"
    masks = [is_drawn((6, 8), 4, last_reset, number) for last_reset in (0, 2, 5) for number in range(2)]
    assert len({mask.numpy().tobytes() for mask in masks}) == 6, "parameters or resets share a choice"
