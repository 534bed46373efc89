"""One result along every path through the guards: golden vectors, statistics, and what the compiler makes of a step."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_same, make_parameters, set_gradients, snapshot, train

ORACLE = Path(__file__).parents[1] / "data" / "stable_spam.npz"
HYPER = ("lr", "eps", "gamma1", "gamma2", "gamma3", "reset_interval")
# What fp32 loses in 60 steps on parameters of about 1.
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def follow_oracle(
    optimizers=1, compiled=False, chosen=range(3), steps=None, dtype=torch.float32, near=NEAR, decay=1, resets=True
):
    """Steps along the golden vectors; one optimizer for all parameters, or each its own; ``decay`` is one of two."""
    with np.load(ORACLE) as file:
        oracle = dict(file)
    hyper = {name: oracle[f"hyper/{name}"].item() for name in HYPER}
    hyper["betas"] = (oracle["hyper/beta1"].item(), oracle["hyper/beta2"].item())
    hyper["weight_decay"] = oracle["hyper/weight_decays"][decay].item()
    if not resets:
        hyper["reset_interval"] = 10**6
    parameters = [Parameter(torch.tensor(oracle[f"p{i}/init"], dtype=dtype)) for i in chosen]
    shares = [parameters] if optimizers == 1 else [[p] for p in parameters]
    made = [StableSPAM(share, **hyper) for share in shares]
    take = [torch.compile(optimizer.step) if compiled else optimizer.step for optimizer in made]
    for step in range(steps or oracle["hyper/steps"].item()):
        for i, p in zip(chosen, parameters, strict=True):
            p.grad = torch.tensor(oracle[f"p{i}/grads"][step], dtype=dtype)
        for step_of_one in take:
            step_of_one()
        saw = {p: row for optimizer in made for p, row in optimizer.gradient_statistics().items()}
        for i, p in zip(chosen, parameters, strict=True):
            where = f"p{i} at step {step + 1}: "
            expected = oracle[f"p{i}/wd{decay}/{'params' if resets else 'params_no_reset'}"][step]
            np.testing.assert_allclose(p.detach().numpy(), expected, **near, err_msg=where + "parameter")
            for name, key in {"maximum": "gmax", "threshold": "threshold", "clipped": "n_clipped",
                              "norm": "norm_after_clip", "norm_after": "norm_multiplier",
                              "steps_since_reset": "adam_step"}.items():  # fmt: skip
                expected = oracle[f"p{i}/{key}"][step]
                if name == "norm_after" and oracle[f"p{i}/gmax"][step] == 0:
                    expected = 0  # a zero gradient stays zero, whatever norm it should have
                if name == "steps_since_reset" and not resets:
                    expected = step + 1
                np.testing.assert_allclose(getattr(saw[p], name).numpy(), expected, **near, err_msg=where + name)
    if resets and steps is None:
        for i, p, optimizer in zip(chosen, parameters, made * (len(parameters) // len(made)), strict=True):
            state = optimizer.state[p]
            for name, beta, key in zip(("mean", "mean_square"), hyper["betas"], ("exp_avg", "exp_avg_sq"), strict=True):
                expected = oracle[f"p{i}/wd{decay}/final_{key}"] / (1 - beta ** state["steps_since_reset"].item())
                np.testing.assert_allclose(state[name], expected, **near, err_msg=f"p{i}: final {name}")


@pytest.mark.pairwise
@pytest.mark.parametrize("piece", [8, None], ids=["small pieces", "whole tensors"])
@pytest.mark.parametrize("optimizers", [1, 3], ids=["one optimizer for all", "one optimizer for each"])
def test_golden_vectors_on_every_path(code, piece, optimizers, within):
    if piece is not None:
        within(in_pieces(piece))
    follow_oracle(optimizers)


def test_golden_vectors_in_float64():
    for decay, resets in ((0, True), (1, False)):
        follow_oracle(dtype=torch.float64, near={"rtol": 1e-12, "atol": 1e-12}, decay=decay, resets=resets)


@pytest.mark.slow
def test_golden_vectors_compiled():
    """22 steps: the first reset is in step 20. Two parameters, as the compiler's time grows with their number."""
    torch._dynamo.reset()
    follow_oracle(compiled=True, chosen=(0, 1), steps=22)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["torch"], indirect=True)
