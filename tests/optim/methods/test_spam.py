"""SPAM against its slow reference, and the choice of the elements that have moments."""

import math

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_close, make_parameters, set_gradients
from tests.references.spam import Reference

SHAPES = [(), (7,), (0, 3), (5, 6), (3, 2, 2, 2)]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "code"),
    [(torch.float32, 1e-5, "C++"), (torch.float32, 1e-5, "torch"), (torch.float64, 1e-11, "torch")],
    ids=["fp32, C++", "fp32", "fp64"],
    indirect=["code"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"spike_threshold": 4.0},
        {"spike_threshold": 4.0, "reset_interval": 23, "warmup_steps": 5, "weight_decay": 0.1},
        {"spike_threshold": 4.0, "reset_interval": 22, "warmup_steps": 0, "maximize": True, "betas": (0.8, 0.99)},
        {"spike_threshold": 4.0, "reset_interval": None, "warmup_steps": 5},
        {"reset_interval": 4, "warmup_steps": 7, "eps": 1e-3},
    ],
    ids=["spikes", "spikes, resets, warm-up, decay", "spikes, resets, ascent", "no resets", "short interval"],
)
def test_reference(options, dtype, tolerance, code, within):
    within(in_pieces(8))
    parameters = make_parameters(dtype, SHAPES)
    references = [Reference(p, lr=1e-2, **options) for p in parameters]
    optimizer = SPAM(parameters, lr=1e-2, **options)
    for step in range(50):
        set_gradients(parameters, seed=step)
        parameters[1].grad = None if step in (3, 4) else parameters[1].grad
        if step == 6:
            parameters[-1].grad = torch.full_like(parameters[-1], math.nan)
        for p, reference in zip(parameters, references, strict=True):
            if p.grad is not None and step != 6:
                reference.step(p.grad)
        optimizer.step()
        assert_close(parameters, [reference.parameter for reference in references], tolerance, f"step {step + 1}")
    spikes = sum(reference.spikes for reference in references)
    assert (spikes > 0) == ("spike_threshold" in options), f"{spikes} spikes were cut: the test shows nothing"


@pytest.mark.parametrize("gradients", [19, 20])
@pytest.mark.parametrize("reset", [False, True], ids=["after the start", "after a reset"])
def test_spikes_are_cut_from_20_gradients_in_the_moments_on(gradients, reset):
    parameter = Parameter(torch.zeros(2))
    optimizer = SPAM([parameter], betas=(0.0, 0.999), reset_interval=30 if reset else None, warmup_steps=0)
    for _ in range(gradients + (29 if reset else 0)):  # the 30th gradient is the first one after the reset
        parameter.grad = torch.ones(2)
        optimizer.step()
    parameter.grad = torch.tensor([1.0, 100.0])
    optimizer.step()
    saw = optimizer.gradient_statistics()[parameter]
    assert saw.clipped == int(gradients == 20), f"{saw.clipped} elements cut with {gradients} gradients in the moments"
    limit = math.sqrt(5000 * (1 - 0.999**20)) if gradients == 20 else 100  # v of ones, not corrected for its bias
    mean = optimizer.state[parameter]["mean"].tolist()  # β1 = 0: the gradient itself
    assert mean == pytest.approx([1, limit], rel=1e-5), f"the gradient 1, 100 is {mean} after SpikeClip"


def test_defaults_are_the_papers():
    group = SPAM([Parameter(torch.ones(2))]).param_groups[0]
    expected = {"spike_threshold": 5000.0, "reset_interval": 500, "warmup_steps": 150, "eps": 1e-6, "density": 1.0}
    assert {name: group[name] for name in expected} == expected
    assert (group["element_clip"], group["norm_clip"]) == ("spike_clip", None)


# --- density ---


def moved_elements(parameter, before):
    return parameter.detach() != before


def one_step(optimizer, parameter, seed):
    """Steps, with gradients of no zeros; which elements moved."""
    before = parameter.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = torch.rand(parameter.shape, generator=generator).add_(0.5).to(parameter.dtype)
    optimizer.step()
    return moved_elements(parameter, before)


def test_another_interval_draws_nothing_before_its_reset():
    """Otherwise an element would move by the moments of another."""
    parameter = Parameter(torch.ones(6, 16))
    optimizer = SPAM([parameter], lr=0.1, density=0.25, reset_interval=4, warmup_steps=0)
    drawn = [one_step(optimizer, parameter, seed=step) for step in range(5)][-1]
    for interval, step in ((5, 6), (None, 7), (1000, 8)):
        optimizer.param_groups[0]["reset_interval"] = interval
        moved = one_step(optimizer, parameter, seed=step)
        assert torch.equal(moved, drawn), f"step {step}, interval {interval}: other elements without a reset"
    optimizer.param_groups[0]["reset_interval"] = 9
    assert not torch.equal(one_step(optimizer, parameter, seed=9), drawn), "the reset drew no new elements"


def test_drawn_elements_follow_the_reference(code, within):
    """Spikes, resets, warm-up and decay included; what was drawn is seen in a twin that does not decay."""
    within(in_pieces(8))
    options = {"lr": 1e-2, "spike_threshold": 4.0, "reset_interval": 25, "warmup_steps": 3}
    [parameter], [twin] = make_parameters(torch.float64, [(5, 9)]), make_parameters(torch.float64, [(5, 9)])
    reference = Reference(parameter, weight_decay=0.1, **options)
    optimizer = SPAM([parameter], density=1 / 3, weight_decay=0.1, **options)
    shadow = SPAM([twin], density=1 / 3, **options)
    for step in range(50):
        set_gradients([parameter, twin], seed=step)
        twin.grad = parameter.grad
        before = twin.detach().clone()
        shadow.step()
        optimizer.step()
        assert parameter.grad is not None
        reference.step(parameter.grad, moves=moved_elements(twin, before))
        assert_close([parameter], [reference.parameter], 1e-11, f"step {step + 1}")
    assert reference.spikes, "no spike was cut: the test shows nothing"
