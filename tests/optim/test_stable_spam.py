"""StableSPAM against golden vectors and the slow reference; what every optimizer keeps to is in `conformance`."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_same, make_parameters, set_gradients, train
from tests.references.stable_spam import Reference, step_all

ORACLE = Path(__file__).parents[1] / "data" / "stable_spam.npz"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("decay_index", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("resets", [True, False])
def test_oracle(dtype, tolerance, decay_index, resets):
    with np.load(ORACLE) as file:
        oracle = dict(file)
    hyper = {name: oracle[f"hyper/{name}"].item() for name in ("lr", "eps", "gamma1", "gamma2", "gamma3")}
    beta1, beta2 = oracle["hyper/beta1"].item(), oracle["hyper/beta2"].item()
    interval = oracle["hyper/reset_interval"].item() if resets else 10**6
    parameters = [Parameter(torch.tensor(oracle[f"p{i}/init"], dtype=dtype)) for i in range(3)]
    weight_decay = oracle["hyper/weight_decays"][decay_index].item()
    optimizer = StableSPAM(
        parameters, betas=(beta1, beta2), weight_decay=weight_decay, reset_interval=interval, **hyper
    )
    near = {"rtol": tolerance, "atol": tolerance}
    for step in range(oracle["hyper/steps"].item()):
        for i, p in enumerate(parameters):
            p.grad = torch.tensor(oracle[f"p{i}/grads"][step], dtype=dtype)
        optimizer.step()
        for i, p in enumerate(parameters):
            where, state = f"p{i} at step {step + 1}: ", optimizer.state[p]
            multiplier = state["norm_mean"] / (state["norm_mean_square"].sqrt() + hyper["eps"])
            key = "params" if resets else "params_no_reset"
            expected = oracle[f"p{i}/wd{decay_index}/{key}"][step]
            np.testing.assert_allclose(p.detach().numpy(), expected, **near, err_msg=where + "parameter")
            np.testing.assert_allclose(state["threshold"], oracle[f"p{i}/threshold"][step], **near, err_msg=where + "T")
            np.testing.assert_allclose(
                multiplier, oracle[f"p{i}/norm_multiplier"][step], **near, err_msg=where + "AdaGN"
            )
            k = oracle[f"p{i}/adam_step"][step] if resets else step + 1
            assert state["steps_since_reset"] == k, f"{where}k is {state['steps_since_reset']}, not {k}"
    if resets:
        for i, p in enumerate(parameters):
            state, k = optimizer.state[p], optimizer.state[p]["steps_since_reset"].item()
            for name, beta, key in (("mean", beta1, "exp_avg"), ("mean_square", beta2, "exp_avg_sq")):
                expected = oracle[f"p{i}/wd{decay_index}/final_{key}"] / (1 - beta**k)
                np.testing.assert_allclose(state[name], expected, **near, err_msg=f"p{i}: final {name}")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "reset_interval": 3},
        {"gamma1": 0.85, "gamma2": 0.99999},
        {"betas": (0.0, 0.0), "gamma1": 0},
    ],
    ids=["defaults", "decay and resets", "bf16 preset", "no memory"],
)
def test_reference(dtype, tolerance, options, within):
    within(in_pieces(8))
    parameters = make_parameters(dtype)
    references = [Reference(p, lr=1e-2, **options) for p in parameters]
    optimizer = StableSPAM(parameters, lr=1e-2, **options)
    for step in range(10):
        set_gradients(parameters, seed=step)
        parameters[2].grad = None if step in (3, 4) else parameters[2].grad
        if step == 5:
            for p in parameters:
                p.grad = torch.zeros_like(p)
        if step == 6:
            parameters[-1].grad = torch.full_like(parameters[-1], math.nan)
        parameters[-2].grad = parameters[-2].grad.t().contiguous().t()  # non-contiguous
        step_all(references, [p.grad for p in parameters])
        optimizer.step()
        for p, reference in zip(parameters, references, strict=True):
            torch.testing.assert_close(
                p.detach().double(), reference.parameter, rtol=tolerance, atol=tolerance,
                msg=lambda text, at=(step, tuple(p.shape)): f"step, shape = {at}: {text}",
            )  # fmt: skip


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
