"""StableSPAM against golden vectors and the slow reference; what every optimizer keeps to is in `conformance`."""

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from tests.optim.parameters import assert_same, make_parameters, set_gradients, train
from tests.references.stable_spam import Reference

ORACLE = Path(__file__).parents[1] / "data" / "stable_spam.npz"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("scale", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize("gamma2", [0.9, 0.0])  # at 0, AdaGN blows a vanishing gradient up by 1/ε
def test_extreme_but_finite_gradients_train(scale, history, gamma2):
    """n² overflows fp32 from n = 1.8e19 and vanishes below 1e-23; neither may skip a step or leave a NaN."""
    parameter = Parameter(torch.ones(4, 8))
    optimizer = StableSPAM([parameter], lr=1e-2, gamma2=gamma2)
    train(optimizer, [parameter], range(history))
    pattern = torch.linspace(-1, 1, 32).reshape(4, 8)
    before = parameter.detach().clone()
    parameter.grad = pattern * scale
    optimizer.step()
    state = optimizer.state[parameter]
    assert all(value.isfinite().all() for value in (parameter, *state.values())), f"not finite: {parameter} {state}"
    assert state["steps"] == history + 1, "a finite step was skipped"
    if scale > 1 and not history:
        assert torch.equal((before - parameter.detach()).sign(), pattern.sign()), "the update lost its direction"
    train(optimizer, [parameter], range(10, 13))
    assert parameter.isfinite().all(), "the extreme step poisoned later ones"


def test_zero_gradient_moves_only_by_weight_decay():
    parameter = Parameter(torch.ones(3))
    optimizer = StableSPAM([parameter], lr=0.5, weight_decay=0.5)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), 0.75)), f"got {parameter.detach()}, wanted 0.75"


def test_bf16_update_is_the_fp32_update_rounded_once():
    low = make_parameters(torch.bfloat16)
    high = [Parameter(p.detach().float()) for p in low]
    set_gradients(low, seed=0)
    for p, q in zip(low, high, strict=True):
        q.grad = p.grad.float()
    StableSPAM(low, lr=0.1, weight_decay=0.1).step()
    StableSPAM(high, lr=0.1, weight_decay=0.1).step()
    assert_same([p.detach() for p in low], [q.detach().bfloat16() for q in high], "bf16 is not fp32 rounded")


def test_bf16_preset_multiplier_is_accurate():
    """1 − γ2ᵗ in fp32, taken literally, is off by more than 1e-3 here."""
    parameter, generator = Parameter(torch.zeros(1)), torch.Generator().manual_seed(0)
    optimizer = StableSPAM([parameter], preset="bf16")
    reference = Reference(parameter, gamma1=0.85, gamma2=0.99999)
    for step in range(300):
        parameter.grad = torch.randn(1, generator=generator).exp()
        optimizer.step()
        reference.step(parameter.grad)
        state = optimizer.state[parameter]
        multiplier = (state["norm_mean"] / (state["norm_mean_square"].sqrt() + 1e-8)).item()
        error = abs(multiplier / reference.multiplier - 1)
        assert error < 1e-6, f"step {step + 1}: {multiplier} against {reference.multiplier}, relative error {error}"


def test_options_are_read_from_the_group_at_each_step_and_groups_can_be_added():
    first, second = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer = StableSPAM([first], lr=1e-2)
    train(optimizer, [first], range(2))
    optimizer.add_param_group({"params": [second], "lr": 1e-3, "reset_interval": 2})
    train(optimizer, [first, second], range(2, 4))
    assert optimizer.state[first]["steps"] == 4 and optimizer.state[second]["steps"] == 2, "counters are per parameter"
    assert optimizer.state[second]["steps_since_reset"] == 1, "the added group's reset_interval was ignored"
    before = first.detach().clone()
    for name, value in {"lr": 0.5, "betas": (0.0, 0.0), "gamma1": 0.0, "gamma2": 0.0, "weight_decay": 0.5}.items():
        optimizer.param_groups[0][name] = value
    train(optimizer, [first], range(4, 5))
    expected = before * 0.75 - 0.5 * first.grad.sign()  # without memory Adam's update is the sign
    torch.testing.assert_close(first.detach(), expected, rtol=1e-4, atol=1e-4, msg="a changed option was not read")