def test_compiled_fp8_moments_are_those_of_eager_code(code):
    """Codes are drawn, and where value and draw agree to an ulp the other side may be taken: a few may differ."""
    torch._dynamo.reset()
    options = {"lr": 1e-2, "reset_interval": 2, "moments": "fp8", "element_clip": None, "norm_clip": None}
    both = [make_parameters(shapes=[(6, 130)]) for _ in range(2)]
    made = [StableSPAM(parameters, **options) for parameters in both]
    takes = [made[0].step, torch.compile(made[1].step)]
    for step in range(3):
        for parameters, take in zip(both, takes, strict=True):
            set_gradients(parameters, seed=step)
            if step == 1:
                parameters[0].grad = torch.full_like(parameters[0], math.nan)
            take()
    [eager], [compiled] = both
    for name in ("mean", "mean_square"):
        left, right = (made[i].state[p][name].view(torch.uint8) for i, p in enumerate((eager, compiled)))
        differ = (left != right).sum().item()
        assert differ <= 4, f"{differ} of {left.numel()} codes of {name} differ under torch.compile"
    for name in ("steps", "steps_since_reset", "mean_scale", "mean_square_scale"):
        torch.testing.assert_close(made[1].state[compiled][name], made[0].state[eager][name], rtol=1e-5, atol=0)
    moved = (compiled - eager).abs().detach()
    assert (moved > 1e-5).sum() <= 8, f"{(moved > 1e-5).sum()} elements moved elsewhere, by up to {moved.max()}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_statistics_of_a_skipped_step(code, bad):
    """Maxima are those of this step; T and the count are what they were; nothing was cut, and no norm is known."""
    parameters = make_parameters(shapes=[(4,), (3, 5)])
    optimizer = StableSPAM([{"params": parameters[:1]}, {"params": parameters[1:]}], gamma3=0.5, reset_interval=3)
    train(optimizer, parameters, range(2))  # the next step would be a reset
    before = optimizer.gradient_statistics()
    set_gradients(parameters, seed=9)
    first, last = (p.grad for p in parameters)
    last[1, 2] = bad
    optimizer.step()
    saw = optimizer.gradient_statistics()
    assert saw[parameters[0]].maximum == first.abs().max(), "the maximum of a finite gradient in a skipped step"
    assert not saw[parameters[1]].maximum.isfinite(), f"{bad} does not show: {saw[parameters[1]]}"
    for p in parameters:
        assert saw[p].threshold == before[p].threshold, "a skipped step moved T"
        assert saw[p].steps_since_reset == before[p].steps_since_reset == 2, "a skipped step was counted"
        assert saw[p].clipped == saw[p].norm == saw[p].norm_after == 0, f"a skipped step shows {saw[p]}"


def test_statistics_are_of_the_parameters_with_a_gradient():
    parameters = make_parameters(shapes=[(3, 4), (5,), (2, 2)])
    optimizer = StableSPAM(parameters)
    assert optimizer.gradient_statistics() == {}, "there are statistics before the first step"
    set_gradients(parameters[:2], seed=0)
    optimizer.step()
    assert set(optimizer.gradient_statistics()) == set(parameters[:2])
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.gradient_statistics() == {}, "statistics of an older step remain"


def test_statistics_outlive_gradients_and_do_not_change_later():
    [parameter] = make_parameters(shapes=[(3, 4)])
    optimizer = StableSPAM([parameter])
    train(optimizer, [parameter], range(2))
    row = optimizer.gradient_statistics()[parameter]
    copies = [value.clone() for value in row]
    optimizer.zero_grad()
    train(optimizer, [parameter], range(2, 4))
    assert_same(list(row), copies, "statistics of an older step changed")
    before = snapshot(optimizer, [parameter])
    optimizer.gradient_statistics()
    assert_same(snapshot(optimizer, [parameter]), before, "reading statistics changed the state")


def test_a_copied_optimizer_has_its_own_statistics():
    [parameter] = make_parameters(shapes=[(3, 4)])
    optimizer = StableSPAM([parameter])
    train(optimizer, [parameter], [0])
    twin_parameter, twin = copy.deepcopy((parameter, optimizer))
    train(twin, [twin_parameter], [1])
    assert set(optimizer.gradient_statistics()) == {parameter}
    assert set(twin.gradient_statistics()) == {twin_parameter}, "a copy shows the statistics of another's parameters"
